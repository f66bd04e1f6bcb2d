"""The inference job: `python -m prorl_hpc.inference --run DIR`. Wires signals, log and exit codes.

Exit codes: 0 nothing is left to serve; 75 another attempt is to follow; 2 bad input.
"""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from hpc.allocation import Allocation, StopFlag
from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER, HpcError, UserError
from prorl_hpc.run import Run

log = logging.getLogger("prorl_hpc.inference")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="prorl_hpc.inference", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # More threads than cores make every step slower; the script says how many are ours.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from prorl_hpc.inference.job import serve

    try:
        allocation = Allocation.from_environment()
        stop = StopFlag.of(allocation).install()
        end = asyncio.run(serve(Run(given.run.resolve()), allocation=allocation, stop=stop))
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER
    except HpcError as err:
        log.error("inference job ends: %s: %s", type(err).__name__, err)
        return EXIT_CONTINUE
    log.info("inference job ends: %s", end.reason)
    return EXIT_DONE if end.finished else EXIT_CONTINUE


if __name__ == "__main__":
    sys.exit(main())
