"""How long submitting 10,000 array tasks takes, beside submitit and the bare sbatch calls.

`python -m benchmarks.submit [--tasks N]`. The Slurm commands are stand-ins that answer at once: the
table shows what the submitting side costs, not a controller.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpc import status, submit
from hpc.plan import Job, Plan, Resources
from hpc.site import Backend, Placement, Site

COMMANDS = {
    "sbatch": 'n=$(wc -l <"$0.calls"); echo x >>"$0.calls"\n'
    'case "$*" in *--parsable*) ;; *) printf "Submitted batch job " ;; esac; echo $((n + 100))',
    "scontrol": "echo PartitionName=cpu MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP",
    "squeue": 'cat "$0.rows"',
    "sinfo": "echo cpu",
}


def stand_ins(directory: Path) -> None:
    """Slurm's commands as shell scripts that answer at once."""
    for name, text in COMMANDS.items():
        path = directory / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        (directory / f"{name}.calls").touch()
    (directory / "squeue.rows").touch()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(directory: Path, *, tasks: int) -> list[tuple[str, float]]:
    """Seconds of each way."""
    resources = Resources(
        nodes=1, cpus_per_node=1, memory_mib=100, gpus_per_node=0, walltime_minutes=60
    )
    job = Job(
        name="rollout", role="rollout", command=("true",), resources=resources, array_size=tasks
    )
    run = directory / "run"
    plan = Plan(run="benchmark", run_directory=str(run), jobs=(job,))
    site = Site(
        name="benchmark",
        backend=Backend.slurm,
        placements={"default": Placement(partition="cpu")},
        accounting=False,
    )
    rows = [("prorl-hpc: check, render, write, record, sbatch",
             timed(lambda: submit.launch(run, plan, site)))]  # fmt: skip
    scripts = sorted((run / "scripts").iterdir())
    rows.append(("prorl-hpc: the same submit again (nothing to do)",
                 timed(lambda: submit.launch(run, plan, site))))  # fmt: skip
    size = site.max_array_size
    (directory / "bin" / "squeue.rows").write_text("".join(
        f"{n}|{100 + n // size}|{n % size}|benchmark.rollout|PENDING|Priority|N/A|N/A||"
        "prorl-hpc run=benchmark job=rollout\n"
        for n in range(tasks)
    ))  # fmt: skip
    rows.append(("prorl-hpc: states of all tasks", timed(lambda: status.states(run))))
    rows.append((f"limit: {len(scripts)} bare sbatch calls", timed(lambda: bare(scripts))))
    rows.append(("peer: submitit's map_array, same tasks",
                 timed(lambda: peer(directory / "submitit", tasks=tasks, size=size))))  # fmt: skip
    return rows


def bare(scripts: list[Path]) -> None:
    for script in scripts:
        subprocess.run(["sbatch", "--parsable", script], check=True, stdout=subprocess.DEVNULL)


def peer(directory: Path, *, tasks: int, size: int) -> None:
    """submitit with arrays of at most `size` tasks; one pickle per task is its design."""
    import submitit

    executor = submitit.SlurmExecutor(folder=directory)
    executor.update_parameters(partition="cpu", time=60, array_parallelism=size)
    for start in range(0, tasks, size):
        executor.map_array(abs, list(range(start, min(tasks, start + size))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prorl-benchmark-") as name:
        directory = Path(name)
        (directory / "bin").mkdir()
        stand_ins(directory / "bin")
        os.environ["PATH"] = f"{directory}/bin{os.pathsep}{os.environ['PATH']}"
        rows = measure(directory, tasks=options.tasks)
    print(f"submit of {options.tasks} array tasks\n")
    print(f"{'what':<52}{'seconds':>9}")
    for what, seconds in rows:
        print(f"{what:<52}{seconds:>9.2f}")


if __name__ == "__main__":
    main()
