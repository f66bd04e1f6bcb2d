"""Scores of an evaluation by hand, its leases, and the numbers of samples that it can speak of."""

import pytest

from hpc.errors import UserError
from prorl_hpc.cli.evaluate import parse_ks
from prorl_hpc.evaluation.estimators import EvaluationError
from prorl_hpc.evaluation.evaluate import plan_leases, score_tasks
from prorl_hpc.recipe import Recipe, TaskConfig
from tests.prorl_hpc.cli.support import trajectory


def test_evaluation_scores_by_hand() -> None:
    rewards = {0: [1.0, 0.0], 1: [0.0, 0.0], 2: [1.0, None]}
    every = [
        trajectory(reward, group=group, index=i)
        for group, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    score = score_tasks(every, ks=[1], seed=0)["a"]
    assert (score.instances, score.samples, score.failures) == (3, 1, 1)
    # pass@1: 1/2, 0 and 1 (one usable rollout); their mean is 1/2
    assert score.pass_at[1].mean == pytest.approx(0.5)
    assert score.response_tokens == 2.0
    # one of two instances was ever solved; the third has too few rollouts to say
    two = score_tasks(every, ks=[2], seed=0)["a"]
    assert two.pass_at[2].mean == pytest.approx(0.5)
    with pytest.raises(EvaluationError, match="pass@3 needs at least 3 samples"):
        score_tasks(every, ks=[3], seed=0)
    with pytest.raises(EvaluationError, match="task a: all rollouts were lost"):
        score_tasks(every[-1:], ks=[1], seed=0)


def test_leases_of_an_evaluation() -> None:
    tasks = {"a": TaskConfig(kind="logic", validation_size=64)}
    leases = plan_leases(Recipe(name="r", steps=1, tasks=tasks), sizes={"a": 3}, num_samples=4)
    assert [lease.instance_index for lease in leases] == [0, 1, 2]
    assert leases[0].rollouts == (0, 1, 2, 3)
    assert len({lease.seed for lease in leases}) == 3


@pytest.mark.parametrize("text", ["0", "5", "x", ""])
def test_ks_that_cannot_be_estimated(text: str) -> None:
    with pytest.raises(UserError, match="--k"):
        parse_ks(text, samples=4)
    assert parse_ks("4,1", samples=4) == [1, 4]
