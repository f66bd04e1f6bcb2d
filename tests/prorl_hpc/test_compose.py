"""Overrides to recipes: groups, keys, and the one line that a mistake gets."""

from pathlib import Path

import pytest

from prorl_hpc.choices import Surrogate
from prorl_hpc.compose import compose, options
from prorl_hpc.recipe import RecipeError, dump_recipe, load_recipe
from tests.prorl_hpc.cli.support import recipe_directory


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    # A hostile path: Hydra's search path takes it through its own grammar.
    return recipe_directory(tmp_path / "my 'own' groups")


def test_overrides_choose_files_and_set_values(groups: Path) -> None:
    recipe = compose(
        ["recipe=quickstart", "site=desk", "rollout.nodes=3", "algorithm.kl_coef=1e-4"],
        recipe_dir=groups,
    )
    assert recipe.name == "quickstart"
    assert recipe.rollout.nodes == 3
    assert recipe.algorithm.kl_coef == 1e-4
    assert recipe.site["name"] == "desk"


@pytest.mark.parametrize("name", sorted(options("recipe")))
def test_every_shipped_recipe_composes(name: str, groups: Path, tmp_path: Path) -> None:
    recipe = compose([f"recipe={name}", "site=desk"], recipe_dir=groups)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("name", sorted(options("algorithm")))
def test_every_algorithm_composes(name: str, groups: Path) -> None:
    recipe = compose(["recipe=quickstart", "site=desk", f"algorithm={name}"], recipe_dir=groups)
    assert recipe.algorithm.surrogate in Surrogate


@pytest.mark.parametrize("name", sorted(options("site")))
def test_every_shipped_site_is_a_site(name: str) -> None:
    assert compose(["recipe=quickstart", f"site={name}"]).site["name"]


def test_a_site_is_called_as_its_file(groups: Path) -> None:
    (groups / "site" / "copied.yaml").write_text((groups / "site" / "desk.yaml").read_text())
    start = ["recipe=quickstart", "site=copied"]
    assert compose(start, recipe_dir=groups).site["name"] == "copied"
    assert compose([*start, "site.name=mine"], recipe_dir=groups).site["name"] == "mine"


def test_tasks_can_be_chosen_added_changed_and_removed(groups: Path) -> None:
    start = ["recipe=quickstart", "site=desk"]
    chosen = compose([*start, "task=countdown"], recipe_dir=groups)
    assert list(chosen.tasks) == ["countdown"]
    added = compose(
        [*start, "tasks.mine.kind=math", "tasks.mine.weight=0.5", "tasks.spell_backward.weight=2"],
        recipe_dir=groups,
    )
    assert added.tasks["mine"].weight == 0.5
    assert added.tasks["spell_backward"].weight == 2.0
    assert added.tasks["spell_backward"].kind == "logic"
    removed = compose([*start, "task=[countdown,maze]", "~tasks.countdown"], recipe_dir=groups)
    assert list(removed.tasks) == ["maze"]


def test_lists_of_stages(groups: Path) -> None:
    recipe = compose(
        ["recipe=quickstart", "site=desk", "algorithm.stages=[{from_step: 5, num_rollouts: 4}]"],
        recipe_dir=groups,
    )
    assert recipe.algorithm.stages[0].num_rollouts == 4


def test_recipe_of_the_users_own_wins(groups: Path) -> None:
    (groups / "recipe").mkdir()
    (groups / "recipe" / "quickstart.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm: grpo\n  - override /site: desk\n"
        "name: mine\nsteps: 2\ntasks: {a: {kind: logic}}\n"
    )
    recipe = compose(["recipe=quickstart"], recipe_dir=groups)
    assert (recipe.name, recipe.algorithm.kl_coef) == ("mine", 0.04)
    # The command line has the last word.
    again = compose(["recipe=quickstart", "algorithm=dapo"], recipe_dir=groups)
    assert again.algorithm.kl_coef == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "no recipe is chosen; add recipe=NAME, one of .*quickstart"),
        (["recipe=quickstrat"], "did you mean recipe=quickstart"),
        (["recipe=quickstart", "site=nowhere"], "site=nowhere is unknown; .*choose one of .*desk"),
        (["recipe=quickstart", "rollout.node=3"], "did you mean rollout.nodes"),
        (["recipe=quickstart", "kl_coef=1e-3"], "did you mean algorithm.kl_coef"),
        (["recipe=quickstart", "algorithm.kl=1"], "did you mean algorithm.kl_coef"),
        (["recipe=quickstart", "tasks.a.kin=math"], "did you mean tasks.a.kind"),
        (["recipe=quickstart", "tasks.a.weight=2"], "kind has no value.*tasks are called "),
        (["recipe=quickstart", "tasks.a.kind=math", "tasks.a.weight=x"], "tasks.a.weight: Value"),
        (["recipe=quickstart", "site=desk", "site.placments.x=1"], "did you mean site.placements"),
        (["recipe=quickstart", "site=desk", "steps=many"], "steps: Value 'many'"),
        (["recipe=quickstart", "site=desk", "algorithm.surrogate=foo"], "expected one of .ppo"),
        (["recipe=quickstart", "steps=1,2"], r"write key=\[a,b\]"),
        (["recipe=quickstart", "steps=[1"], "quote the value"),
        (["quickstart"], "write key=value"),
        (["recipe=quickstart", "site=desk", "site.backend=pbs"], "site: .*backend"),
        (["recipe=quickstart", "~recipe"], "can't be deleted"),
    ],
)
def test_mistakes_get_one_readable_line(overrides: list[str], message: str, groups: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        compose(overrides, recipe_dir=groups)
    assert "\n" not in str(caught.value)


def test_wrong_key_in_a_users_file_is_named(groups: Path) -> None:
    (groups / "recipe").mkdir()
    path = groups / "recipe" / "mine.yaml"
    path.write_text("# @package _global_\nname: m\nsteps: 2\nrollout: {nodez: 2}\n")
    with pytest.raises(RecipeError, match=r"did you mean rollout\.nodes"):
        compose(["recipe=mine", "site=desk"], recipe_dir=groups)
    path.write_text("name: m\nsteps: 2\n")
    with pytest.raises(RecipeError, match="begin it with '# @package _global_'"):
        compose(["recipe=mine", "site=desk"], recipe_dir=groups)


def test_file_beside_the_groups_is_explained(groups: Path) -> None:
    (groups / "mine.yaml").write_text("name: m\n")
    with pytest.raises(RecipeError, match=r"move it to .*recipe/mine\.yaml"):
        compose(["recipe=mine"], recipe_dir=groups)
    with pytest.raises(RecipeError, match="isn't a directory"):
        compose(["recipe=quickstart"], recipe_dir=groups / "none")
