"""Queues the indexes of a run's jobs with sbatch, each once. Decides nothing about which.

An intent with a token is written to the ledger before every `sbatch`, and the token stands in the
job's comment, so that a submission that was interrupted is found again instead of doubled.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc import ledger, slurm
from hpc.errors import NoAnswer, SubmitError
from hpc.files import publish
from hpc.ledger import format_indexes, parse_indexes
from hpc.plan import Job, Plan
from hpc.prepare import interpreter, load, templates
from hpc.render import Chunk, chunk, comment, render_chunk
from hpc.rundir import RunDirectory
from hpc.site import Site

PAUSE_SECONDS = 10.0
"""After a submission without an answer: a busy controller gets so long before it is asked again."""

LOOKS = 3
"""So often it is asked what became of it."""


def begin(run: RunDirectory, *, job: str, script: str, indexes: str | None) -> ledger.Intent:
    """Notes that `indexes` of a job are about to be queued, under a token of their own."""
    token = secrets.token_hex(8)
    intent = ledger.Intent(time=time.time(), job=job, token=token, script=script, indexes=indexes)
    ledger.append(run.ledger, entry=intent)
    return intent


def queue(
    script: Path, *, intent: ledger.Intent, mark: str, options: Sequence[str], tries: int
) -> str:
    """`sbatch` of a script under the intent's token, which follows `mark` in the job's comment.

    A submission that got no answer may have come about: it is made again (up to `tries` times) only
    once the controller has said that it knows no job with the token. Raises SubmitError; NoAnswer
    where nobody can tell whether the job is queued.
    """
    marked = [f"--comment={mark} token={intent.token}", *options]
    while True:
        tries -= 1
        try:
            return slurm.submit(script, options=marked)
        except NoAnswer:
            found = _found_later(intent)
            if found is not None:
                return found
            if tries < 1:
                raise


def _found_later(intent: ledger.Intent) -> str | None:
    """The job with the intent's token; None where the controller knows none such.

    Raises NoAnswer where it doesn't say.
    """
    for left in reversed(range(LOOKS)):
        time.sleep(PAUSE_SECONDS)
        try:
            return _queued().get(intent.token)
        except SubmitError as err:
            if not left:
                raise NoAnswer(str(err)) from err
    return None


def _queued() -> dict[str, str]:
    """Job id by token, of this user's jobs that were queued here."""
    return {
        row.comment.rpartition("token=")[2]: row.job_id.split("_")[0]
        for row in slurm.queue()
        if "token=" in row.comment
    }


def submit(
    run: RunDirectory, plan: Plan, site: Site, *, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Queues the wanted indexes of each job; returns the new Slurm job ids by job.

    What an earlier call began must have been taken over before (`adopt`): only then is known what
    is wanted. Raises SubmitError with Slurm's words.
    """
    ids: dict[str, list[str]] = {}
    for job in plan.ordered():
        missing = tuple(wanted.get(job.name, ()))
        dependencies = [job_id for name in job.after for job_id in ids.get(name, ())]
        ids[job.name] = [
            _submit_part(run, plan, site, job=job, part=part, indexes=part_indexes,
                         dependencies=dependencies)
            for part, part_indexes in _parts(job, site, missing)
        ]  # fmt: skip
    return ids


def _parts(
    job: Job, site: Site, indexes: tuple[int, ...]
) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
    """The chunks that hold the indexes, each with those that it holds."""
    if job.array_size is None:
        if indexes:
            yield Chunk(job=job.name, number=0, index_offset=0, size=None, limit=None), indexes
        return
    size = site.max_array_size
    highest = max(*indexes, job.array_size - 1) if indexes else 0
    for number in sorted({index // size for index in indexes}):
        inside = tuple(index for index in indexes if index // size == number)
        yield chunk(job, site, number=number, count=highest // size + 1), inside


def _submit_part(
    run: RunDirectory,
    plan: Plan,
    site: Site,
    *,
    job: Job,
    part: Chunk,
    indexes: tuple[int, ...],
    dependencies: list[str],
) -> str:
    script = run.script(part.name)
    if not script.exists():  # the array was scaled beyond its last chunk
        text = render_chunk(
            plan, site, job=job, part=part, templates=templates(), interpreter=interpreter()
        )
        publish(script, data=text.encode(), mode=0o755)
    text_indexes = None if part.size is None else format_indexes(indexes)
    options: list[str] = []
    if part.size is not None:
        limit = f"%{part.limit}" if part.limit is not None else ""
        tasks = format_indexes([index - part.index_offset for index in indexes])
        options.append(f"--array={tasks}{limit}")
    if dependencies:
        options.append(f"--dependency=after:{':'.join(dependencies)}")
    intent = begin(run, job=job.name, script=script.name, indexes=text_indexes)
    try:
        job_id = queue(script, intent=intent, mark=comment(plan, job), options=options, tries=1)
    except NoAnswer as err:
        raise SubmitError(
            f"whether job {job.name!r} was queued can't be told ({err}); the same command again "
            "finds it, or queues it"
        ) from err
    except SubmitError as err:
        raise SubmitError(f"job {job.name!r} wasn't queued: {err}") from err
    _record_submit(run, intent=intent, job_id=job_id, offset=part.index_offset)
    return job_id


def _record_submit(run: RunDirectory, *, intent: ledger.Intent, job_id: str, offset: int) -> None:
    entry = ledger.Submit(
        time=time.time(),
        job=intent.job,
        token=intent.token,
        job_id=job_id,
        indexes=intent.indexes,
        index_offset=offset,
    )
    ledger.append(run.ledger, entry=entry)


def adopt(run: RunDirectory) -> None:
    """Records submissions that were begun but not recorded, found by the token in their comment.

    Whether such a job lives, ends or has ended is for `states` to say. One that Slurm has forgotten
    is told by its start in the ledger, or has done nothing.
    """
    open_intents = half_made(run)
    if not open_intents:
        return
    by_token = _queued()
    _, site = load(run)
    for intent in open_intents:
        job_id = by_token.get(intent.token)
        if job_id is None:
            continue
        indexes = parse_indexes(intent.indexes)
        offset = indexes[0] // site.max_array_size * site.max_array_size
        _record_submit(run, intent=intent, job_id=job_id, offset=offset)


def half_made(run: RunDirectory) -> list[ledger.Intent]:
    """Submissions that were begun; whether they came about isn't recorded."""
    entries = ledger.read(run.ledger).entries
    recorded = (entry for entry in entries if isinstance(entry, ledger.Submit | ledger.Requeue))
    known = {entry.token for entry in recorded}
    return [
        entry for entry in entries if isinstance(entry, ledger.Intent) and entry.token not in known
    ]


def submitted(run: RunDirectory) -> set[tuple[str, int]]:
    """(job, index) that were queued before, or started by hand with sbatch."""
    found: set[tuple[str, int]] = set()
    for entry in ledger.read(run.ledger).entries:
        if isinstance(entry, ledger.Submit):
            found.update((entry.job, index) for index in parse_indexes(entry.indexes))
        elif isinstance(entry, ledger.Start):
            found.add((entry.job, entry.index))
    return found


def without(
    wanted: Mapping[str, tuple[int, ...]], known: set[tuple[str, int]]
) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(index for index in indexes if (name, index) not in known)
        for name, indexes in wanted.items()
    }
