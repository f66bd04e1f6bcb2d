"""Drawing tokens: distribution, log-probabilities, filters."""

import math
from random import Random

import pytest

torch = pytest.importorskip("torch")

from prorl_hpc.inference.engine import Sampling  # noqa: E402
from prorl_hpc.inference.sampling import draw  # noqa: E402


def sampling(**values):
    return Sampling(**({"temperature": 1.0, "max_new_tokens": 1} | values))


def test_logprobs_are_of_logits_over_temperature():
    # softmax of (2, 0) at T=2 is softmax of (1, 0): e/(e+1)
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]]), [sampling(temperature=2.0)], [Random(0)])
    want = [math.log(math.e / (math.e + 1)), math.log(1 / (math.e + 1))]
    assert logprobs[0] == pytest.approx(want[tokens[0]], abs=1e-6)


def test_greedy_reports_temperature_one():
    tokens, logprobs = draw(torch.tensor([[1.0, 0.0]]), [sampling(temperature=0)], [Random(0)])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(math.log(math.e / (math.e + 1)), abs=1e-6)


def test_frequencies_follow_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25, 0.0]])).repeat(4000, 1)
    tokens, _ = draw(logits, [sampling()] * 4000, [Random(i) for i in range(4000)])
    assert abs(tokens.count(0) / 4000 - 0.5) < 0.04  # 5 standard deviations
    assert tokens.count(3) == 0


def test_top_p_keeps_the_fewest_that_reach_it_and_normalises():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(200, 1)
    tokens, logprobs = draw(logits, [sampling(top_p=0.7)] * 200, [Random(i) for i in range(200)])
    assert set(tokens) == {0, 1}
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log([0.625, 0.375][token]), abs=1e-5)


def test_top_k_one_is_certain():
    tokens, logprobs = draw(torch.tensor([[0.0, 3.0, 1.0]]), [sampling(top_k=1)], [Random(1)])
    assert tokens == [1]
    assert logprobs[0] == pytest.approx(0.0, abs=1e-6)


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone, _ = draw(logits[1:2], [sampling()], [Random(7)])
    among, _ = draw(logits, [sampling()] * 3, [Random(1), Random(7), Random(2)])
    assert among[1] == alone[0]
