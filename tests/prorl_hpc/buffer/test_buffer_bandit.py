"""The bandit that chooses instances: what it learns, restarts, and doing without the package."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_hpc.buffer.bandit import Bandit, BanditMissing, _pick
from prorl_hpc.buffer.curriculum import Choice
from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Chosen
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.choices import CurriculumKind
from prorl_hpc.cli.inputs import check_inputs
from prorl_hpc.recipe import RecipeError, dump_recipe, load_recipe
from tests.prorl_hpc.buffer.buffer_helpers import make_config, produce
from tests.prorl_hpc.buffer.dispatcher_helpers import Disk, announce
from tests.prorl_hpc.test_recipe import recipe

BATCH = 6


def bandit(*, seed: int = 3) -> Bandit:
    pytest.importorskip("vowpalwabbit")
    return Bandit(seed=seed)


def solved(index: int) -> int:
    """Of 4 rollouts: all of instances 0-9, none of 10-19, half of 20-29."""
    return (4, 0, 2)[index // 10]


def play(learner: Bandit, *, groups: int, results: bool = True) -> list[int]:
    """The instances of so many groups, in batches whose results come in before the next one."""
    chosen = []
    for first in range(0, groups, BATCH):
        batch = range(first, first + BATCH)
        for group in batch:
            choice = learner.choose(group, task="a: b|c", index=group % 30, size=30, floor=first)
            chosen.append(choice.index)
        for group in reversed(batch):
            number = solved(chosen[group]) if results else 2
            learner.note(group, task="a: b|c", index=chosen[group], num_solved=number, known=4)
    return chosen


def test_it_learns_which_instances_teach() -> None:
    chosen = play(bandit(), groups=300)
    share = sum(index >= 20 for index in chosen[-100:]) / 100
    assert share > 0.7  # a third, were they chosen blindly
    assert len(set(chosen[-100:])) > 5


def test_equal_seeds_and_results_give_equal_choices() -> None:
    assert play(bandit(), groups=60) == play(bandit(), groups=60)
    assert play(bandit(), groups=60) != play(bandit(seed=4), groups=60)


def test_what_comes_after_the_floor_is_not_looked_at() -> None:
    one, other = bandit(), bandit()
    for learner in (one, other):
        play(learner, groups=60)
    for index in range(30):
        other.note(100 + index, task="a: b|c", index=index, num_solved=index % 5, known=4)
    picks = [
        [
            learner.choose(group, task="a: b|c", index=0, size=30, floor=60).index
            for group in range(60, 66)
        ]
        for learner in (one, other)
    ]
    assert picks[0] == picks[1]


def test_a_result_counts_once_and_a_single_rollout_not_at_all() -> None:
    learner = bandit()
    learner.chosen(0, Choice(index=3, context="new", probability=0.5))
    learner.note(0, task="t", index=3, num_solved=1, known=1)
    assert learner.num_extreme() == 0
    learner.note(0, task="t", index=3, num_solved=4, known=4)
    learner.note(0, task="t", index=3, num_solved=0, known=4)
    assert learner.num_extreme() == 1
    assert learner._pending == [(0, "t", 0.0)]


@pytest.mark.parametrize(("point", "place"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.99, 2), (1.0, 2)])
def test_chances_are_laid_end_to_end(point: float, place: int) -> None:
    assert _pick([0.25, 0.5, 0.25], point) == place


def test_a_restarted_buffer_chooses_as_the_one_before() -> None:
    pytest.importorskip("vowpalwabbit")
    config = make_config(
        tasks={"sums": TaskShare(weight=1.0, train_size=30)}, batch_groups=BATCH,
        curriculum=CurriculumKind.bandit, deterministic=True, max_staleness=0,
    )  # fmt: skip
    d = Dispatcher(config)
    disk = Disk(d)
    announce(d)
    for version in range(8):
        leases = d.lease("w0", capacity=100, now=0.0)
        assert len(leases) == BATCH
        if version in (3, 7):  # another attempt leases the same, from the record
            again = Dispatcher(config, first_lease_id=1 << 32)
            again.restore(disk.lines, now=0.0)
            announce(again, version=version, done=version * BATCH)
            found = again.lease("w1", capacity=100, now=60.0)
            assert [x.instance_index for x in found] == [x.instance_index for x in leases]
        for lease in leases:
            for t in produce(lease):
                good = t.rollout_index < solved(lease.instance_index)
                assert d.admit(replace(t, reward=float(good)), now=0.0) is Admission.accept
                disk.seal(t.group_id, t.rollout_index)
        d.take(BATCH)
        d.advance(version=version + 1)
    chances = [line.probability for line in disk.lines if isinstance(line, Chosen)]
    assert len(chances) == 8 * BATCH
    assert all(0 < chance <= 1 for chance in chances)


def test_without_the_package_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vowpalwabbit", None)
    with pytest.raises(BanditMissing, match=r"pip install 'prorl-hpc\[bandit\]'"):
        Bandit(seed=0)
    wanted = recipe()
    wanted.buffer.curriculum = CurriculumKind.bandit
    with pytest.raises(RecipeError, match=r"buffer.curriculum=bandit needs .*vowpalwabbit"):
        check_inputs(wanted)


@pytest.mark.parametrize(
    ("old", "kind"), [("true", CurriculumKind.solve_rate), ("false", CurriculumKind.none)]
)
def test_frozen_recipes_of_earlier_versions_are_read(
    tmp_path: Path, old: str, kind: CurriculumKind
) -> None:
    path = tmp_path / "recipe.yaml"
    text = dump_recipe(recipe())
    assert "curriculum: none" in text
    path.write_text(text.replace("curriculum: none", f"curriculum: {old}"))
    assert load_recipe(path).buffer.curriculum is kind
