"""Numbers that no recipe can mean, by override and by hand in a frozen recipe."""

from pathlib import Path

import pytest

from prorl_hpc.compose import compose
from prorl_hpc.limits import POSITIVE
from prorl_hpc.recipe import Recipe, RecipeError, TaskConfig, dump_recipe, load_recipe
from prorl_hpc.schema import check_key
from tests.prorl_hpc.cli.support import recipe_directory


def test_limits_name_keys_that_exist() -> None:
    for key in POSITIVE:
        check_key(key)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.learning_rate=nan", "algorithm.learning_rate=nan isn't a finite number"),
        ("algorithm.clip_high=inf", "algorithm.clip_high=inf isn't"),
        ("algorithm.betas=[0.9,nan]", "algorithm.betas.1=nan"),
        ("tasks.spell_backward.weight=nan", "tasks.spell_backward.weight=nan"),
        ("tasks.spell_backward.options={x: nan}", "tasks.spell_backward.options.x=nan"),
        ("seed=-1", "seed=-1 is negative"),
        ("learner.memory_mib=-5", "learner.memory_mib=-5 must be above 0"),
        ("rollout.run_workers=0", "rollout.run_workers=0 must be above 0"),
        ("steps=0", "steps=0 must be above 0"),
        ("steps=-1", "steps=-1 must be above 0"),
        ("algorithm.temperature=-0.5", "algorithm.temperature=-0.5 must be above 0"),
        ("tasks.spell_backward.max_turns=-2", "max_turns=-2 must be above 0"),
        ("rollout.nodes=99999999999999999", "rollout.nodes=99999999999999999 is larger"),
        ("steps=1e400", "steps"),
        ("steps=9" + "9" * 400, "steps"),
    ],
)
def test_refused(override: str, message: str, tmp_path: Path) -> None:
    groups = recipe_directory(tmp_path / "groups")
    with pytest.raises(RecipeError, match=message) as caught:
        compose(["recipe=quickstart", "site=desk", override], recipe_dir=groups)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 3", "stepz: 3", r"recipe\.yaml: key 'stepz' is unknown; did you mean steps\?"),
        ("nodes: 1", "node: 1", "did you mean rollout.nodes"),
        ("kind: logic", "kind: logic\n    weigth: 2", "did you mean tasks.sums.weight"),
        ("name: desk", "nam: desk", "did you mean site.name"),
        ("learning_rate: 2.0e-06", "learning_rate: .nan", "isn't a finite number"),
        ("steps: 3", "steps: 3\n  bad: [", "can't be read"),
        ("steps: 3", "steps: {a: 1}", "steps"),
    ],
)
def test_hand_edited_recipe(old: str, new: str, message: str, tmp_path: Path) -> None:
    site = {"name": "desk", "backend": "local", "placements": {"default": {"partition": "p"}}}
    recipe = Recipe(name="r", steps=3, tasks={"sums": TaskConfig(kind="logic")}, site=site)
    path = tmp_path / "recipe.yaml"
    text = dump_recipe(recipe)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b"a: \x00", b"just text", b"{1: 2}"])
def test_files_that_are_no_recipe(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(data)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
