"""Another attempt of a job as a new job: elsewhere, where its node did it no good.

Knows Slurm's commands and the attempts' records; when to try again is decided in `hpc.attempts`.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpc import ledger
from hpc.attempts import MAX_REFUSALS, Next, bad_hosts
from hpc.context import LOCAL, Context
from hpc.errors import EXIT_USER, NoAnswer, SubmitError
from hpc.journal import past_attempts, read_exit, read_progress, record_exit, why_not
from hpc.prepare import load
from hpc.queueing import begin, queue
from hpc.render import comment

TRIES = 3
"""Submissions that may go without an answer."""


def avoided(context: Context, *, attempt: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes that did this job no good; none where it can't be told, or there is no choice."""
    several = environment.get("SLURM_JOB_NUM_NODES", "1") != "1"
    if several or environment.get("SLURM_JOB_RESERVATION"):
        return ()
    run, role, index = context.run, context.role, context.index
    attempts = past_attempts(run, role, index=index, attempt=attempt)
    return bad_hosts(attempts, progress=read_progress(run, role, index=index))


def resubmit(
    context: Context, *, script: Path, attempt: int, environment: Mapping[str, str]
) -> str:
    """Submits the script again for this index alone; returns the new job's id.

    On another node than those that did it no good, where the partition has any. Raises SubmitError;
    NoAnswer where the job may be queued all the same: a later resume finds it by its intent.
    """
    task = environment.get("SLURM_ARRAY_TASK_ID")
    options = [f"--array={task}"] if task else []
    avoid = avoided(context, attempt=attempt, environment=environment)
    plan, _ = load(context.run)
    mark = comment(plan, plan.job(context.job))
    indexes = str(context.index) if task else None
    intent = begin(context.run, job=context.job, script=script.name, indexes=indexes)
    try:
        elsewhere = [*options, f"--exclude={','.join(avoid)}"] if avoid else options
        new_id = queue(script, intent=intent, mark=mark, options=elsewhere, tries=TRIES)
    except NoAnswer:
        raise
    except SubmitError:
        if not avoid:
            raise
        # no other node is left
        new_id = queue(script, intent=intent, mark=mark, options=options, tries=TRIES)
    new_id += f"_{task}" if task else ""
    requeued(context, attempt=attempt, new_id=new_id, how="resubmit", token=intent.token)
    return new_id


def follow_up(
    context: Context, *, script: Path, attempt: int, environment: Mapping[str, str]
) -> None:
    """`resubmit`; where Slurm refuses, the attempt's recorded end becomes a failure.

    A run whose learner nobody starts again must not keep its nodes.
    """
    try:
        resubmit(context, script=script, attempt=attempt, environment=environment)
    except NoAnswer as err:
        print(f"prorl-hpc: {err}; prorl-hpc resume finds out", file=sys.stderr)
    except SubmitError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        end = read_exit(context.run, context.role, index=context.index, attempt=attempt)
        if end is not None:
            reason = f"{end.reason}; not submitted again: {err}"
            failed = msgspec.structs.replace(end, next=Next.failed, reason=reason)
            record_exit(context.run, context.role, failed)


def requeued(context: Context, *, attempt: int, new_id: str, how: str, token: str = "") -> None:
    entry = ledger.Requeue(
        time=time.time(),
        job=context.job,
        index=context.index,
        attempt=attempt,
        job_id=new_id,
        how=how,
        token=token,
    )
    ledger.append(context.run.ledger, entry=entry)


def refused(
    context: Context,
    *,
    attempt: int,
    reason: str,
    script: Path,
    environment: Mapping[str, str],
    now: float,
) -> None:
    """The node lacks what the job needs: another one gets a chance, where Slurm has others."""
    attempts = past_attempts(context.run, context.role, index=context.index, attempt=attempt - 1)
    elsewhere = (
        not context.job_id.startswith(LOCAL)
        and not environment.get("SLURM_JOB_RESERVATION")
        and context.max_attempts_without_progress > 0
        and sum(one.refused for one in attempts[1 - MAX_REFUSALS :]) < MAX_REFUSALS - 1
        and not why_not(context.run, context.job, index=context.index)
    )
    entry = ledger.Exit(
        time=now,
        job=context.job,
        index=context.index,
        attempt=attempt,
        code=EXIT_USER,
        next=Next.again if elsewhere else Next.failed,
        reason=reason,
    )
    record_exit(context.run, context.role, entry)
    if elsewhere:
        follow_up(context, script=script, attempt=attempt, environment=environment)
