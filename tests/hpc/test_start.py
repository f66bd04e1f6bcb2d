"""What a script does around its command, without running one."""

import threading
from pathlib import Path

import msgspec
import pytest

from hpc import context, journal, ledger, start
from hpc.errors import PlanError, UserError
from hpc.rundir import RunDirectory
from hpc.scratch import attempt_directory

SCRIPT = Path("scripts/learner.sbatch")


def variables(run: RunDirectory, **changes: str) -> dict[str, str]:
    run.logs.mkdir(parents=True, exist_ok=True)
    return {
        "PRORL_RUN_DIR": str(run.root),
        "PRORL_JOB": "learner",
        "PRORL_ROLE": "learner",
        "PRORL_INDEX": "0",
        "PRORL_ATTEMPTS_WITHOUT_PROGRESS": "2",
        "PRORL_ON_PREEMPT": "requeue",
        "PRORL_SCRATCH_BASE": str(run.root / "scratch"),
        "PRORL_WALLTIME_MINUTES": "10",
        "PRORL_JOB_ID": "local-1",
        **changes,
    }


def begin(run: RunDirectory, **changes: str) -> dict[str, str]:
    """The script's variables after a begin at time 1000."""
    given = variables(run, **changes)
    mine = context.Context.from_environment(given)
    text = start.begin(mine, script=SCRIPT, environment=given, now=1000.0)
    lines = (line.removeprefix("export ") for line in text.splitlines())
    return {**given, **dict(line.split("=", 1) for line in lines)}


def end(run: RunDirectory, given: dict[str, str], *, code: int, asked: str = "") -> str:
    mine = context.Context.from_environment(given)
    return start.end(mine, code=code, asked=asked, environment=given)


def test_begin_claims_an_attempt(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    given = begin(run)
    assert given["PRORL_ATTEMPT"] == "1"
    assert given["PRORL_DEADLINE"] == "1600"  # 10 minutes after the start
    assert Path(given["PRORL_SCRATCH"]).is_dir()
    assert Path(given["PRORL_SCRATCH"]).stat().st_mode & 0o777 == 0o700
    assert begin(run)["PRORL_ATTEMPT"] == "2"
    attempts = [e.attempt for e in ledger.read(run.ledger).entries if isinstance(e, ledger.Start)]
    assert attempts == [1, 2]


def test_attempts_claimed_at_once_differ(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    claimed: list[int] = []

    def claim() -> None:
        for _ in range(20):
            claimed.append(journal.claim_attempt(run, "rollout", index=3))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 81))


def test_scratch_of_dead_attempts_is_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = Path(begin(run)["PRORL_SCRATCH"])
    (first / "left").write_text("over")
    second = begin(run)
    assert not first.exists()
    assert end(run, second, code=0) == "finished"
    assert not Path(second["PRORL_SCRATCH"]).exists()


def test_temporary_directory_of_the_node_comes_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    local = tmp_path / "local"
    local.mkdir()
    assert Path(begin(run, TMPDIR=str(local))["PRORL_SCRATCH"]).is_relative_to(local)
    gone = begin(run, TMPDIR=str(tmp_path / "gone"))
    assert Path(gone["PRORL_SCRATCH"]).is_relative_to(run.root / "scratch")


def test_caches_of_compiled_kernels_fill_no_home_directory(tmp_path: Path) -> None:
    given = begin(RunDirectory(tmp_path), TRITON_CACHE_DIR="/shared/triton", VLLM_CACHE_ROOT="")
    scratch = Path(given["PRORL_SCRATCH"])
    assert given["TRITON_CACHE_DIR"] == "/shared/triton"  # the user's own, or the site's setup
    for name in ("CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        assert Path(given[name]).parent == scratch / "cache"


def test_scratch_of_someone_else_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    base = Path(variables(run)["PRORL_SCRATCH_BASE"])
    scratch = attempt_directory(base, run=run.root, job="l", index=0, attempt=1, temporary="")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    scratch.parent.parent.parent.mkdir(parents=True)
    scratch.parent.parent.symlink_to(elsewhere)
    with pytest.raises(UserError, match="belongs to someone else"):
        begin(run)
    last = ledger.read(run.ledger).entries[-1]
    assert isinstance(last, ledger.Exit)
    assert last.next == "failed"


@pytest.mark.parametrize(
    ("code", "changes", "word"),
    [
        (0, {}, "finished"),
        (1, {}, "failed"),
        (75, {}, "restart"),
        (75, {"SLURM_JOB_ID": "12"}, "requeue"),
        (75, {"SLURM_JOB_ID": "12", "PRORL_ON_PREEMPT": "cancel"}, "resubmit"),
    ],
)
def test_end_says_what_follows(
    tmp_path: Path, code: int, changes: dict[str, str], word: str
) -> None:
    run = RunDirectory(tmp_path)
    given = begin(run, SLURM_JOB_END_TIME="5000", **changes)
    assert given["PRORL_DEADLINE"] == "5000"
    assert end(run, given, code=code) == word
    path = run.attempt_exit("learner", index=0, attempt=1)
    assert msgspec.json.decode(path.read_bytes(), type=ledger.Exit).code == code


def test_chain_without_progress_ends(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.progress("learner", index=0).parent.mkdir()
    run.progress("learner", index=0).write_text("5\n")
    assert end(run, begin(run), code=75) == "restart"
    run.progress("learner", index=0).write_text("6\n")
    assert end(run, begin(run), code=75) == "restart"  # began at 6: the first without progress
    assert end(run, begin(run), code=75) == "failed"
    last = ledger.read(run.ledger).entries[-1]
    assert isinstance(last, ledger.Exit)
    assert last.next == "exhausted"
    # a resume starts the count anew
    run.resumed("learner", index=0).write_text("3")
    assert end(run, begin(run), code=75) == "restart"


def test_cancelled_run_starts_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    running = begin(run)
    run.stop_request.touch()
    mine = context.Context.from_environment(variables(run))
    text = start.begin(mine, script=SCRIPT, environment={}, now=0.0)
    assert text.startswith("exit 0")
    assert end(run, running, code=75, asked="TERM") == "finished"


def test_a_copy_that_was_cut_off_calls_nothing_back(tmp_path: Path) -> None:
    """`scontrol requeue` of the same job id would end the successor."""
    run = RunDirectory(tmp_path)
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "5000",
           "PRORL_ATTEMPTS_WITHOUT_PROGRESS": "5"}  # fmt: skip
    cut_off, successor = begin(run, **job), begin(run, **job)
    for code in (75, 1, 137):
        assert end(run, cut_off, code=code) == "finished"
        last = ledger.read(run.ledger).entries[-1]
        assert isinstance(last, ledger.Exit)
        assert (last.next, last.reason) == ("cancelled", "attempt 2 has taken over")
    assert end(run, successor, code=75) in ("requeue", "resubmit")


def test_index_above_the_wanted_size_leaves(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.desired("learner").parent.mkdir()
    run.desired("learner").write_text("2")
    assert journal.why_not(run, "learner", index=1) == ""
    assert "scaled down to 2" in journal.why_not(run, "learner", index=2)


def test_outside_of_a_job() -> None:
    with pytest.raises(PlanError, match="PRORL_RUN_DIR"):
        context.Context.from_environment({})


def test_job_ids() -> None:
    assert context.job_id({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
    assert context.job_id(array) == "10_3"
    # an inherited id of another job never wins over Slurm's own
    assert context.job_id({"SLURM_JOB_ID": "12", "PRORL_JOB_ID": "9"}) == "12"
    assert context.job_id({"PRORL_JOB_ID": "local-5"}) == "local-5"
