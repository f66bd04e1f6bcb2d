"""The service as a job: `python -m prorl_hpc.service --run DIR`. Wires signals, log and exit codes.

What `prorl-hpc serve --submit` froze in `service-job.json` says what is served. Exit codes: 75
another attempt is to follow (walltime, preemption, an engine that was lost); 2 bad input.
"""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from hpc.allocation import Allocation
from hpc.errors import EXIT_CONTINUE, EXIT_USER, HpcError, UserError
from prorl_hpc.recipe import load_recipe
from prorl_hpc.run import Run
from prorl_hpc.service.job import read_where

log = logging.getLogger("prorl_hpc.service")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="prorl_hpc.service", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from prorl_hpc.service.serve import serve

    run = Run(given.run.resolve())
    try:
        allocation = Allocation.from_environment()
        asyncio.run(serve(load_recipe(run.recipe), read_where(run), allocation=allocation))
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER
    except HpcError as err:
        log.error("the service ends: %s: %s", type(err).__name__, err)
        return EXIT_CONTINUE
    return EXIT_CONTINUE  # whoever ends a service for good cancels its run


if __name__ == "__main__":
    sys.exit(main())
