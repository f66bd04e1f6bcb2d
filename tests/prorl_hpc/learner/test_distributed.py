"""Two ranks on gloo against one: the same training, checkpoints of either for the other."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hpc.allocation import Allocation, StopFlag
from hpc.endpoints import reserve_port
from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner import session
from prorl_hpc.learner.checkpoint import read_state
from prorl_hpc.learner.distributed import Ranks, RanksError, join
from prorl_hpc.learner.launch import combined_code
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.recipe import Recipe
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

from .conftest import VOCABULARY, make_run, tiny_recipe

DEADLINE_SECONDS = 500
ROOT = Path(__file__).resolve().parents[3]


def short_recipe() -> Recipe:
    """Six steps with a reset after three and a validation in between."""
    recipe = tiny_recipe(updates_per_step=2, learning_rate=1e-3)
    recipe.steps = 6
    recipe.algorithm.reset.every_steps = 3
    recipe.learner.checkpoint_every_steps = 2
    recipe.learner.tokens_per_micro_batch = 24
    return recipe


def start(run: Run, *, rank: int, world: int, port: int, stop_after: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.prorl_hpc.learner.rank", str(run.root), str(stop_after)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_ranks(run: Run, world: int, *, stop_after: int = 10_000) -> list[tuple[int, str]]:
    """Runs to the end (or the stop) on so many ranks; code and output of each."""
    reserved = reserve_port("127.0.0.1")
    port = int(reserved.getsockname()[1])
    ranks = [
        start(run, rank=rank, world=world, port=port, stop_after=stop_after)
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        reserved.close()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def train_with(run: Run, world: int, *, stop_after: int = 10_000) -> str:
    """Runs to the end (or the stop) on so many ranks; the last line of rank 0."""
    ends = run_ranks(run, world, stop_after=stop_after)
    for code, output in ends:
        assert code == 0, output
    return ends[0][1].strip().splitlines()[-1]


def final(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.policy(6) / "model.safetensors")


@pytest.mark.process
@pytest.mark.timeout(1800)
def test_two_ranks_train_as_one_and_take_over_from_each_other(tmp_path: Path) -> None:
    alone = make_run(tmp_path / "one", short_recipe())
    fake = FakeClient(vocabulary=VOCABULARY)
    assert (
        session.train(
            alone, connect=lambda patience_seconds: fake, read=fake.read, stop_reason=lambda: None
        )
        == "done"
    )
    expected = final(alone)

    beside = short_recipe()
    # Reading, publishing and saving beside training: the threads' groups change nothing.
    beside.learner.deterministic, beside.algorithm.max_staleness = False, 50
    together = make_run(tmp_path / "two", beside)
    assert train_with(together, 2) == "done"
    assert read_state(together.checkpoint(6)).world == 2
    beside.learner.reference_placement = ReferencePlacement.cpu
    mixed = make_run(tmp_path / "mixed", beside)
    assert train_with(mixed, 2, stop_after=8) != "done"
    left = iter(range(6))
    alone_again = session.train(
        mixed,
        connect=lambda patience_seconds: fake,
        read=fake.read,
        stop_reason=lambda: None if next(left, None) is not None else "stopped by the test",
    )
    assert alone_again != "done"
    assert train_with(mixed, 2) == "done"

    for run in (together, mixed):
        found = final(run)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=2e-4), name


@pytest.mark.process
def test_a_rank_with_less_to_do_runs_a_dummy_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rollouts, each a micro-batch of its own, on two ranks: the second has one left over."""
    recipe = tiny_recipe(batch_groups=1, num_rollouts=3, learning_rate=1e-3)
    recipe.steps = recipe.validation.every_steps = 2
    recipe.learner.tokens_per_micro_batch = 1
    monkeypatch.setenv("TEST_NUM_ROLLOUTS", "3")
    together = make_run(tmp_path / "two", recipe)
    assert train_with(together, 2) == "done"
    rows = [r for r in read_metrics(together.metrics("learner")) if r["event"] == "step"]
    # Two passes of each rank, of which one rank's last is the dummy.
    assert [(row["samples"], row["micro_batches"]) for row in rows] == [(3, 2), (3, 2)]
    alone = make_run(tmp_path / "one", recipe)
    fake = FakeClient(vocabulary=VOCABULARY, num_rollouts=3)
    end = session.train(
        alone, connect=lambda patience_seconds: fake, read=fake.read, stop_reason=lambda: None
    )
    assert end == "done"
    expected, found = (load_file(r.policy(2) / "model.safetensors") for r in (alone, together))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-4), name


@pytest.mark.process
def test_what_one_rank_cannot_do_ends_both_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's error is the first one's too, which would wait for an hour else."""
    monkeypatch.setenv("TEST_BLIND_RANK", "1")
    run = make_run(tmp_path / "run", short_recipe())
    codes, outputs = zip(*run_ranks(run, 2), strict=True)
    assert codes == (1, 1)
    for output in outputs:
        assert "checkpoint of step 2 couldn't be written" in output
        assert "Input/output error" in output
    assert "rank 1: " in outputs[0]
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.process
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    """The launcher gives up on a rank's death and asks for another attempt."""
    from prorl_hpc.learner import launch

    script = (
        "import os, sys, time\n"
        "rank = int(sys.argv[1])\n"
        "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(i)], stdin=subprocess.PIPE, start_new_session=True
        )
        for i in range(2)
    ]
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    started = time.monotonic()
    try:
        launch.LAST_GRACE_SECONDS, kept = 0.5, launch.LAST_GRACE_SECONDS
        assert launch._supervise(ranks) == 75
    finally:
        launch.LAST_GRACE_SECONDS = kept
        for number, handler in before.items():
            signal.signal(number, handler)
    assert time.monotonic() - started < 300
    assert all(rank.poll() is not None for rank in ranks)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([75, 75], 75), ([0, -9], 75), ([1, -9], 1), ([1, 2], 2), ([75, 0], 75)],
)
def test_one_code_for_all_ranks(codes: list[int], expected: int) -> None:
    assert combined_code(codes) == expected


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    ports = [reserve_port("127.0.0.1") for _ in range(3)]
    try:
        _nobody_comes(monkeypatch, ports=[str(port.getsockname()[1]) for port in ports])
    finally:
        for port in ports:
            port.close()


def _nobody_comes(monkeypatch: pytest.MonkeyPatch, *, ports: list[str]) -> None:
    monkeypatch.setenv("MASTER_PORT", ports[0])
    with pytest.raises(RanksError, match=r"rank 0 of 3 .*rank 1, 2 didn't come within 0.2 s"):
        join(timeout_seconds=60, meeting_seconds=0.2)
    monkeypatch.setenv("MASTER_PORT", ports[1])
    with pytest.raises(RanksError, match=r"rank 1, 2 didn't come before a stop was wanted"):
        join(timeout_seconds=60, stopping=lambda: True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", ports[2])
    with pytest.raises(RanksError, match=r"rank 0 didn't come before a stop was wanted"):
        join(timeout_seconds=60, stopping=lambda: True)


def allocation_of(directory: Path, *, node_rank: int, hosts: tuple[str, ...]) -> Allocation:
    return Allocation(
        run_directory=directory, job="learner", role="learner", index=0, attempt=1, job_id="1",
        deadline=None, grace_seconds=0, scratch=directory, node_rank=node_rank, hosts=hosts,
    )  # fmt: skip


def test_the_port_of_the_meeting_is_nobody_elses_until_rank_0_has_it(tmp_path: Path) -> None:
    from prorl_hpc.learner.launch import _meeting_point

    allocation = allocation_of(tmp_path, node_rank=0, hosts=("first",))
    with ExitStack() as held:
        host, port = _meeting_point(Run(tmp_path), allocation, held, stopping=lambda: False)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore(
            host, port, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        store.set("here", "yes")
        assert store.get("here") == b"yes"


def test_a_launcher_that_is_to_stop_does_not_wait_for_the_first_node(tmp_path: Path) -> None:
    from prorl_hpc.learner.launch import launch

    recipe = short_recipe()
    recipe.learner.nodes = 2
    allocation = allocation_of(tmp_path, node_rank=1, hosts=("first", "second"))
    flag = StopFlag()
    flag.stop("got SIGTERM")
    assert launch(Run(tmp_path), recipe, allocation=allocation, flag=flag) == 75


def test_a_single_rank_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks: Ranks = join(timeout_seconds=1)
    assert (ranks.rank, ranks.world, ranks.is_first) == (0, 1, True)
    assert ranks.broadcast("x") == "x"
    assert ranks.gather(3) == [3]
    assert ranks.sum({"a": 1.0}) == {"a": 1.0}
    assert not ranks.all_true(False)
    ranks.barrier()
