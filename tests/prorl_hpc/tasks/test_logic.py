"""Reasoning Gym puzzles as tasks."""

import pytest

pytest.importorskip("reasoning_gym")

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Outcome
from prorl_hpc.tasks import logic
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.registry import make_task

TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def task(family="chain_sum", *, seed=0, **options):
    config = TaskConfig(kind="logic", options={"family": family} | options)
    return make_task("puzzles", config, seed)


def test_an_instance_is_the_same_for_the_same_seed():
    one, two = (task().instance(5, kind=Kind.train) for _ in range(2))
    assert one == two
    assert task(seed=1).instance(5, kind=Kind.train) != one


def test_train_and_validation_share_no_question_even_of_few():
    puzzles = task(parameters=TINY)  # 200 distinct questions at most
    train = {puzzles.instance(i, kind=Kind.train).messages for i in range(400)}
    held = {puzzles.instance(i, kind=Kind.validation).messages for i in range(64)}
    assert not train & held
    assert len(train) > 60
    assert len(held) > 10


@pytest.mark.parametrize("family", ["chain_sum", "spell_backward", "countdown", "maze"])
def test_the_demonstration_scores_one(family):
    puzzles = task(family)
    for tags in (False, True):
        puzzles = task(family, answer_tags=tags)
        instance = puzzles.instance(3, kind=Kind.train)
        score = puzzles.score(instance, puzzles.demonstration(instance))
        assert score.reward == 1.0
        assert score.outcome is Outcome.scored


def test_tags_are_demanded_only_when_asked_for():
    strict, lenient = task(answer_tags=True), task()
    instance = strict.instance(0, kind=Kind.train)
    answer = instance.answer["entry"]["answer"]
    assert strict.score(instance, answer).outcome is Outcome.invalid
    assert strict.score(instance, f"so <answer> {answer} </answer>").reward == 1.0
    assert lenient.score(instance, f"<think>5?</think>{answer}").reward == 1.0
    assert lenient.score(instance, f"<think>{answer}").outcome is Outcome.invalid
    assert instance.messages[0].role == "system"


def test_what_a_scorer_chokes_on_is_an_invalid_answer():
    puzzles = task("prime_factorization")
    instance = puzzles.instance(0, kind=Kind.train)
    assert puzzles.score(instance, "two times three").outcome is Outcome.invalid


def test_instances_survive_the_wire():
    import msgspec

    instance = task("graph_color").instance(0, kind=Kind.train)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(instance), type=Instance)
    assert task("graph_color").score(copy, "{}").reward <= 0.1


def test_several_families_take_turns():
    puzzles = task(["gcd", "lcm"], parameters={"gcd": {"min_numbers": 2}})
    kinds = [puzzles.instance(i, kind=Kind.train).metadata["family"] for i in range(4)]
    assert kinds == ["gcd", "lcm", "gcd", "lcm"]


def test_all_leaves_out_only_what_is_broken():
    families = task("all")._families
    assert len(families) == 106 - len(logic.EXCLUDED)


@pytest.mark.parametrize("family", ["acre", "word_ladder", "list_functions", "gsm_symbolic"])
def test_families_that_are_prebuilt_reach_any_index(family):
    puzzles = task(family)
    last = puzzles.instance(puzzles.size(Kind.train) - 1, kind=Kind.train)
    assert puzzles.score(last, puzzles.demonstration(last)).reward == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "chain_sun"}, "did you mean 'chain_sum'"),
        ({"family": "game_of_life_halting"}, "any wrong answer"),
        ({"family": None}, "give a name"),
        ({"famly": "x"}, "did you mean 'family'"),
        ({"family": "chain_sum", "answer_tags": "yes"}, "must be bool"),
        ({"family": ["gcd", "lcm"], "parameters": {"min": 2}}, "isn't one of its families"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(TaskError, match=message):
        make_task("puzzles", TaskConfig(kind="logic", options=options), 0)


def test_parameters_that_a_family_does_not_know():
    with pytest.raises(TaskError, match="don't suit chain_sum"):
        task(parameters={"terms": 3}).instance(0, kind=Kind.train)


def test_an_unknown_kind_suggests_a_known_one():
    with pytest.raises(TaskError, match="did you mean 'logic'"):
        make_task("a", TaskConfig(kind="logik"), 0)


def test_a_prompt_shows_only_what_varies():
    puzzles = task("spell_backward", prompt="{word}>")
    plain = task("spell_backward")
    for kind in Kind:
        short, whole = puzzles.instance(3, kind=kind), plain.instance(3, kind=kind)
        word = whole.answer["entry"]["metadata"]["word"]
        assert short.messages[-1].content == f"{word}>"
        assert short.answer == whole.answer  # the problem, its split and its score are the same
        assert puzzles.score(short, word[::-1]).reward == 1.0


def test_a_prompt_with_a_foreign_field_names_those_there_are():
    with pytest.raises(TaskError, match=r"options.prompt=.*fields .*question.*word"):
        task("spell_backward", prompt="{wrod}>").instance(0, kind=Kind.train)


def test_exact_scores_have_no_partial_credit():
    whole, exact = task("spell_backward"), task("spell_backward", exact=True)
    instance = whole.instance(0, kind=Kind.train)
    right = whole.demonstration(instance)
    assert 0.0 < whole.score(instance, right[:-1]).reward < 1.0
    assert exact.score(instance, right[:-1]).reward == 0.0
    assert exact.score(instance, right).reward == 1.0
