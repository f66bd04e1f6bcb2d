"""Problems of the command line, made from a seed: the families, and several of them in one.

A family draws files, a wish in words, what must be true afterwards, and a shell solution that needs
to know nothing but the wish. Checks that hold before anything is done become guards, so that doing
nothing never earns a reward; what isn't named as changed must stay as it is. Pure.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from prorl_hpc.tasks.cli import families_data, families_files, families_text
from prorl_hpc.tasks.cli.checks import Check, Digest, holds
from prorl_hpc.tasks.cli.dice import Dice, Draft
from prorl_hpc.tasks.cli.problem import WORK, CliProblem, Files, lay_out
from prorl_hpc.tasks.cli.state import EntryKind

Family = Callable[[Dice, int], Draft]
"""(randomness, level from 1 to 5) -> a problem."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **families_files.FAMILIES,
        **families_text.FAMILIES,
        **families_data.FAMILIES,
    }
)


def make_problem(
    seed: int, *, families: Sequence[str], first: int, levels: tuple[int, int],
    parts: tuple[int, int],
) -> CliProblem:  # fmt: skip
    """One problem, whose `id` names its families. `first` chooses the first of them."""
    dice = Dice(seed)
    num_parts = dice.randint(*parts)
    names = [families[first % len(families)], *dice.choices(families, k=num_parts - 1)]
    drafts = [FAMILIES[name](dice, dice.randint(*levels)) for name in names]
    draft = drafts[0] if num_parts == 1 else joined(drafts)
    return finished(draft, family="+".join(names))


def joined(drafts: Sequence[Draft]) -> Draft:
    """Several problems as one, each in its own directory."""
    wishes: list[str] = []
    golds: list[str] = []
    files: Files = {}
    checks: list[Check] = []
    changed: set[str] = set()
    for number, draft in enumerate(drafts, start=1):
        place = f"part{number}"
        wishes.append(f"{number}. In `{place}` (paths of this part are below it): {draft.wish}")
        files |= {f"{place}/{name}": given for name, given in draft.files.items()}
        checks += [
            msgspec.structs.replace(check, path=f"{place}/{check.path}") for check in draft.checks
        ]
        golds.append(f"(cd {place} && {{ {draft.gold}\n}})")
        changed |= {f"{place}/{name}" for name in draft.changed}
    return Draft(
        wish=f"This has {len(drafts)} parts.\n" + "\n".join(wishes),
        files=files,
        checks=checks,
        gold="\n".join(golds),
        changed=frozenset(changed),
    )


def finished(draft: Draft, *, family: str) -> CliProblem:
    """The problem of a draft, with guards over what must stay. Raises ValueError for a bad one."""
    state = lay_out(draft.files, WORK)
    checks: list[Check] = []
    for check in draft.checks:
        done = holds(check, state, directory=WORK)
        checks.append(msgspec.structs.replace(check, guard=True) if done else check)
    if all(check.guard for check in checks):
        raise ValueError(f"{family}: nothing is left to be done")
    return CliProblem(
        instruction=draft.wish,
        files=draft.files,
        checks=[*checks, *_untouched(draft.files, draft.changed)],
        solution=draft.gold,
        id=family,
    )


def _untouched(files: Files, changed: frozenset[str]) -> list[Check]:
    state = lay_out(files, WORK)
    guards: list[Check] = []
    for name in files:
        entry = state[f"{WORK}/{name}"]
        if name not in changed and entry.kind is EntryKind.file:
            digest = hashlib.sha256(entry.data).hexdigest()
            guards.append(Digest(path=name, sha256=digest, guard=True))
    return guards
