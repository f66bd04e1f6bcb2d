"""An inference job of its own (`inference.placement=own_jobs`) around real vLLM, as a process.

Needs `PRORL_VLLM_PYTHON`, as `test_vllm_real` does; the run's other jobs aren't there.
"""

import signal
from pathlib import Path

import pytest

from prorl_hpc.choices import EngineKind, InferencePlacement
from prorl_hpc.inference.announce import make_token, read, read_all
from prorl_hpc.inference.engine import Completion
from prorl_hpc.recipe import EngineConfig, InferenceConfig, ModelConfig, dump_recipe
from prorl_hpc.run import Run
from tests.fakes.tiny_model import publish_tiny
from tests.prorl_hpc.inference.test_inference_job import (
    DEADLINE_SECONDS,
    SAMPLING,
    ask,
    job,
    wait,
)
from tests.prorl_hpc.inference.test_vllm_real import PYTHON, TOLERANCE, forward
from tests.prorl_hpc.rollout.helpers import make_recipe

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="PRORL_VLLM_PYTHON names no interpreter with vLLM"),
]
PROMPT = (1, 2)
"""What `ask` asks."""


def expected(answer: Completion, *, seed: int) -> list[float]:
    return forward(PROMPT, answer, seed=seed, tied=True, temperature=SAMPLING.temperature)


def test_it_serves_the_policy_follows_versions_and_leaves(tmp_path: Path) -> None:
    run = Run(tmp_path / "test")
    run.root.mkdir()
    recipe = make_recipe(
        engine=EngineConfig(kind=EngineKind.vllm, python=PYTHON, start_seconds=DEADLINE_SECONDS)
    )
    recipe.model = ModelConfig(context_tokens=512, dtype="float32")
    recipe.inference = InferenceConfig(placement=InferencePlacement.own_jobs)
    run.recipe.write_text(dump_recipe(recipe))
    make_token(run)
    publish_tiny(run, version=0)
    with job(run, tmp_path) as process:
        wait(lambda: process.poll() is not None or read_all(run), what="it is announced")
        first = ask(run, SAMPLING)
        assert first.versions == (0,) * len(first.token_ids)
        assert first.logprobs == pytest.approx(expected(first, seed=0), abs=TOLERANCE)
        publish_tiny(run, version=1)
        wait(lambda: set(ask(run, SAMPLING).versions) == {1}, what="it follows the new version")
        second = ask(run, SAMPLING)
        assert second.logprobs == pytest.approx(expected(second, seed=1), abs=TOLERANCE)
        wait(lambda: (found := read(run, 0)) and found.version == 1, what="it says so")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 75
        assert read_all(run) == []
