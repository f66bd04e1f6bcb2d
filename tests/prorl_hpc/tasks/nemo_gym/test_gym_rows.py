"""Gym rows as problems, and episodes as Responses API objects."""

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.functions import MAX_OBSERVATION_CHARACTERS, Step, read_step, shortened
from prorl_hpc.agents.tools import Call
from prorl_hpc.agents.turns import Turn, turns_of
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.nemo_gym.responses import output_items, response_object
from prorl_hpc.tasks.nemo_gym.rows import row_of, tools_of
from prorl_hpc.tasks.nemo_gym.server import Verified
from prorl_hpc.tasks.nemo_gym.task import make_nemo_gym, score_of

SERVER = {"resources_server": "http://127.0.0.1:1"}
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
    "strict": True,
}


def row(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"responses_create_params": {"input": [message]}, "expected_answer": text} | more


def make(path: Path, rows: list[Any], **config: Any) -> Any:
    data = path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    values = {"options": SERVER, "validation_size": 1} | config
    return make_nemo_gym("gym", TaskConfig(kind="nemo_gym", data=str(data), **values), 0)


def test_rows_are_split_and_kept_whole_for_the_server(tmp_path: Path) -> None:
    rows = [row("one", uuid="a"), row("two", id=7), row("three")]
    task = make(tmp_path, rows)
    assert task.size(Kind.train) + task.size(Kind.validation) == 3
    instances = [task.instance(i, kind=Kind.train) for i in range(2)]
    instances.append(task.instance(0, kind=Kind.validation))
    assert sorted((i.answer for i in instances), key=str) == sorted(rows, key=str)
    assert {"a", "7"} < {i.instance_id for i in instances}
    with pytest.raises(VerifierError, match="in a session"):
        task.score(instances[0], "x")
    assert task.demonstration(instances[0]) is None


def test_the_prompt_is_the_rows(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = {"input": [{"role": "developer", "content": "be brief"},
                       {"role": "user", "content": parts}]}  # fmt: skip
    task = make(tmp_path, [{"responses_create_params": given}, row("x")], system_prompt="unused")
    found = {
        tuple((m.role, m.content) for m in task.instance(0, kind=kind).messages) for kind in Kind
    }
    assert (("system", "be brief"), ("user", "ab")) in found
    instructed = {"responses_create_params": {"input": "hi", "instructions": "be kind"}}
    task = make(tmp_path, [instructed, row("x")])
    found = {
        tuple((m.role, m.content) for m in task.instance(0, kind=kind).messages) for kind in Kind
    }
    assert (("system", "be kind"), ("user", "hi")) in found


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"expected_answer": "x"}, "line 2 has no field 'responses_create_params'"),
        ({"responses_create_params": {}}, "line 2 has no field 'input'"),
        ({"responses_create_params": {"input": []}}, "input is empty"),
        ({"responses_create_params": {"input": "x", "tools": [TOOL]}}, "agent=tools and max_turns"),
        (
            {"responses_create_params": {"input": [{"type": "function_call", "name": "f"}]}},
            "item of type 'function_call' isn't supported",
        ),
        (
            {"responses_create_params": {"input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}},
            "'input_image' isn't supported",
        ),
        ({"responses_create_params": {"input": ["hello"]}}, "input item 'hello' isn't a message"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": ["hello"]}]}},
            "input of type 'hello' isn't supported",
        ),
        ({"responses_create_params": {"input": "x", "tools": ["f"]}}, "tool 'f' isn't an object"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_run_are_named(tmp_path: Path, wrong: Any, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        make(tmp_path, [row("x"), wrong])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"options": {}}, "resources_server is missing"),
        ({"options": {"resources_server": "localhost:80"}}, "isn't http://HOST:PORT"),
        (
            {"options": {"resources_servers": {"a": "http://x:1"}}},
            "has no server",
        ),
        ({"options": {"server": "x"}}, "options.server is unknown"),
        ({"environment": EnvironmentKind.bubblewrap}, "environment=none"),
        ({"agent": AgentKind.bash}, "agent=single_turn or tools"),
        ({"agent": AgentKind.harness}, "agent=single_turn or tools"),
    ],
)
def test_a_recipe_that_can_not_work_is_named(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        make(tmp_path, [row("x"), row("y")], **config)


def test_each_agent_of_a_mixed_set_has_its_server(tmp_path: Path) -> None:
    reference = {"type": "responses_api_agents", "name": "math"}
    rows = [row("x", agent_ref=reference), row("y", agent_ref=reference | {"name": "other"})]
    options = {"resources_servers": {"math": "http://a:1/"}, "resources_server": "https://b"}
    task = make(tmp_path, rows, options=options)
    servers = {task._server(r) for r in rows}
    assert servers == {"http://a:1", "https://b"}


def test_tools_in_the_form_of_chat_templates() -> None:
    (schema,) = tools_of({"responses_create_params": {"tools": [TOOL]}})
    assert schema == {
        "type": "function",
        "function": {k: TOOL[k] for k in ("name", "description", "parameters")},
    }
    with pytest.raises(ValueError, match="web_search"):
        tools_of({"responses_create_params": {"tools": [{"type": "web_search"}]}})


@pytest.mark.parametrize("answer", ["x", {}, {"responses_create_params": "x"}, None])
def test_an_instance_that_is_no_row_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="must be the Gym row"):
        row_of(answer)


def test_turns_are_runs_of_sampled_tokens() -> None:
    turns = turns_of(
        [5, 6, 7, 8, 9], loss_mask=[0, 1, 1, 0, 1], logprobs=[0.0, -0.1, -0.2, 0.0, -0.3]
    )
    assert turns == [
        Turn(prompt_ids=[5], answer_ids=[6, 7], logprobs=[-0.1, -0.2]),
        Turn(prompt_ids=[5, 6, 7, 8], answer_ids=[9], logprobs=[-0.3]),
    ]
    assert turns_of([], loss_mask=[], logprobs=[]) == []


def test_an_episode_as_output_items() -> None:
    call = Call(name="f", arguments={"x": 1})
    steps = [
        Step(text="<think>hm</think>", calls=(call,), results=("3",)),
        Step(text="<think>so</think>It is 3."),
    ]
    turns = [
        Turn(prompt_ids=[1], answer_ids=[2, 3], logprobs=[-0.5, -0.25]),
        Turn(prompt_ids=[1, 2, 3, 4], answer_ids=[5], logprobs=[-1.0]),
    ]
    items = output_items(steps, turns)
    assert [item["type"] for item in items] == [
        "reasoning", "function_call", "function_call_output", "reasoning", "message",
    ]  # fmt: skip
    assert items[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert items[1]["arguments"] == '{"x":1}'
    assert items[1]["call_id"] == items[2]["call_id"]
    assert items[2]["output"] == "3"
    assert items[4]["content"][0]["text"] == "It is 3."
    # only the last item of each answer carries the tokens
    assert [item.get("generation_token_ids") for item in items] == [None, [2, 3], None, None, [5]]
    assert items[4]["prompt_token_ids"] == [1, 2, 3, 4]
    assert items[1]["generation_log_probs"] == [-0.5, -0.25]
    whole = response_object("r", output=items, tools=[TOOL], created_at=0.0, cut=True)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


def test_calls_that_can_not_be_read_stay_text() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_step(f"first {good}") == Step(text="first", calls=(Call(name="f"),))
    bad = "<tool_call>{not json}</tool_call>"
    assert read_step(bad) == Step(text=bad)
    assert read_step(f"{good} {bad}") == Step(text=bad, calls=(Call(name="f"),))
    long = shortened("x" * (MAX_OBSERVATION_CHARACTERS + 5))
    assert "5 characters left out" in long


@pytest.mark.parametrize(
    ("verified", "words"),
    [
        (Verified(reward=True), "reward=True"),
        (Verified(reward=None), "reward=None"),
        (Verified(reward="1"), "not a number"),
        (Verified(reward=float("nan")), "not finite"),
        (Verified(reward=1.0, reward_components={"a": float("inf")}), "a of /verify is not finite"),
        (
            Verified(reward=0.0, mask_sample=True, failure_kind="judge", failure_reason="down"),
            r"masks this sample \(judge\): down",
        ),
    ],
)
def test_what_is_no_reward(verified: Verified, words: str) -> None:
    with pytest.raises(VerifierError, match=words):
        score_of(verified)


def test_rewards_may_have_components() -> None:
    score = score_of(Verified(reward=1, reward_components={"a": 0.5}))
    assert (score.reward, score.components) == (1.0, {"a": 0.5})
