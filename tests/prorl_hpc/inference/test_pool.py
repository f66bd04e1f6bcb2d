"""Which engine a recipe gets."""

import pytest

from prorl_hpc.choices import EngineKind
from prorl_hpc.inference.pool import FACTORIES, make_engine
from prorl_hpc.recipe import RecipeError
from tests.prorl_hpc.rollout.helpers import make_recipe


def test_the_transformers_engine_is_made_without_loading_anything(tmp_path):
    pytest.importorskip("torch")
    assert make_engine(make_recipe(), path=tmp_path, version=3).version == 3


def test_a_kind_that_is_not_served_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("prorl_hpc.inference.pool.FACTORIES", {EngineKind.transformers: "x:y"})
    recipe = make_recipe()
    recipe.rollout.engine.kind = EngineKind.sglang
    with pytest.raises(RecipeError, match="kind=sglang"):
        make_engine(recipe, path=tmp_path, version=0)
    assert FACTORIES
