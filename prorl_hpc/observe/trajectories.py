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


def read_group(run: Run, number: int, *, validation: int | None = None) -> Group:
    """The usable trajectories of a training group, or of one of the validation of a version.

    Raises GroupMissing naming what there is.
    """
    from prorl_hpc.buffer.export import closed_groups
    from prorl_hpc.buffer.groups import reference
    from prorl_hpc.buffer.reader import GroupReader
    from prorl_hpc.buffer.validation import IDS_PER_VERSION, first_group

    closed = {line.group: line for line in closed_groups(run)}
    group_id = number if validation is None else first_group(validation) + number
    fits = number >= 0 and (validation is None or number < IDS_PER_VERSION)
    if not fits or (validation is None and number >= first_group(0)) or group_id not in closed:
        raise GroupMissing(_missing(run, number, validation, ids=sorted(closed)))
    reader = GroupReader(run)
    try:
        return reader.read(reference(closed[group_id]))
    except HpcError as err:
        raise err if isinstance(err, UserError) else UserError(str(err)) from err
    finally:
        reader.close()


def _missing(run: Run, number: int, validation: int | None, *, ids: Sequence[int]) -> str:
    """What was asked for, and what there is, in the numbers that the user may type."""
    from prorl_hpc.buffer.validation import place

    train = [group for group in ids if place(group) is None]
    versions: dict[int, int] = {}
    for found in filter(None, map(place, ids)):
        versions[found[0]] = versions.get(found[0], 0) + 1
    there = [f"closed: {train[0]} to {train[-1]}"] if train else []
    if versions:
        groups = ", ".join(f"{version} ({count} groups)" for version, count in versions.items())
        there.append(f"--validation of version {groups}")
    of = "" if validation is None else f" of the validation of version {validation}"
    listed = "; ".join(there) or "none is closed yet"
    return f"group {number}{of} of run {run.name!r} isn't in its buffer ({listed})"


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
    from prorl_hpc.buffer.validation import place

    found = place(group.group_id)
    number, of = (group.group_id, "train") if found is None else (found[1], "validation")
    title = (
        f"group {number}: {of}{'' if found is None else f' of version {found[0]}'}, "
        f"task {group.task}, instance {group.instance_id}, "
        f"{len(group.trajectories)} usable rollouts"
    )
    there = [one.rollout_index for one in group.trajectories]
    if only is not None and only not in there:
        raise GroupMissing(f"rollout {only} of group {number} isn't usable; usable are {there}")
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
