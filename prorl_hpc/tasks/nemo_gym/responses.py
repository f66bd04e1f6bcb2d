"""Episodes in the form that NeMo Gym's servers and trainers read: a Responses API object.

    answer -> [reasoning] [message] [function_call ...]   the last item carries the token fields
    result -> function_call_output

Pure. Token fields are Gym's: `prompt_token_ids`, `generation_token_ids`, `generation_log_probs`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from prorl_hpc.agents.functions import Step
from prorl_hpc.agents.turns import Turn

Item = dict[str, Any]


def output_items(steps: Sequence[Step], turns: Sequence[Turn]) -> list[Item]:
    """`response.output` of an episode: step number i is the answer of turn number i."""
    items: list[Item] = []
    for number, (step, turn) in enumerate(zip(steps, turns, strict=True)):
        answer = _answer_items(step, number=number)
        answer[-1] |= token_fields(turn)
        items += answer
        items += [
            {"type": "function_call_output", "call_id": f"call_{number}_{place}", "output": result}
            for place, result in enumerate(step.results)
        ]
    return items


def token_fields(turn: Turn) -> Item:
    """What a trainer learns from."""
    return {
        "prompt_token_ids": turn.prompt_ids,
        "generation_token_ids": turn.answer_ids,
        "generation_log_probs": turn.logprobs,
    }


def response_object(
    identity: str, *, output: Sequence[Item], tools: Sequence[Item], created_at: float, cut: bool
) -> dict[str, Any]:
    """A whole response; `cut` where a token limit ended it."""
    return {
        "id": identity,
        "object": "response",
        "created_at": created_at,
        "model": "policy",
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": list(tools),
    }


def _answer_items(step: Step, *, number: int) -> list[Item]:
    thought, text = _split_thought(step.text)
    items: list[Item] = []
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary})
    if text or not step.calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed",
             "content": content}
        )  # fmt: skip
    for place, call in enumerate(step.calls):
        items.append(
            {"id": f"fc_{number}_{place}", "type": "function_call", "status": "completed",
             "call_id": f"call_{number}_{place}", "name": call.name,
             "arguments": msgspec.json.encode(call.arguments).decode()}
        )  # fmt: skip
    return items


def _split_thought(text: str) -> tuple[str, str]:
    """What stands before the last `</think>`, and the rest; all of it while still thinking."""
    if "</think>" in text:
        thought, _, rest = text.rpartition("</think>")
    elif "<think>" in text:
        thought, rest = text, ""
    else:
        thought, rest = "", text
    return thought.replace("<think>", "").strip(), rest.strip()
