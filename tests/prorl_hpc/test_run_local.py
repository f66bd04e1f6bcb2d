"""The command line on whole runs of this machine, and on recipes that can't work."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc import ledger, local
from prorl_hpc.cli.main import main
from tests.prorl_hpc.run_helpers import RECIPES, Session

HOSTILE = 'it\'s "so" $HOME `id` 100%'


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(runs=tmp_path / HOSTILE, name="tiny")
    yield made
    made.end()


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_a_run_from_submit_to_report(session: Session) -> None:
    run, name = session.run, session.name
    assert "is started" in session.submit().stdout
    assert "already started" in session.submit().stdout
    refused = session.submit("steps=7", code=2)
    assert "was started with another recipe (steps: 6 there, 7 here)" in refused.stderr
    found = json.loads(session.cli("status", name, "--json").stdout)["jobs"]
    assert [job["job"] for job in found] == ["buffer", "rollout", "rollout", "learner"]

    watched = session.cli("watch", name).stdout
    assert f"run {name}: done" in watched
    session.wait_end()
    session.audit(steps=6, batch_groups=4)
    assert [row["step"] for row in session.rows("step")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in session.rows("validation")] == [0, 3, 6]
    entries = ledger.read(run.ledger).entries
    assert sum(isinstance(entry, ledger.Start) for entry in entries) == 4
    found = json.loads(session.cli("status", name, "--json").stdout)["jobs"]
    assert {job["phase"] for job in found} == {"finished"}
    assert "step 6/6" in session.cli("status", name).stdout
    assert "all steps are done" in session.cli("logs", name, "learner").stdout
    session.cli("report", name)
    assert run.report.stat().st_size > 0
    session.cli("export", name, str(session.runs / "out"))
    assert (session.runs / "out" / "model.safetensors").is_file()
    assert "reward" in session.cli("show", name, "--group", "0").stdout

    weights = session.weights()
    assert "it is done" in session.cli("scale", name, "--rollout", "3", code=2).stderr
    session.cli("resume", name)
    session.wait_end()
    assert session.weights() == weights
    assert len(session.ends("learner")) == 1


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_nodes_join_and_leave_and_a_cancelled_run_goes_on(session: Session) -> None:
    run, name = session.run, session.name
    session.overrides = ["steps=30"]
    session.submit()
    session.wait_step(2)
    session.cli("scale", name, "--rollout", "3")
    session.wait_processes("rollout", 2)
    session.cli("scale", name, "--rollout", "1")
    session.wait(
        lambda: {end.index for end in session.ends("rollout")} >= {1, 2}, what="two nodes leave"
    )
    frozen = _frozen(session)
    session.cli("cancel", name)
    session.wait_end()
    reached = session.step
    assert session.state().step == reached < 30, "the learner saved its last step"
    found = json.loads(session.cli("status", name, "--json").stdout)["jobs"]
    assert "finished" not in {job["phase"] for job in found if job["job"] == "learner"}
    assert "was cancelled" in session.submit(code=2).stderr
    started = len(session.ends("rollout"))
    session.cli("resume", name)
    session.wait_end()
    session.audit(steps=30, batch_groups=4)
    assert _frozen(session) == frozen
    assert {end.index for end in session.ends("rollout")[started:]} == {0}
    assert not run.stop_request.exists()


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_the_buffer_beside_the_learner_is_killed_and_the_run_goes_on(session: Session) -> None:
    session.overrides = ["steps=8", "buffer.colocate=learner"]
    session.submit()
    session.wait_step(3)
    # In a process group of its own: the job's script isn't its leader.
    words = (b"prorl_hpc.buffer", bytes(session.run.root))
    (buffer,) = (pid for pid in _pids() if all(word in _arguments(pid) for word in words))
    session.send(buffer, signal.SIGKILL)
    session.wait_end()
    assert [end.code for end in session.ends("learner")] == [75, 0], session.said()
    assert session.ends("buffer") == []
    session.audit(steps=8, batch_groups=4)
    steps = [end.progress for end in session.ends("learner")]
    assert steps[-1] == 8  # and not what the buffer counts
    assert steps[0] is not None
    assert 3 <= steps[0] < 8


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _frozen(session: Session) -> dict[str, bytes]:
    """What no command may change once a run was started."""
    run = session.run
    paths = [run.recipe, run.plan, run.site, run.provenance, *run.scripts.iterdir()]
    paths += [path for path in run.model_start.iterdir() if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


BAD = [
    (["steps=nan"], "steps"),
    (["steps=true"], "steps"),
    (["algorithm.learning_rate=nan"], "algorithm.learning_rate"),
    (["algorithm.learning_rate=inf"], "algorithm.learning_rate"),
    (["algorithm.kl_coef=nan"], "algorithm.kl_coef"),
    (["algorithm.kl_coef=true"], "algorithm.kl_coef"),
    (["algorithm.batch_groups=0"], "algorithm.batch_groups"),
    (["algorithm.temperature=-1"], "algorithm.temperature"),
    (["tasks.sums.weight=nan"], "tasks.sums.weight"),
    (["tasks.sums.kind=puzzle"], "tasks.sums.kind"),
    (["tasks.sums.options.family=chain_sun"], "chain_su"),
    (["task=math_file", "tasks.math.data=missing.jsonl"], "missing.jsonl"),
    (["task=math_file", "tasks.math.data=empty.jsonl"], "empty.jsonl"),
    (["task=math_file", "tasks.math.data=text.jsonl"], "text.jsonl"),
    (["model.path=./nothing"], "./nothing"),
    (["algorithm.num_rollouts=1"], "algorithm.num_rollouts=1"),
    (["algorithm.batch_groups=5", "algorithm.updates_per_step=2"], "divisible"),
    (["site=nowhere"], "site=nowhere"),
    (["site.placements.default.partitoin=x"], "did you mean"),
    (["site.max_node_hours=0.1"], "node-hours"),
    (["algorithm.kl_coeff=1"], "did you mean algorithm.kl_coef"),
    (["steps"], "write key=value"),
    (["steps=1,2"], "several values"),
    (["steps=[1"], "steps=[1"),
    (["+recipe@x=tiny"], "recipe"),
    (["learner.deterministic=true"], "algorithm.max_staleness=0"),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_recipes_are_one_line(
    overrides: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "start", _must_not_start)
    Path("empty.jsonl").touch()
    Path("text.jsonl").write_text("no json\n")
    code = main(["submit", "recipe=tiny", "--recipe-dir", str(RECIPES), *overrides])
    _is_one_line(code, capsys, words)
    assert not list(tmp_path.rglob("ledger.jsonl"))
    assert not list(tmp_path.rglob("supervisor.lock"))


def test_more_nodes_and_partitions_than_a_cluster_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own" / "site"
    own.mkdir(parents=True)
    (own / "here.yaml").write_text(
        "# @package site\nname: here\nbackend: slurm\nslurm_version: [23, 11]\n"
        "placements: {default: {partition: cpu, max_nodes: 2}}\n"
    )
    command = ["submit", "recipe=quickstart", "site=here", "--recipe-dir", str(own.parent)]
    _is_one_line(main([*command, "rollout.nodes=1", "learner.nodes=3"]), capsys, "learner.nodes=3")
    assert not list(tmp_path.rglob("ledger.jsonl"))


def _must_not_start(run: object) -> None:
    raise AssertionError("the supervisor was to start")


@pytest.mark.parametrize("content", [None, "file", "steps: [", "- a\n", "\0"])
def test_bad_recipe_directories_are_one_line(
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    if content == "file":
        own.touch()
    elif content is not None:
        (own / "recipe").mkdir(parents=True)
        (own / "recipe" / "mine.yaml").write_text(content)
    code = main(["submit", "recipe=mine", "--recipe-dir", str(own)])
    _is_one_line(code, capsys, "own" if content in (None, "file") else "recipe")


def _is_one_line(code: int, capsys: pytest.CaptureFixture[str], words: str) -> None:
    caught = capsys.readouterr()
    assert code == 2
    assert caught.err.startswith("prorl-hpc: ")
    assert caught.err.count("\n") == 1, caught.err
    assert words in caught.err
