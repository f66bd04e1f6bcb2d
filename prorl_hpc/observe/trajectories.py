"""Groups of a run's buffer as readable text. Reads shards; decodes with the run's tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hpc.errors import HpcError, UserError
from prorl_hpc.records import Group, Trajectory
from prorl_hpc.run import Run

Decode = Callable[[Sequence[int]], str]


class GroupMissing(UserError, KeyError):
    """No closed group of that number."""

    __str__ = Exception.__str__


def read_group(run: Run, group_id: int) -> Group:
    """The group's usable trajectories; raises GroupMissing naming what there is."""
    from prorl_hpc.buffer.export import closed_groups
    from prorl_hpc.buffer.groups import reference
    from prorl_hpc.buffer.reader import GroupReader

    closed = {line.group: line for line in closed_groups(run)}
    if group_id not in closed:
        there = f"closed: {min(closed)} to {max(closed)}" if closed else "none is closed yet"
        raise GroupMissing(f"group {group_id} of run {run.name!r} isn't in its buffer ({there})")
    reader = GroupReader(run)
    try:
        return reader.read(reference(closed[group_id]))
    except HpcError as err:
        raise err if isinstance(err, UserError) else UserError(str(err)) from err
    finally:
        reader.close()


def load_decoder(run: Run) -> Decode:
    """Token ids to text; raises UserError when the run has no tokenizer file yet."""
    path = _tokenizer_file(run)
    if path is None:
        raise UserError(
            f"run {run.name!r} has no tokenizer.json yet (neither in start/ nor in policy/); "
            "use --ids"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise UserError("package tokenizers is missing; pip install 'prorl-hpc[learner]'") from err
    tokenizer = Tokenizer.from_file(str(path))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def _tokenizer_file(run: Run) -> Path | None:
    candidates = [run.model_start / "tokenizer.json"]
    if run.policies.is_dir():
        candidates += sorted(run.policies.glob("v*/tokenizer.json"), reverse=True)
    return next((path for path in candidates if path.is_file()), None)


def describe_group(group: Group, *, decode: Decode, only: int | None = None) -> str:
    """Every trajectory with its reward; what the policy sampled stands between bars."""
    title = (
        f"group {group.group_id}: {group.kind.value}, task {group.task}, "
        f"instance {group.instance_id}, {len(group.trajectories)} usable rollouts"
    )
    parts = [title]
    for one in group.trajectories:
        if only is None or one.rollout_index == only:
            parts.append(describe_trajectory(one, decode=decode))
    return "\n\n".join(parts)


def describe_trajectory(one: Trajectory, *, decode: Decode) -> str:
    """One attempt: outcome, reward, and its text by segments."""
    reward = "none" if one.reward is None else f"{one.reward:g}"
    title = (
        f"rollout {one.rollout_index}: reward {reward}, {one.outcome.value}, "
        f"ended by {one.finish_reason}, {int(one.loss_mask.sum())} of {len(one.tokens)} tokens "
        f"sampled, oldest policy version {one.oldest_version}"
    )
    facts = [title]
    if one.components:
        facts.append(
            "components: " + ", ".join(f"{k} {v:g}" for k, v in sorted(one.components.items()))
        )
    if one.detail:
        facts.append(f"detail: {one.detail}")
    for sampled, ids in segments(one):
        text = decode(ids)
        facts.append(f"--- {'policy' if sampled else 'given'} ---\n{text}")
    return "\n".join(facts)


def segments(one: Trajectory) -> list[tuple[bool, list[int]]]:
    """Stretches of tokens: (whether the policy sampled them, ids)."""
    found: list[tuple[bool, list[int]]] = []
    for token, mask in zip(one.tokens.tolist(), one.loss_mask.tolist(), strict=True):
        if not found or found[-1][0] != bool(mask):
            found.append((bool(mask), []))
        found[-1][1].append(token)
    return found
