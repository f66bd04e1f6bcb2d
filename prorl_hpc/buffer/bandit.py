"""Which instance a new group is about, by a contextual bandit (Vowpal Wabbit). Reads no file.

Each instance that could come up is an action. Its features are its task and what is known of it:
never seen, or how often it was solved when it last came up and how many visits it has had. What an
action brings is the signal of its group, 4p(1-p) for a share p of solved rollouts: nothing where
all or none are solved, most at one half. So the model learns, task by task, whether new instances,
hard ones or half-solved ones teach more at present, and explores a tenth of the time.

A choice is a function of seed, group, and the groups before `floor` (those of earlier policy
versions). The manifest holds each choice with its features and its probability, and each group's
result: a restarted buffer learns them again in the order of their ids.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from hpc.errors import UserError
from prorl_hpc.buffer.curriculum import Choice, draw

CANDIDATES = 8
OPTIONS = "--cb_explore_adf --cb_type mtr --epsilon 0.1 -q ti --quiet --random_seed 1"
"""Learning from what was chosen alone (mtr), all pairs of task and instance features (-q ti)."""

Result = tuple[int, float]
"""(group, share of its rollouts that were solved)."""


class BanditMissing(UserError, ImportError):
    """The package that the bandit needs isn't installed."""


def make_workspace() -> Any:
    """A model that knows nothing. Raises BanditMissing."""
    try:
        import vowpalwabbit
    except ImportError as err:
        raise BanditMissing(
            "buffer.curriculum=bandit needs the package vowpalwabbit, which isn't installed; "
            "pip install 'prorl-hpc[bandit]', or choose buffer.curriculum=solve_rate"
        ) from err
    return vowpalwabbit.Workspace(OPTIONS)


class Bandit:
    """Results by instance, the model, and the choice that follows from them."""

    def __init__(self, *, seed: int, workspace: Callable[[], Any] = make_workspace) -> None:
        self._seed = seed
        self._model = workspace()
        self._results: dict[tuple[str, int], list[Result]] = {}
        self._choices: dict[int, Choice] = {}
        self._pending: list[tuple[int, str, float]] = []
        """(group, task, signal) that the model hasn't learned, ascending."""
        self._noted: set[int] = set()

    def chosen(self, group_id: int, choice: Choice) -> None:
        """An earlier attempt has made this choice."""
        self._choices[group_id] = choice

    def note(self, group_id: int, *, task: str, index: int, num_solved: int, known: int) -> None:
        """A group of the instance is closed, with `known` rewards of which `num_solved` count.

        Only its first result counts: one that was made again doesn't change what was learned.
        """
        if known < 2 or group_id in self._noted:
            return
        self._noted.add(group_id)
        share = num_solved / known
        insort(self._results.setdefault((task, index), []), (group_id, share))
        insort(self._pending, (group_id, task, 4.0 * share * (1.0 - share)))

    def choose(self, group_id: int, *, task: str, index: int, size: int, floor: int) -> Choice:
        """The instance of a new group that the mixture gave `index` of `size`.

        Results of groups from `floor` on aren't looked at.
        """
        self._learn(floor)
        others = (int(self._draw(group_id, turn, "other") * size) for turn in range(1, CANDIDATES))
        candidates = list(dict.fromkeys([index, *others]))
        contexts = [self._context(task, each, floor=floor) for each in candidates]
        chances = self._model.predict([_shared(task), *(f"|i {text}" for text in contexts)])
        place = _pick(chances, self._draw(group_id, 0, "which"))
        choice = Choice(
            index=candidates[place], context=contexts[place], probability=float(chances[place])
        )
        self._choices[group_id] = choice
        return choice

    def num_extreme(self) -> int:
        """Instances always or never solved in their newest group."""
        return sum(results[-1][1] in (0.0, 1.0) for results in self._results.values())

    def _learn(self, floor: int) -> None:
        """Takes in the signals of groups before `floor`, in the order of their ids."""
        end = bisect_left(self._pending, (floor,))
        due, self._pending = self._pending[:end], self._pending[end:]
        for group_id, task, signal in due:
            choice = self._choices.get(group_id)
            if choice is not None and choice.probability > 0:
                label = f"0:{-signal:.6f}:{choice.probability:.6f}"
                self._model.learn([_shared(task), f"{label} |i {choice.context}"])

    def _context(self, task: str, index: int, *, floor: int) -> str:
        """Features of an instance, as text."""
        results = self._results.get((task, index), [])
        visits = bisect_left(results, (floor, 0.0))
        if visits == 0:
            return "new"
        share = results[visits - 1][1]
        kind = {0.0: "never", 1.0: "always"}.get(share, f"some{int(share * 4)}")
        return f"{kind} visits{min(visits, 4)}"

    def _draw(self, group_id: int, turn: int, what: str) -> float:
        return draw(self._seed, "bandit", group_id, turn, what)


def _shared(task: str) -> str:
    """The features that all actions share; some characters mean something in the text format."""
    return f"shared |t {re.sub(r'[^A-Za-z0-9]', '_', task)}"


def _pick(chances: list[float], point: float) -> int:
    """The action at `point` of [0, 1) of the chances laid end to end."""
    reached, whole = 0.0, sum(chances)
    for place, chance in enumerate(chances):
        reached += chance
        if point * whole < reached:
            return place
    return len(chances) - 1
