"""Alignment of packed tensors with the tokens they are about; positions counted by hand."""

import numpy as np
import pytest
import torch

from prorl_hpc.learner.batches import (
    Sample,
    build_micro_batch,
    plan_micro_batches,
    samples_of,
    split_updates,
)
from prorl_hpc.records import Group, Kind, Outcome, Trajectory
from tests.fakes.learner_client import trajectory


def group(*trajectories: Trajectory, group_id: int = 0) -> Group:
    return Group(
        group_id=group_id, kind=Kind.train, task="letters", instance_id="i",
        trajectories=tuple(trajectories),
    )  # fmt: skip


def samples(*trajectories: Trajectory, temperature: float = 0.8) -> list[Sample]:
    return samples_of([group(*trajectories)], temperatures={"letters": temperature})


def test_micro_batch_reads_the_token_before_and_targets_the_sampled_one() -> None:
    first = trajectory(group_id=0, index=0, tokens=[2, 7, 8, 9], num_prompt=2, reward=1.0)
    second = trajectory(
        group_id=0, index=1, tokens=[3, 5, 6], num_prompt=1, reward=0.0, logprob=-2.0
    )
    batch = build_micro_batch(samples(first, second), [0, 1], device="cpu")
    # Sampled: positions 2, 3 of the first; 1, 2 of the second, which starts at 4.
    assert batch.tokens_T.tolist() == [2, 7, 8, 9, 3, 5, 6]
    assert batch.predictors_M.tolist() == [1, 2, 4, 5]
    assert batch.targets_M.tolist() == [8, 9, 5, 6]
    assert batch.samples_M.tolist() == [0, 0, 1, 1]
    assert batch.sampler_M.tolist() == [-1.0, -1.0, -2.0, -2.0]
    assert torch.allclose(batch.temperatures_M, torch.tensor(0.8))
    assert batch.layout.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]


def test_what_follows_the_last_sampled_token_is_left_out() -> None:
    long = trajectory(group_id=0, index=0, tokens=[2, 3, 4, 5], num_prompt=1, reward=1.0)
    mask = np.array([0, 1, 0, 0], dtype=np.uint8)
    cut = Trajectory(
        group_id=0, rollout_index=0, kind=Kind.train, task="letters", instance_id="i",
        tokens=long.tokens, loss_mask=mask, logprobs=long.logprobs, versions=long.versions,
        reward=1.0,
    )  # fmt: skip
    (sample,) = samples(cut)
    assert sample.tokens.tolist() == [2, 3]
    assert sample.sampled.tolist() == [1]


def test_observations_between_turns_are_read_and_never_predicted() -> None:
    """Loss, KL and every metric are sums over these entries: no observation is among them."""
    whole = trajectory(group_id=0, index=0, tokens=[2, 3, 4, 5, 6, 7], num_prompt=1, reward=1.0)
    turns = Trajectory(
        group_id=0, rollout_index=0, kind=Kind.train, task="letters", instance_id="i",
        tokens=whole.tokens, loss_mask=np.array([0, 1, 0, 0, 1, 1], dtype=np.uint8),
        logprobs=np.array([0, -0.1, 0, 0, -0.4, -0.5], dtype=np.float32),
        versions=np.array([-1, 3, -1, -1, 4, 4], dtype=np.int32), reward=1.0,
    )  # fmt: skip
    (sample,) = samples(turns)
    batch = build_micro_batch([sample], [0], device="cpu")
    assert batch.tokens_T.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.predictors_M.tolist() == [0, 3, 4]
    assert batch.targets_M.tolist() == [3, 6, 7]
    assert batch.sampler_M.tolist() == pytest.approx([-0.1, -0.4, -0.5])
    assert (sample.response_tokens, sample.oldest_version) == (3, 3)


def test_padding_that_ends_turns_is_a_token_like_any_other() -> None:
    """pad == eos == 1: what was sampled is told by the mask alone, never by the token's id."""
    end = 1
    given = trajectory(group_id=0, index=0, tokens=[2, end, 7, end, end], num_prompt=3, reward=1.0)
    batch = build_micro_batch(samples(given), [0], device="cpu")
    assert batch.tokens_T.tolist() == [2, end, 7, end, end]
    assert batch.targets_M.tolist() == [end, end]
    assert batch.predictors_M.tolist() == [2, 3]


def test_a_first_sampled_token_has_no_predictor() -> None:
    (sample,) = samples(trajectory(group_id=0, index=0, tokens=[4, 5], num_prompt=0, reward=1.0))
    assert sample.sampled.tolist() == [1]


def test_empty_response_and_infrastructure_failure() -> None:
    empty = trajectory(group_id=0, index=0, tokens=[2, 3], num_prompt=2, reward=0.0)
    lost = trajectory(
        group_id=0, index=1, tokens=[2, 3], num_prompt=1, reward=None,
        outcome=Outcome.infrastructure_failure,
    )  # fmt: skip
    (sample,) = samples(empty, lost)
    assert sample.response_tokens == 0
    assert sample.oldest_version is None
    batch = build_micro_batch([sample], [0], device="cpu")
    assert batch.targets_M.numel() == 0


def test_truncation_is_not_a_proper_stop() -> None:
    kinds = {"stop": True, "length": False, "turns": False, "time": False}
    for reason, expected in kinds.items():
        (sample,) = samples(
            trajectory(
                group_id=0, index=0, tokens=[2, 3], num_prompt=1, reward=0.0, finish_reason=reason
            )
        )
        assert sample.stopped is expected


def test_a_dummy_predicts_nothing() -> None:
    dummy = build_micro_batch([], [], device="cpu")
    assert dummy.tokens_T.tolist() == [0]
    assert dummy.mask_M.numel() == 0


def test_updates_keep_groups_whole() -> None:
    parts = [
        group(
            *(
                trajectory(group_id=g, index=i, tokens=[2, 3], num_prompt=1, reward=0.0)
                for i in range(2)
            ),
            group_id=g,
        )
        for g in range(3)
    ]
    flat = samples_of(parts, temperatures={"letters": 1.0})
    assert split_updates(flat, 2) == [[0, 1, 2, 3], [4, 5]]
    assert split_updates(flat, 9) == [[0, 1], [2, 3], [4, 5]]
    assert split_updates([], 2) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_sample_over_the_budget_gets_a_micro_batch_of_its_own(num_ranks: int) -> None:
    """The others keep to the budget: one long sample must not make all micro-batches bigger."""
    lengths = [20, 3, 4, 4, 9, 2, 8]
    made = samples(
        *(
            trajectory(group_id=0, index=i, tokens=[2] * n, num_prompt=1, reward=0.0)
            for i, n in enumerate(lengths)
        )
    )
    chosen = [0, 1, 2, 3, 4, 6]
    plan = plan_micro_batches(made, chosen, token_budget=8, num_ranks=num_ranks, hidden_size=8)
    batches = [batch for rank in plan.micro_batches for batch in rank]
    assert sorted(i for batch in batches for i in batch) == chosen
    assert {(0,), (4,)} <= set(batches)
    assert max(sum(lengths[i] for i in b) for b in batches if b not in ((0,), (4,))) <= 8
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    assert plan.num_dummies == batches.count(())


def test_long_samples_alone_need_no_further_micro_batch() -> None:
    long = trajectory(group_id=0, index=0, tokens=[2] * 20, num_prompt=1, reward=0.0)
    plan = plan_micro_batches(samples(long), [0], token_budget=8, num_ranks=2, hidden_size=8)
    assert sorted(plan.micro_batches) == [((),), ((0,),)]
    empty = plan_micro_batches([], [], token_budget=8, num_ranks=2, hidden_size=8)
    assert empty.micro_batches == (((),), ((),))
