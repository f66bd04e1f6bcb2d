"""An adapter as the learner writes it, served by real vLLM. Needs `PRORL_VLLM_PYTHON`."""

from pathlib import Path

import pytest
import torch

from prorl_hpc.inference.openai_engine import OpenAiEngine
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import build_policy, gather_adapter, gather_weights
from prorl_hpc.recipe import LoraConfig, ModelConfig
from prorl_hpc.run import Run
from tests.fakes.tiny_model import publish_tiny, tiny_model
from tests.prorl_hpc.inference.test_vllm_real import (
    PYTHON,
    TOLERANCE,
    asked,
    distance,
    of_network,
    run,
    started,
)

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="PRORL_VLLM_PYTHON names no interpreter with vLLM"),
]


def test_an_adapter_of_a_policy_is_what_its_merged_weights_are(tmp_path: Path) -> None:
    """`policy/v*/adapter` beside its base, as a user would serve it with `--lora-modules`."""

    async def check() -> None:
        run_ = Run(tmp_path / "run")
        base = publish_tiny(run_, version=1)
        config = ModelConfig(lora=LoraConfig(rank=4, alpha=8.0))
        alone = Ranks(rank=0, world=1, device=torch.device("cpu"))
        model = build_policy(base, config, ranks=alone, chunk_tokens=64)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, factor in model.named_weights():
                if "lora_B" in name:
                    factor.normal_(std=0.1)
        adapter = gather_adapter(model, ranks=alone)
        merged = gather_weights(model, dtype=torch.float32, ranks=alone)
        assert adapter is not None
        adapter.write(tmp_path / "adapter", base=base)
        network = tiny_model(seed=1)
        network.load_state_dict(merged, strict=False)
        flags = ("--enable-lora", "--max-lora-rank", "8")
        named = ("--lora-modules", f"mine={tmp_path / 'adapter'}")
        async with started(run_, tied=True, on_port=True, arguments=(*flags, *named)) as engine:
            (address,) = engine.pool.servers
            prompt, sampling = (5, 6, 7, 8), asked(32, seed=3)
            for model_name, expected in (("mine", network), (None, tiny_model(seed=1))):
                theirs = OpenAiEngine(
                    [f"{address}/v1"], tokenizer_path=base, version=1, model=model_name
                )
                await theirs.start()
                try:
                    answer = await theirs.generate(prompt, sampling=sampling)
                finally:
                    await theirs.close()
                exact = of_network(expected, prompt, answer, temperature=0.7)
                assert distance(answer.logprobs, exact) < TOLERANCE

    run(check())
