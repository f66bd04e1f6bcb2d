"""Slurm's commands as one small program on PATH, with its queue in a JSON file.

It knows what the cluster layer asks, refuses anything else, and never runs a job. `fake_slurm`
installs it; the test changes the queue through `FakeSlurm`.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNANSWERED = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
"""What sbatch says where it can't tell; `unanswered` in the state: was it `queued`, or `lost`?"""

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct")


@dataclass(frozen=True, kw_only=True)
class FakeSlurm:
    """The installed commands and their state."""

    directory: Path

    @property
    def state_file(self) -> Path:
        return self.directory / "state.json"

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text()))

    def change(self, **values: Any) -> None:
        self.state_file.write_text(json.dumps({**self.state(), **values}))

    def jobs(self) -> list[dict[str, str]]:
        return list(self.state()["jobs"])

    def set_job(self, job_id: str, **values: str) -> None:
        jobs = [{**job, **values} if job["id"] == job_id else job for job in self.jobs()]
        self.change(jobs=jobs)

    def calls(self, command: str) -> list[list[str]]:
        return [call[1:] for call in self.state()["calls"] if call[0] == command]


def install(directory: Path) -> FakeSlurm:
    """Writes the commands into `directory/bin`."""
    fake = FakeSlurm(directory=directory)
    (directory / "bin").mkdir(parents=True)
    state = {"next": 100, "jobs": [], "calls": [], "down": "", "partitions": ["cpu", "gpu"],
             "accounting": {}, "sbatch_error": "", "no_other_node": "", "unanswered": [],
             "squeue_silent": 0}  # fmt: skip
    fake.state_file.write_text(json.dumps(state))
    for command in COMMANDS:
        path = directory / "bin" / command
        path.write_text(
            f"#!/bin/sh\nexec {sys.executable} -IS {Path(__file__)} "
            f'{fake.state_file} {command} "$@"\n'
        )
        path.chmod(0o755)
    return fake


def main(state_file: Path, command: str, arguments: list[str]) -> int:
    state = json.loads(state_file.read_text())
    state["calls"].append([command, *arguments])
    options = dict(a.split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    try:
        if state["down"]:
            print(f"{command}: error: {state['down']}", file=sys.stderr)
            return 1
        return int(globals()[f"_{command}"](state, arguments, options))
    finally:
        state_file.write_text(json.dumps(state))


def _sbatch(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    if state["sbatch_error"]:
        print(f"sbatch: error: {state['sbatch_error']}", file=sys.stderr)
        return 1
    if "--exclude" in options and state["no_other_node"]:
        print(f"sbatch: error: {state['no_other_node']}", file=sys.stderr)
        return 1
    leaked = [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PMI"))]
    assert leaked in ([], ["SLURM_CONF"]), leaked
    unanswered = state["unanswered"].pop(0) if state["unanswered"] else ""
    if unanswered == "lost":
        print(UNANSWERED, file=sys.stderr)
        return 1
    number = str(state["next"])
    state["next"] += 1
    for task in _tasks(options.get("--array")):
        state["jobs"].append({
            "id": number if task == "" else f"{number}_{task}",
            "array": number, "task": task or "N/A", "state": "PENDING", "reason": "Resources",
            "comment": options.get("--comment", ""), "script": arguments[-1],
            "dependency": options.get("--dependency", ""), "submitted": "2026-01-01T00:00:00",
        })  # fmt: skip
    if unanswered == "queued":
        print(UNANSWERED, file=sys.stderr)
        return 1
    print(f"{number};cluster")
    return 0


def _tasks(text: str | None) -> list[str]:
    if text is None:
        return [""]
    tasks: list[str] = []
    for part in text.split("%")[0].split(","):
        low, _, high = part.partition("-")
        tasks += [str(n) for n in range(int(low), int(high or low) + 1)]
    return tasks


def _squeue(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    if state["squeue_silent"]:
        state["squeue_silent"] -= 1
        print("slurm_load_jobs error: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    wanted = options.get("--jobs")
    ids = None if wanted is None else wanted.split(",")
    rows = [job for job in state["jobs"] if ids is None or job["array"] in ids or job["id"] in ids]
    if ids is not None and not rows:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    for job in rows:
        fields = (job["array"], job["array"], job["task"], "name", job["state"], job["reason"],
                  job["submitted"], "N/A", "node1", job["comment"])  # fmt: skip
        print("|".join(fields))
    return 0


def _scancel(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    ids = [argument for argument in arguments if not argument.startswith("-")]
    for job in state["jobs"]:
        if job["id"] in ids and "--signal" not in options:
            job["state"] = "CANCELLED"
    return 0


def _scontrol(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    if arguments[-2] == "partition":
        if arguments[-1] not in state["partitions"]:
            print(f"Partition {arguments[-1]} not found")
            return 1
        print(f"PartitionName={arguments[-1]} MaxNodes=4 MaxTime=1-00:00:00 State=UP")
        return 0
    if arguments[-2] == "hostnames":
        print("gpu1\ngpu2")
        return 0
    return 2


def _sinfo(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    print("\n".join(state["partitions"]))
    return 0


def _sacct(state: dict[str, Any], arguments: list[str], options: dict[str, str]) -> int:
    if not state["accounting"]:
        print("Slurm accounting storage is disabled", file=sys.stderr)
        return 1
    for job_id, word in state["accounting"].items():
        print(f"{job_id}|a|name|{word}|2026-01-01T00:00:00|2026-01-01T00:00:01|node1")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
