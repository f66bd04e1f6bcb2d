"""A job's result with NeMo Gym's names, for trainers that read Gym rollouts. Pure.

Each usable sample is `{response: {output: [...]}, reward}`: an answer of the policy is a message
with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`. What stood between two
answers is in the prompt ids of the later one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from prorl_hpc.agents.functions import Step
from prorl_hpc.agents.turns import turns_of
from prorl_hpc.service.schema import JobResult
from prorl_hpc.tasks.nemo_gym.responses import output_items, response_object

Text = Callable[[Sequence[int]], str]


def gym_form(result: JobResult, *, text: Text) -> dict[str, Any]:
    """The result; samples without a reward are left out, as Gym leaves out masked ones."""
    rollouts = []
    for sample in result.samples:
        if sample.reward is None:
            continue
        turns = turns_of(sample.tokens, loss_mask=sample.loss_mask, logprobs=sample.logprobs)
        steps = [Step(text=text(turn.answer_ids)) for turn in turns]
        response = response_object(
            f"{result.id}-{sample.sample}",
            output=output_items(steps, turns),
            tools=(),
            created_at=0.0,
            cut=sample.finish_reason == "length",
        )
        rollouts.append(
            {
                "response": response,
                "reward": sample.reward,
                "reward_components": sample.components,
                "instance_id": result.instance_id,
                "rollout_index": sample.sample,
            }
        )
    return {"id": result.id, "state": result.state.value, "rollouts": rollouts}
