"""Slurm's commands, each with a time limit and a typed answer. Knows no runs and no ledger.

Commands run without the SLURM_*, SBATCH_*, PMI* and MASTER_* variables of the caller, which would
otherwise change what a submission from inside a job means.
"""

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc.errors import NoAnswer, SiteError, SubmitError

TIMEOUT_SECONDS = 60.0
_LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "PMI", "MASTER_", "PRORL_")
_KEPT = ("SLURM_CONF",)
"""Says which cluster, not which job."""

_UNANSWERED = re.compile(
    r"timed out|unable to contact|connect failure|connection (refused|reset)|zero bytes", re.I
)
"""Words of a command that doesn't know what became of its request."""

_NO_DATE = ("", "N/A", "None", "Unknown", "(null)")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRow:
    """One job or array task as squeue or sacct knows it."""

    job_id: str
    """`123` or `123_4`."""
    name: str
    state: str
    """Slurm's own word: `PENDING`, `RUNNING`, `NODE_FAIL`, ..."""
    reason: str
    submitted: float | None
    started: float | None
    comment: str
    host: str = ""
    remembered: bool = False
    """Only accounting knows it: the controller has nothing more to do with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """What `scontrol show partition` says."""

    name: str
    up: bool
    max_walltime_minutes: int | None
    max_nodes: int | None


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that a job hands to nested submissions."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(_LEAKING)
    }


def call(argv: Sequence[str], *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Output of a Slurm command. Raises SubmitError in one line with Slurm's own words.

    NoAnswer is one of them: the controller may have done what was asked, or do it yet.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=scrubbed(os.environ),
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError as err:
        raise SubmitError(
            f"{argv[0]!r} isn't on this machine; go to a login node, or take site=local"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise NoAnswer(f"{argv[0]} didn't answer within {timeout_seconds:.0f} s") from err
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode(errors="replace").split()
        said = " ".join(words) or "no message"
        kind = NoAnswer if _UNANSWERED.search(said) else SubmitError
        raise kind(f"{argv[0]} failed: {said}")
    return done.stdout.decode(errors="replace")


def parsable_id(text: str) -> str:
    """The job id in `sbatch --parsable`'s answer (`123` or `123;cluster`)."""
    found = re.fullmatch(r"(\d+)(;\S*)?", text.strip())
    if found is None:
        raise SubmitError(f"sbatch answered {text.strip()!r}, not a job id")
    return found[1]


def submit(script: Path, *, options: Sequence[str]) -> str:
    """Submits a script and returns the job id. Raises SubmitError with Slurm's words.

    NoAnswer is one of them: the job may have been queued all the same.
    """
    return parsable_id(call(["sbatch", "--parsable", *options, str(script)]))


def cancel(job_ids: Sequence[str], *, signal: str | None = None) -> None:
    """Cancels jobs, or sends `signal` to their batch shells; jobs that ended are no error."""
    for start in range(0, len(job_ids), 200):
        options = [f"--signal={signal}", "--batch"] if signal else []
        call(["scancel", "--quiet", *options, *job_ids[start : start + 200]])


_QUEUE_FORMAT = "%A|%F|%K|%j|%T|%r|%V|%S|%B|%k"


def queue(job_ids: Sequence[str] | None = None) -> list[QueueRow]:
    """Jobs that the controller still knows, of `job_ids` or else all of this user's.

    Finished ones are included as long as the controller keeps them. Raises SubmitError when it
    can't be asked.
    """
    which = f"--jobs={','.join(job_ids)}" if job_ids is not None else f"--user={os.getuid()}"
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--format={_QUEUE_FORMAT}", which]
    try:
        text = call(argv)
    except SubmitError as err:
        if "Invalid job id" in str(err):  # none of them is known any more
            return []
        raise
    return [row for line in text.splitlines() if (row := _queue_row(line)) is not None]


def _queue_row(line: str) -> QueueRow | None:
    parts = line.split("|", maxsplit=9)
    if len(parts) < 10:
        return None
    job, array, task, name, state, reason, submitted, started, host, comment = parts
    return QueueRow(
        job_id=f"{array}_{task}" if task.isdigit() else job,
        name=name,
        state=state,
        reason=reason,
        submitted=timestamp(submitted),
        started=timestamp(started),
        comment=comment.strip(),
        host="" if host in ("n/a", *_NO_DATE) else host,
    )


def accounting(job_ids: Sequence[str]) -> list[QueueRow]:
    """What sacct remembers of the jobs. Raises SubmitError where accounting is off."""
    fields = "JobID,JobName,State,Submit,Start,NodeList"
    text = call(["sacct", "-n", "-P", "-X", f"--format={fields}", f"--jobs={','.join(job_ids)}"])
    rows = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 6:
            continue
        # a name may hold the separator; the other fields don't
        job, name, (state, submitted, started, host) = parts[0], "|".join(parts[1:-4]), parts[-4:]
        rows.append(
            QueueRow(
                job_id=job,
                name=name,
                state=state.split(" ")[0],
                reason="",
                submitted=timestamp(submitted),
                started=timestamp(started),
                comment="",
                host="" if host.startswith("None") else host,
                remembered=True,
            )
        )
    return rows


def timestamp(text: str) -> float | None:
    """Unix seconds of Slurm's local ISO time; None for `N/A` and its kin."""
    if text in _NO_DATE:
        return None
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except ValueError:
        return None


def job_fields(job_id: str) -> dict[str, str]:
    """`scontrol show job` as a table; fields whose values hold spaces are cut at the space."""
    text = call(["scontrol", "--oneliner", "show", "job", job_id], timeout_seconds=10.0)
    return dict(part.split("=", 1) for part in text.split() if "=" in part)


def end_time(job_id: str) -> float | None:
    """When the job's walltime ends (Unix seconds); None when Slurm doesn't say."""
    try:
        return timestamp(job_fields(job_id).get("EndTime", ""))
    except SubmitError:
        return None


def cancelled_by_hand(job_id: str) -> str:
    """Why a terminated job won't come back, when the controller says that it was cancelled."""
    try:
        text = call(
            ["squeue", "--noheader", "--states=CANCELLED", "--format=%T", f"--jobs={job_id}"],
            timeout_seconds=10.0,
        )
    except SubmitError:
        return ""
    return "cancelled with scancel" if text.strip() else ""


def partition(name: str) -> Partition:
    """Limits of a partition. Raises SiteError naming it when the cluster has none such."""
    try:
        text = call(["scontrol", "--oneliner", "show", "partition", name])
    except SubmitError as err:
        if "not found" in str(err) or "Invalid partition" in str(err):
            known = ", ".join(sorted(set(call(["sinfo", "-h", "-o", "%R"]).split())))
            raise SiteError(
                f"partition {name!r} doesn't exist on this cluster; it has {known}"
            ) from err
        raise
    fields = dict(part.split("=", 1) for part in text.split() if "=" in part)
    nodes = fields.get("MaxNodes", "")
    return Partition(
        name=name,
        up=fields.get("State", "UP") == "UP",
        max_walltime_minutes=minutes(fields.get("MaxTime", "UNLIMITED")),
        max_nodes=int(nodes) if nodes.isdigit() else None,
    )


def minutes(text: str) -> int | None:
    """Whole minutes of `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + mins


def hostnames(node_list: str) -> tuple[str, ...]:
    """Host names of a node list such as `gpu[01-04]`. Raises SubmitError without Slurm."""
    if not set(node_list) & set("[,"):
        return (node_list,) if node_list else ()
    return tuple(call(["scontrol", "show", "hostnames", node_list]).split())
