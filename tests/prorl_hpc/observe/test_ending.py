"""How a run ended, and the buffer's numbers, from states and files made by hand."""

from pathlib import Path

import pytest

from hpc.status import JobState, Phase
from prorl_hpc.observe.buffer_counts import (
    BufferCounts,
    describe_counts,
    failures_by_task,
    recorded_counts,
)
from prorl_hpc.observe.culprit import ending, last_words
from prorl_hpc.run import Run


def state(
    job: str, phase: Phase, *, ended: float | None = None, reason: str = "", job_id: str = "1"
) -> JobState:
    return JobState(
        job=job, role=job, index=0, phase=phase, reason=reason, job_id=job_id, attempt=1,
        host="n1", started=0.0, ended=ended,
    )  # fmt: skip


def log(run: Run, job: str, text: str) -> None:
    directory = run.attempt_logs(job, index=0, attempt=1)
    directory.mkdir(parents=True)
    (directory / "out.log").write_bytes(text.encode("latin-1"))


def test_first_failure_is_the_culprit(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    log(run, "learner", "step 3\nprorl-hpc: the disk\nis full\nprorl-hpc: attempt 1 ended: x\n")
    found = [
        state("buffer", Phase.failed, ended=20.0, reason="lost its learner"),
        state("rollout", Phase.cancelled, reason="the run ended"),
        state("learner", Phase.failed, ended=10.0, reason="exit code 1"),
    ]
    end = ending(run, found)
    assert end is not None
    assert (end.failed, end.job) == (True, "learner")
    assert end.text == (
        'learner attempt 1 failed on n1: exit code 1; it said "the disk"; next: prorl-hpc logs '
        "r learner 0, mend it, prorl-hpc resume r"
    )


@pytest.mark.parametrize("phase", [Phase.pending, Phase.running, Phase.preempted])
def test_run_that_goes_on_has_no_end(phase: Phase, tmp_path: Path) -> None:
    found = [state("rollout", Phase.failed, ended=1.0), state("learner", phase)]
    assert ending(Run(tmp_path), found) is None


def test_other_ends(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    done = ending(run, [state("rollout", Phase.failed), state("learner", Phase.finished)])
    assert done is not None
    assert done.done
    assert not done.failed
    cancelled = ending(run, [state("learner", Phase.cancelled, reason="cancelled")])
    assert cancelled is not None
    assert cancelled.text == "cancelled; next: prorl-hpc resume r continues it"
    new = JobState(
        job="learner", role="learner", index=0, phase=Phase.pending, reason="not submitted",
        job_id="", attempt=0, host="", started=None, ended=None,
    )  # fmt: skip
    never = ending(run, [new])
    assert never is not None
    assert "never started" in never.text
    lost = [state("learner", Phase.unknown, reason="Slurm doesn't know job 1 any more")]
    assert ending(run, lost) is None
    gone = ending(run, [state("learner", Phase.unknown, reason="the run's supervisor is gone: x")])
    assert gone is not None
    assert "prorl-hpc resume r" in gone.text
    assert ending(run, []) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("\n\n", ""),
        ("Traceback\nValueError: no\n", "ValueError: no"),
        ("\xff\xfe bytes\n", "\ufffd\ufffd bytes"),
        ("x" * 500, "x" * 197 + "..."),
    ],
)
def test_last_words(text: str, words: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert last_words(run, state("learner", Phase.failed)) == ""
    log(run, "learner", text)
    assert last_words(run, state("learner", Phase.failed)) == words


STATUS = {
    "phase": "running", "note": "the disk is behind", "groups_open": 4, "groups_ready": 3,
    "groups_closed": 12, "groups_dropped": 1, "trajectories": 99, "leases": 4, "workers": 1,
    "counters": {"late": 2, "failure/swe": 1, "failure/sums": 5, "lost": 0, "closed_full": 12},
}  # fmt: skip


def test_buffer_counts_as_lines() -> None:
    text = describe_counts(BufferCounts(status=STATUS, age_seconds=720.0), ago="12 min")
    assert text.splitlines() == [
        (
            "buffer (as of 12 min ago): running, groups 4 open, 3 ready, 12 closed, 1 dropped; "
            "99 rollouts stored, 4 leases, 1 rollout node"
        ),
        "rollouts: 2 late",
        "infrastructure failures: sums 5, swe 1",
        "buffer says: the disk is behind",
    ]
    assert "as of" not in describe_counts(BufferCounts(status=STATUS, age_seconds=None))


def test_recorded_counts_survive_what_a_file_may_hold(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert recorded_counts(run, now=1.0) is None
    path = run.metrics("buffer")
    path.parent.mkdir()
    path.write_bytes(b'{"time": 5, "status": {"workers": 2}}\n{"time": 9, "stat')
    counts = recorded_counts(run, now=8.0)
    assert counts is not None
    assert (counts.age_seconds, counts.number("workers")) == (3.0, 2)
    path.write_bytes(b'{"status": 3}\n')
    assert recorded_counts(run, now=1.0) is None
    path.write_bytes(b'{"time": "x", "status": {"workers": true, "counters": [1]}}\n')
    odd = recorded_counts(run, now=1.0)
    assert odd is not None
    assert "0 rollout nodes" in describe_counts(odd)
    assert failures_by_task({"failure/a": "x", "failure/b": 2}) == {"b": 2}


def test_failures_are_told_by_kind_where_the_buffer_says_them() -> None:
    kinds = {f"swe: cause {number}": number for number in range(8)}
    status = {"counters": {"failure/swe": 28}, "failures": kinds | {"swe: odd": "x"}}
    line = describe_counts(BufferCounts(status=status, age_seconds=0.0)).splitlines()[-1]
    # the five most frequent of 0..7; text counts as nothing
    assert line == "infrastructure failures: " + ", ".join(
        f"swe: cause {number} {number}" for number in (7, 6, 5, 4, 3)
    )
