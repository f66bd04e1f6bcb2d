"""One step: independent of its split, learning a bandit, guarding against what isn't finite."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from prorl_hpc.choices import Correction, KlPlace
from prorl_hpc.learner.batches import Sample
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import build_policy
from prorl_hpc.learner.objective import objective_config
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.reference import Reference
from prorl_hpc.learner.step import Stepper
from prorl_hpc.recipe import AlgorithmConfig, ModelConfig

from .conftest import VOCABULARY, save_model

MakeStepper = Callable[..., Stepper]


@pytest.fixture
def make(tmp_path: Path, alone: Ranks) -> MakeStepper:
    directory = save_model(tmp_path / "model")

    def build(*, tokens: int = 64, **algorithm: object) -> Stepper:
        config = AlgorithmConfig(**({"learning_rate": 1e-2, "kl_coef": 1e-2} | algorithm))  # type: ignore[arg-type]
        model = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=16)
        objective = objective_config(config, max_new_tokens=8)
        reference = None
        if objective.needs_reference:
            reference = Reference.of(model, index=0, step=0, ranks=alone)
        return Stepper(
            model=model,
            optimizer=build_optimizer([p for _, p in model.named_weights()], config=config),
            algorithm=config,
            objective=objective,
            ranks=alone,
            tokens_per_micro_batch=tokens,
            reference=reference,
        )

    return build


def batch(*, num_groups: int = 6, per_group: int = 4, seed: int = 0) -> list[Sample]:
    """Random tokens; the reward is the share of even ones, so every group has a spread."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        for _ in range(per_group):
            length = int(rng.integers(4, 12))
            tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
            sampled = np.arange(2, length)
            samples.append(
                Sample(
                    group_id=group,
                    task="letters",
                    tokens=tokens,
                    sampled=sampled,
                    sampler_logprobs=np.full(len(sampled), -2.5, dtype=np.float32),
                    reward=float(np.mean(tokens[2:] % 2 == 0)),
                    stopped=True,
                    oldest_version=0,
                    temperature=1.0,
                )
            )
    return samples


def run(stepper: Stepper, samples: list[Sample], *, step: int = 0) -> dict[str, float]:
    return stepper.run(samples, [s.reward for s in samples], step=step).metrics


def test_micro_batches_change_nothing_but_rounding(make: MakeStepper) -> None:
    whole, split = make(tokens=100_000), make(tokens=16)
    first, second = run(whole, batch()), run(split, batch())
    assert first["micro_batches"] == 1 < second["micro_batches"]
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert first["gradient_norm"] == pytest.approx(second["gradient_norm"], rel=1e-5)


def test_the_first_step_after_a_reset_has_no_kl(make: MakeStepper, alone: Ranks) -> None:
    """The row of the metrics says so too, whatever the later updates of the step add."""
    stepper = make(updates_per_step=2)
    rewards = [s.reward for s in batch()]
    first = stepper.run(batch(), rewards, step=0)
    assert first.kl == first.metrics["kl"] == 0.0 < first.metrics["kl_mean"]
    later = stepper.run(batch(), rewards, step=1)
    assert later.kl == later.metrics["kl"]
    assert (later.kl or 0) > 0
    stepper.reference = Reference.of(stepper.model, index=1, step=2, ranks=alone)
    again = stepper.run(batch(), rewards, step=2)
    assert again.kl == again.metrics["kl"] == 0.0


def test_ratio_is_one_for_a_single_update_and_moves_with_several(make: MakeStepper) -> None:
    assert run(make(), batch())["ratio"] == 1.0
    metrics = run(make(updates_per_step=3), batch())
    assert metrics["updates"] == 3
    assert metrics["ratio"] != 1.0


def test_without_a_coefficient_there_is_no_reference(make: MakeStepper) -> None:
    stepper = make(kl_coef=0.0)
    result = stepper.run(batch(), [s.reward for s in batch()], step=0)
    assert stepper.reference is None
    assert result.kl is None


def test_equal_rewards_move_nothing(make: MakeStepper) -> None:
    stepper = make(kl_coef=0.0)
    before = [p.detach().clone() for _, p in stepper.model.named_weights()]
    stepper.run(batch(), [1.0] * len(batch()), step=0)
    assert all(
        torch.equal(a, p) for a, (_, p) in zip(before, stepper.model.named_weights(), strict=True)
    )


def test_kl_in_the_reward_lowers_it(make: MakeStepper) -> None:
    plain = make(kl_place=KlPlace.reward, kl_coef=0.5)
    for step in range(3):
        metrics = run(plain, batch(), step=step)
    assert np.isfinite(metrics["gradient_norm"])
    assert "kl" in metrics


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_tokens_without_a_sampler_logprob_do_not_count(make: MakeStepper, value: float) -> None:
    samples = batch()
    samples[0].sampler_logprobs[:] = value
    metrics = run(make(correction=Correction.truncated), samples)
    assert metrics["masked_nonfinite"] == samples[0].response_tokens
    assert np.isfinite(metrics["loss"])


def test_a_gradient_that_is_not_finite_changes_no_weight(make: MakeStepper) -> None:
    stepper = make()
    before = [p.detach().clone() for _, p in stepper.model.named_weights()]
    rewards = [s.reward for s in batch()]
    with torch.no_grad():
        stepper.model.network.model.norm.weight[0] = float("inf")  # type: ignore[union-attr, index]
    result = stepper.run(batch(), rewards, step=0)
    assert result.num_skipped == 1
    names = [name for name, _ in stepper.model.named_weights()]
    for name, kept, (_, now) in zip(names, before, stepper.model.named_weights(), strict=True):
        if name != "model.norm.weight":
            assert torch.equal(kept, now), name


def test_empty_and_single_token_responses(make: MakeStepper) -> None:
    samples = batch(num_groups=1)
    samples[0] = Sample(
        group_id=0, task="letters", tokens=np.array([2, 3], dtype=np.int32),
        sampled=np.zeros(0, dtype=np.int64), sampler_logprobs=np.zeros(0, dtype=np.float32),
        reward=0.5, stopped=True, oldest_version=None, temperature=1.0,
    )  # fmt: skip
    samples[1] = Sample(
        group_id=0, task="letters", tokens=np.array([2, 3], dtype=np.int32),
        sampled=np.array([1]), sampler_logprobs=np.array([-1.0], dtype=np.float32),
        reward=0.0, stopped=True, oldest_version=0, temperature=1.0,
    )  # fmt: skip
    assert np.isfinite(run(make(), samples)["loss"])


def test_it_learns_a_bandit(make: MakeStepper) -> None:
    """The right answer repeats the letter of the prompt: 1/15 by chance, nearly always later."""
    stepper = make(kl_coef=0.0)
    rng = np.random.default_rng(0)
    history = []
    for step in range(40):
        samples = play(stepper, rng)
        history.append(float(np.mean([s.reward for s in samples])))
        run(stepper, samples, step=step)
    assert np.mean(history[:3]) < 0.4
    assert np.mean(history[-3:]) > 0.8


def play(stepper: Stepper, rng: np.random.Generator) -> list[Sample]:
    from prorl_hpc.learner.attention import document_layout

    samples = []
    for group, letter in enumerate((5, 6, 7, 8)):
        prompt = [2, letter]
        answers = torch.arange(VOCABULARY)
        tokens = torch.tensor(prompt * VOCABULARY)
        with torch.no_grad():
            logprobs = stepper.model(
                tokens,
                document_layout([2] * VOCABULARY),
                2 * answers + 1,
                answers,
                torch.ones(VOCABULARY),
            ).logprobs.double()
        chances = logprobs.exp().numpy()
        for answer in rng.choice(VOCABULARY, size=8, p=chances / chances.sum()):
            samples.append(
                Sample(
                    group_id=group,
                    task="letters",
                    tokens=np.array([*prompt, answer], dtype=np.int32),
                    sampled=np.array([2]),
                    sampler_logprobs=np.array([logprobs[answer]], dtype=np.float32),
                    reward=float(answer == letter),
                    stopped=True,
                    oldest_version=0,
                    temperature=1.0,
                )
            )
    return samples
