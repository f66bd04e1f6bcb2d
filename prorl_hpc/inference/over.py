"""Whether the learner of a run has ended for good, by the ledger. Reads one file, asks nobody."""

from hpc import ledger
from hpc.attempts import Next
from prorl_hpc.run import Run

ROLE = "learner"


def learner_over(run: Run) -> str:
    """Why nothing is left to serve; empty while the learner goes on, may, or was never started.

    An end before the user's last resume doesn't count: the next attempt may not have begun yet.
    """
    over = ""
    jobs: set[str] = set()
    for entry in ledger.read(run.ledger).entries:
        if isinstance(entry, ledger.Start) and entry.role == ROLE:
            jobs.add(entry.job)
            over = ""
        elif isinstance(entry, ledger.Resume | ledger.Submit) and entry.job in jobs:
            over = ""
        elif isinstance(entry, ledger.Exit) and entry.job in jobs:
            over = _why(entry)
    return over


def _why(end: ledger.Exit) -> str:
    if end.next == Next.again:
        return ""
    if end.next == Next.finished:
        return "the run is finished"
    return f"the learner ended for good: {end.reason}"
