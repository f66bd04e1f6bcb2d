"""The policy loss: whole formula by hand, invariance to every split, hostile tokens."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc.errors import UserError
from prorl_hpc.choices import Aggregation, Correction, KlEstimator, KlPlace, Surrogate
from prorl_hpc.learner.objective import (
    ObjectiveConfig,
    add_sums,
    loss_denominator,
    mean_metrics,
    objective_config,
    policy_loss,
    valid_tokens,
)
from prorl_hpc.recipe import AlgorithmConfig

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}

F64 = torch.float64
PLAIN = ObjectiveConfig(clip_low=0.2, clip_high=0.4, kl_coef=0.0)


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 1, 7, 3, 4)) -> dict:
    """Packed sequences with a prompt token each, mixed signs of advantage, some masked tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, dtype=F64, generator=generator)

    total = sum(length + 1 for length in lengths)
    ids = torch.cat([torch.full((n + 1,), 10 + i) for i, n in enumerate(lengths)])
    starts = torch.cat([torch.tensor([0] + [1] * n) for n in lengths])
    observed = (torch.rand(total, generator=generator) > 0.2).long()
    new = noise(1.0) - 3
    return {
        "logprobs": new,
        "old": new + noise(0.2),
        "sampler": new + noise(0.3),
        "reference": new + noise(0.5),
        "advantages": noise(1.0),
        "mask": starts * observed,
        "ids": ids,
        "entropy": noise(0.1).abs() + 1,
    }


def run(batch: dict, config: ObjectiveConfig, denominator: float, keep=None):
    part = batch if keep is None else {name: value[keep] for name, value in batch.items()}
    return policy_loss(
        part["logprobs"],
        part["old"],
        part["sampler"],
        part["reference"],
        part["advantages"],
        part["mask"],
        part["ids"],
        config=config,
        denominator=denominator,
        entropy_T=part["entropy"],
    )


def denominator_of(batch: dict, config: ObjectiveConfig) -> float:
    return loss_denominator(batch["mask"], batch["ids"], batch["sampler"], config=config)


def loss_and_gradient(batch: dict, config: ObjectiveConfig, parts=None):
    """Loss and gradient of the step, from one micro-batch or several."""
    leaf = batch["logprobs"].clone().requires_grad_()
    live = {**batch, "logprobs": leaf}
    denominator = denominator_of(batch, config)
    total = 0.0
    for keep in parts or [None]:
        loss, _ = run(live, config, denominator, keep)
        loss.backward()
        total += loss.item()
    return total, leaf.grad


FULL = [
    ObjectiveConfig(
        surrogate=surrogate,
        aggregation=aggregation,
        constant_tokens=64,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        kl_coef=0.1,
        kl_estimator=KlEstimator.k3,
        kl_importance_weighted=True,
        correction=correction,
        correction_low=0.6,
        correction_high=1.8,
        entropy_coef=0.01,
    )
    for surrogate in Surrogate
    for aggregation in Aggregation
    for correction in (Correction.icepop, Correction.sequence_mask)
]


def test_whole_formula_by_hand() -> None:
    config = ObjectiveConfig(
        clip_low=0.2,
        clip_high=0.4,
        kl_coef=0.5,
        kl_estimator=KlEstimator.k2,
        correction=Correction.truncated,
        correction_high=2.0,
        entropy_coef=0.1,
    )
    old = torch.tensor([-1.0, -1.0, -9.0], dtype=F64)
    loss, sums = policy_loss(
        old + torch.tensor([1.5, 0.5, 1.0], dtype=F64).log(),
        old,
        old - torch.tensor([3.0, 0.5, 1.0], dtype=F64).log(),
        old + torch.tensor([1.5, 0.5, 1.0], dtype=F64).log() - 0.2,
        torch.tensor([1.0, -1.0, 99.0], dtype=F64),
        torch.tensor([1, 1, 0]),
        torch.tensor([0, 0, 0]),
        config=config,
        denominator=4.0,  # two more tokens elsewhere in the step
        entropy_T=torch.tensor([2.0, 1.0, 50.0], dtype=F64),
    )
    # Token 0: weight min(3, 2) = 2, surrogate -1.4; token 1: weight 0.5, surrogate 0.8.
    # KL: d = 0.2, k2 = 0.02, twice. Entropy: 2 + 1.
    expected = (2 * -1.4 + 0.5 * 0.8 + 0.5 * 2 * 0.02 - 0.1 * 3) / 4
    assert loss.item() == pytest.approx(expected)
    assert sums["tokens"] == 2
    assert sums["clipped_high"] == sums["clipped_low"] == 1
    assert sums["kl"] == pytest.approx(0.04)
    assert mean_metrics(sums)["correction_weight"] == pytest.approx(1.25)
    assert mean_metrics(sums)["loss"] == pytest.approx(expected)


def test_an_importance_weighted_kl_by_hand() -> None:
    """Policy over sampler is 3 and 1/2: the loss weighs by it, the metric doesn't."""
    config = dataclasses.replace(
        PLAIN, kl_coef=0.5, kl_estimator=KlEstimator.k1, kl_importance_weighted=True
    )
    old = torch.tensor([-2.0, -1.0], dtype=F64)
    sampler = old - torch.tensor([3.0, 0.5], dtype=F64).log()
    loss, sums = policy_loss(
        old, old, sampler, old - torch.tensor([0.2, 0.4], dtype=F64), torch.zeros(2),
        torch.ones(2), torch.zeros(2), config=config, denominator=2.0,
    )  # fmt: skip
    # k1 = d: (3 * 0.2 + 0.5 * 0.4) / 2, halved by the coefficient.
    assert loss.item() == pytest.approx(0.5 * 0.8 / 2)
    assert sums["kl"] == pytest.approx(0.6)


@pytest.mark.parametrize("config", FULL)
def test_gradient_by_finite_differences(config: ObjectiveConfig) -> None:
    batch = make_batch(3, (3, 2))
    old = {**batch, "old": batch["logprobs"] + 0.05}
    denominator = denominator_of(batch, config)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return run({**old, "logprobs": logprobs}, config, denominator)[0]

    leaf = batch["logprobs"].clone().requires_grad_()
    if config.surrogate is Surrogate.cispo:
        # Its ratio is a constant: the gradient is not the derivative of the value.
        policy_gradient = torch.autograd.grad(loss(leaf), leaf)[0]
        assert torch.isfinite(policy_gradient).all()
        return
    assert torch.autograd.gradcheck(loss, leaf)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """With ratio 1 the gradient is -A / tokens, for PPO, and for CISPO too."""
    for surrogate in (Surrogate.ppo, Surrogate.cispo):
        config = dataclasses.replace(PLAIN, surrogate=surrogate)
        batch = make_batch()
        leaf = batch["logprobs"].clone().requires_grad_()
        denominator = denominator_of(batch, config)
        loss, _ = policy_loss(
            leaf, None, None, None, batch["advantages"], batch["mask"], batch["ids"],
            config=config, denominator=denominator,
        )  # fmt: skip
        loss.backward()
        expected = -batch["advantages"] * batch["mask"] / denominator
        assert torch.allclose(leaf.grad, expected, atol=1e-15)


def test_gspo_with_sequence_mean_is_the_papers_objective() -> None:
    config = ObjectiveConfig(
        surrogate=Surrogate.gspo,
        aggregation=Aggregation.sequence_mean,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0,
    )
    ratios = torch.tensor([1.1, 1.1, 0.7], dtype=F64)
    loss, _ = policy_loss(
        ratios.log() - 2,
        torch.full((3,), -2.0, dtype=F64),
        None,
        None,
        torch.tensor([2.0, 2.0, -1.0], dtype=F64),
        torch.ones(3),
        torch.tensor([4, 4, 9]),
        config=config,
        denominator=2.0,
    )
    # Sequence 4: s = 1.1, -2.2. Sequence 9: s = 0.7, clipped to 0.8 as A < 0: +0.8.
    assert loss.item() == pytest.approx((-2.2 + 0.8) / 2)


@pytest.mark.parametrize("config", FULL)
def test_split_packing_and_order_change_nothing(config: ObjectiveConfig) -> None:
    batch = make_batch()
    value, gradient = loss_and_gradient(batch, config)
    order = torch.tensor([14, 12, 10, 11, 13])
    per_sequence = [(batch["ids"] == i).nonzero().squeeze(-1) for i in order]
    two = [torch.cat(per_sequence[:2]), torch.cat(per_sequence[2:])]
    empty = torch.zeros(0, dtype=torch.int64)
    for parts in (per_sequence, two, [*two, empty]):
        split_value, split_gradient = loss_and_gradient(batch, config, parts)
        assert split_value == pytest.approx(value, abs=1e-12)
        assert torch.allclose(split_gradient, gradient, atol=1e-12)


@settings(max_examples=25, **REPEATABLE)
@given(seed=st.integers(0, 2**16), config=st.sampled_from(FULL), junk=st.sampled_from([1e30, 0.0]))
def test_masked_tokens_are_invisible(seed: int, config: ObjectiveConfig, junk: float) -> None:
    """Whatever stands at masked positions, NaN and inf too, changes neither loss nor gradient."""
    batch = make_batch(seed)
    value, gradient = loss_and_gradient(batch, config)
    hidden = batch["mask"] == 0
    hostile = dict(batch)
    for name, filler in (
        ("old", math.nan), ("sampler", -math.inf), ("reference", math.inf),
        ("advantages", math.nan), ("entropy", junk), ("logprobs", junk),
    ):  # fmt: skip
        hostile[name] = torch.where(hidden, torch.full_like(batch[name], filler), batch[name])
    other_value, other_gradient = loss_and_gradient(hostile, config)
    assert other_value == value
    assert torch.equal(other_gradient, gradient)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_non_finite_sampler_tokens_leave_numerator_and_denominator(
    bad: float, aggregation: Aggregation
) -> None:
    config = dataclasses.replace(FULL[0], aggregation=aggregation)
    batch = make_batch()
    victim = batch["mask"].nonzero()[2].item()
    broken = {**batch, "sampler": batch["sampler"].clone()}
    broken["sampler"][victim] = bad
    masked = {**batch, "mask": batch["mask"].clone()}
    masked["mask"][victim] = 0
    assert denominator_of(broken, config) == denominator_of(masked, config)
    value, gradient = loss_and_gradient(broken, config)
    assert (value, gradient.tolist()) == (
        loss_and_gradient(masked, config)[0],
        loss_and_gradient(masked, config)[1].tolist(),
    )
    assert not valid_tokens(broken["mask"], broken["sampler"])[victim]
    assert run(broken, config, 1.0)[1]["masked_nonfinite"] == 1


@pytest.mark.parametrize("config", FULL)
def test_all_masked_batch_gives_a_connected_zero(config: ObjectiveConfig) -> None:
    batch = make_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    assert denominator_of(batch, config) == 0
    value, gradient = loss_and_gradient(batch, config)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("config", FULL)
def test_zero_length_and_single_token_responses(config: ObjectiveConfig) -> None:
    """A response without tokens adds nothing; one of one token counts as one sequence."""
    both = make_batch(5, (1, 0, 4))
    both["mask"] = torch.tensor([0, 1, 0, 0, 1, 1, 1, 1])
    without = {name: value[both["ids"] != 11] for name, value in both.items()}
    assert denominator_of(both, config) == denominator_of(without, config)
    assert loss_and_gradient(both, config)[0] == loss_and_gradient(without, config)[0]
    if config.aggregation is Aggregation.sequence_mean:
        assert denominator_of(both, config) == 2


def test_ranks_are_just_another_split() -> None:
    """Two ranks, gradients averaged as FSDP does, loss multiplied by the world size."""
    config = FULL[0]
    batch = make_batch()
    value, gradient = loss_and_gradient(batch, config)
    denominator = denominator_of(batch, config)
    shares, gradients, sums = [], [], {}
    for keep in (batch["ids"] <= 11, batch["ids"] > 11):
        leaf = batch["logprobs"].clone().requires_grad_()
        loss, part = run({**batch, "logprobs": leaf}, config, denominator, keep)
        (2 * loss).backward()
        shares.append(loss.item())
        gradients.append(leaf.grad)
        sums = add_sums(sums, part)
    assert sum(shares) == pytest.approx(value, abs=1e-12)
    assert torch.allclose((gradients[0] + gradients[1]) / 2, gradient, atol=1e-12)
    whole = run(batch, config, denominator)[1]
    assert sums.keys() == whole.keys()
    for name, total in whole.items():
        assert sums[name] == pytest.approx(total, abs=1e-9), name


def test_float32_and_bfloat16_stay_finite_at_a_huge_gap() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaf = torch.full((4,), -1000.0, dtype=dtype, requires_grad=True)
        zeros = torch.zeros(4)
        loss, sums = policy_loss(
            leaf, zeros, zeros - 500, zeros, torch.ones(4), torch.ones(4), torch.arange(4),
            config=FULL[0], denominator=4.0, entropy_T=zeros,
        )  # fmt: skip
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(leaf.grad).all()
        assert all(math.isfinite(value) for value in sums.values())


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    config = dataclasses.replace(PLAIN, kl_coef=0.3, kl_place="reward")
    batch = make_batch()
    denominator = denominator_of(batch, config)
    with_kl, sums = run(batch, config, denominator)
    assert with_kl.item() == run(batch, PLAIN, denominator)[0].item()
    assert sums["kl"] > 0  # still reported


def test_missing_tensors_and_wrong_settings_are_named() -> None:
    batch = make_batch()
    arguments = (batch["advantages"], batch["mask"], batch["ids"])
    for changes, words in (
        ({"correction": "icepop"}, "correction=icepop needs the sampler"),
        ({"kl_coef": 0.1}, r"kl_coef=0\.1 needs reference"),
        ({"entropy_coef": 0.1}, r"entropy_coef=0\.1 needs the entropy"),
    ):
        with pytest.raises(UserError, match=words):
            policy_loss(
                batch["logprobs"], None, None, None, *arguments,
                config=dataclasses.replace(PLAIN, **changes), denominator=1.0,
            )  # fmt: skip
    for changes, words in (
        ({"clip_low": -0.1}, r"clip_low=-0\.1"),
        ({"kl_coef": math.nan}, "kl_coef=nan"),
        ({"dual_clip": 0.9}, r"dual_clip=0\.9 must be above 1"),
        ({"surrogate": "trpo"}, "surrogate='trpo' is unknown; choose one of ppo, gspo, cispo"),
        ({"correction_low": 9.0}, r"correction_low=9\.0"),
        ({"aggregation": "constant"}, "constant_tokens=None"),
    ):
        with pytest.raises(UserError, match=words):
            dataclasses.replace(PLAIN, **changes)


def test_config_from_a_recipe() -> None:
    config = objective_config(
        AlgorithmConfig(aggregation=Aggregation.constant, kl_coef=0.0), max_new_tokens=77
    )
    assert config.constant_tokens == 77
    assert not config.needs_reference
    assert (config.clip_low, config.clip_high) == (0.2, 0.4)


def test_every_field_of_the_objective_comes_from_the_recipe() -> None:
    """A setting that stopped at the recipe would be one that nobody can switch on."""
    algorithm = AlgorithmConfig(
        surrogate=Surrogate.cispo, aggregation=Aggregation.sequence_mean, clip_low=0.11,
        clip_high=0.12, dual_clip=3.0, kl_coef=0.13, kl_estimator=KlEstimator.k1,
        kl_place=KlPlace.reward, kl_input_clamp=1.5, kl_output_clamp=1.6,
        kl_importance_weighted=True, correction=Correction.icepop, correction_low=0.14,
        correction_high=0.15, entropy_coef=0.16,
    )  # fmt: skip
    config = objective_config(algorithm, max_new_tokens=17)
    for field in dataclasses.fields(ObjectiveConfig):
        expected = 17 if field.name == "constant_tokens" else getattr(algorithm, field.name)
        assert getattr(config, field.name) == expected, field.name


def test_mixed_versions_in_one_trajectory() -> None:
    """Weights changed in flight: each token is corrected by the version that sampled it."""
    config = dataclasses.replace(PLAIN, correction=Correction.decoupled, clip_high=0.2)
    old = torch.full((4,), -1.0, dtype=F64)
    gaps = torch.tensor([1.0, 1.0, 2.0, 4.0], dtype=F64)  # two tokens of this version, two older
    leaf = old.clone().requires_grad_()
    loss, sums = policy_loss(
        leaf, old, old - gaps.log(), None, torch.ones(4), torch.ones(4), torch.zeros(4),
        config=config, denominator=4.0,
    )  # fmt: skip
    loss.backward()
    # Ratio 1 and A = 1: the gradient is -w / 4, with w = pi_old / pi_sampler per token.
    assert leaf.grad.tolist() == pytest.approx([-0.25, -0.25, -0.5, -1.0])
    assert sums["correction_weight"] == pytest.approx(8.0)
