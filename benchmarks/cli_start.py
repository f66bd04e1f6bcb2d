"""How fast the command line answers, beside a bare interpreter and an import of torch.

    python benchmarks/cli_start.py [--repeat N]

Each row is the median over N fresh processes on this machine, in the same run.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET_SECONDS = 0.4


def seconds(arguments: list[str], *, repeat: int, directory: Path) -> float:
    """Median wall time of a command; raises CalledProcessError when it fails."""
    taken = []
    for _ in range(repeat):
        started = time.monotonic()
        subprocess.run(
            [sys.executable, *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )
        taken.append(time.monotonic() - started)
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    cli = ["-m", "prorl_hpc.cli"]
    rows = [
        ("bare interpreter (the limit)", ["-c", "pass"]),
        ("prorl-hpc --help", [*cli, "--help"]),
        ("prorl-hpc submit --help", [*cli, "submit", "--help"]),
        ("prorl-hpc list", [*cli, "list"]),
        ("submit recipe=quickstart --dry-run", [*cli, "submit", "recipe=quickstart", "--dry-run"]),
    ]
    if importlib.util.find_spec("torch") is not None:
        rows.append(("import torch (what is avoided)", ["-c", "import torch"]))
    print(f"{'command':<36} {'seconds':>8}   median of {repeat}")
    with tempfile.TemporaryDirectory() as scratch:
        for title, arguments in rows:
            print(f"{title:<36} {seconds(arguments, repeat=repeat, directory=Path(scratch)):>8.3f}")
    print(f"target: --help below {TARGET_SECONDS} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
