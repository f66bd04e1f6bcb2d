"""Puzzles that Reasoning Gym makes and scores. Imports reasoning_gym when the first is asked for.

Options of a task of kind `logic`:

    family: chain_sum | [chain_sum, countdown] | all
    parameters: {min_terms: 2}     # of that family; with several: {chain_sum: {min_terms: 2}}
    answer_tags: true              # demand <answer>...</answer>; default: tags are optional
    exact: true                    # reward 1 for the family's full score, else 0: no partial credit
    prompt: "{word}>"              # instead of the question: fields of the entry and its metadata

A `prompt` shows a tiny model only what varies from problem to problem; problems, answers, scores
and the split stay the family's own. It is filled as by str.format; `{question}` is known too.

Train and validation never share a question: each belongs to one side by its own hash, whatever
its place in the stream of problems.
"""

import hashlib
import json
from difflib import get_close_matches
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Outcome, Score
from prorl_hpc.tasks.answers import (
    ANSWER_PROMPT,
    after_thinking,
    prompt_messages,
    read_options,
    tagged,
)
from prorl_hpc.tasks.base import TaskError, VerifierError

EXCLUDED = {
    "composite": "is a mixture of the others; give a list of families instead",
    "game_of_life_halting": "its scorer gives any wrong answer full reward",
    "knight_swap": "its search ends by the clock, so a seed doesn't always give the same problem",
}
"""Families that can't be trained on, and why (reasoning-gym 0.1.25)."""

PREBUILT = {"acre": 2000, "word_ladder": 10_000, "gsm_symbolic": 500_000, "list_functions": 500_000}
"""Families that make all their problems (or an index of them) at once: so many."""

DEFAULT_TRAIN_SIZE = 100_000
STRIDE = 64
"""Positions of the stream that one instance may draw from until the question is of its side."""

VALIDATION_SHARE = 4
"""One question in four belongs to validation."""

FIRST_TRAIN = 1 << 24
"""First stream position of training instances."""


def make_logic(name: str, config: TaskConfig, seed: int) -> "LogicTask":
    """The task of a recipe's key. Raises TaskError."""
    options = read_options(
        name,
        config.options,
        {"family": object, "parameters": dict, "answer_tags": bool, "exact": bool, "prompt": str},
    )
    families = _families(name, options.get("family"))
    parameters = options.get("parameters", {})
    if len(families) == 1 and families[0] not in parameters:
        parameters = {families[0]: parameters}
    foreign = [key for key in parameters if key not in families]
    if foreign:
        raise TaskError(
            f"tasks.{name}.options.parameters.{foreign[0]} isn't one of its families "
            f"({', '.join(families[:5])}); with several, write parameters.<family>.<key>"
        )
    return LogicTask(
        name,
        config,
        seed=seed,
        families=families,
        parameters=parameters,
        answer_tags=bool(options.get("answer_tags", False)),
        exact=bool(options.get("exact", False)),
        prompt=options.get("prompt"),
    )


class LogicTask:
    """One family, or several in turn."""

    def __init__(
        self,
        name: str,
        config: TaskConfig,
        *,
        seed: int,
        families: tuple[str, ...],
        parameters: dict[str, dict[str, Any]],
        answer_tags: bool = False,
        exact: bool = False,
        prompt: str | None = None,
    ) -> None:
        self.name = name
        self._config = config
        self._seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")
        self._families = families
        self._parameters = parameters
        self._tags = answer_tags
        self._exact = exact
        self._prompt = prompt
        self._sets: dict[str, Any] = {}

    def size(self, kind: Kind) -> int:
        if kind is Kind.validation:
            return self._config.validation_size
        return self._config.train_size or DEFAULT_TRAIN_SIZE

    def instance(self, index: int, *, kind: Kind) -> Instance:
        """Raises TaskError when a family has too few distinct problems for two sides."""
        if not 0 <= index < self.size(kind):
            raise IndexError(f"instance {index} of task {self.name} ({kind}: {self.size(kind)})")
        family = self._families[index % len(self._families)]
        problems = self._problems(family)
        start = (index // len(self._families)) * STRIDE
        start += FIRST_TRAIN if kind is Kind.train else 0
        for position in range(start, start + STRIDE):
            if family in PREBUILT:
                position = _scattered(position, PREBUILT[family])
            entry = problems[position]
            if _is_validation(entry["question"]) == (kind is Kind.validation):
                return self._as_instance(entry, family=family, index=index, kind=kind)
        raise TaskError(
            f"tasks.{self.name}: {family} with these parameters has too few distinct problems to "
            "part training from validation; make it harder"
        )

    def score(self, instance: Instance, response: str) -> Score:
        """The family's own score, in [0, 1]; without an answer the outcome is `invalid`."""
        text = after_thinking(response)
        answer = tagged(text)
        if answer is None and not self._tags:
            answer = text
        if not answer:
            return Score(reward=0.0, components={"answered": 0.0}, outcome=Outcome.invalid)
        entry = instance.answer
        try:
            value = float(self._problems(entry["family"]).score_answer(answer, entry["entry"]))
        except (MemoryError, ImportError, OSError, TaskError) as err:
            raise VerifierError(f"scorer of {entry['family']} failed: {err}") from err
        except Exception:  # scorers parse the answer carelessly: what they choke on is no answer
            return Score(reward=0.0, components={"answered": 0.0}, outcome=Outcome.invalid)
        reward = min(max(value, 0.0), 1.0) if value == value else 0.0
        solved = 1.0 if reward >= 1.0 else 0.0
        components = {"answered": 1.0, "solved": solved}
        return Score(reward=solved if self._exact else reward, components=components)

    def demonstration(self, instance: Instance) -> str | None:
        """The known answer as the model should write it; None for families that have none."""
        answer = instance.answer["entry"].get("answer")
        if answer is None or not str(answer).strip():
            return None
        return f"<answer>{answer}</answer>" if self._tags else str(answer)

    def _as_instance(
        self, entry: dict[str, Any], *, family: str, index: int, kind: Kind
    ) -> Instance:
        default = ANSWER_PROMPT if self._tags else None
        return Instance(
            task=self.name,
            instance_id=f"{family}-{kind.value}-{index}",
            index=index,
            messages=prompt_messages(
                self._shown(entry), system_prompt=self._config.system_prompt, default=default
            ),
            answer={"family": family, "entry": entry},
            metadata={"family": family},
        )

    def _shown(self, entry: dict[str, Any]) -> str:
        question = str(entry["question"])
        if self._prompt is None:
            return question
        known = {**entry["metadata"], "question": question}
        try:
            return self._prompt.format_map(known)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as err:
            raise TaskError(
                f"tasks.{self.name}.options.prompt={self._prompt!r} can't be filled ({err!r}); "
                f"the family has the fields {', '.join(sorted(known))}"
            ) from err

    def _problems(self, family: str) -> Any:
        if family not in self._sets:
            import reasoning_gym

            parameters = dict(self._parameters.get(family, {}))
            if family in PREBUILT:
                parameters["size"] = PREBUILT[family]
            try:
                self._sets[family] = reasoning_gym.create_dataset(
                    family, seed=self._seed, **parameters
                )
            except (TypeError, ValueError, AssertionError) as err:
                raise TaskError(
                    f"tasks.{self.name}.options.parameters={json.dumps(parameters)} don't suit "
                    f"{family}: {err}"
                ) from err
        return self._sets[family]


def _families(name: str, wanted: object) -> tuple[str, ...]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as err:
        raise TaskError(
            f"tasks.{name}: Reasoning Gym isn't installed; pip install 'prorl-hpc[tasks]'"
        ) from err
    if wanted == "all":
        return tuple(sorted(set(DATASETS) - set(EXCLUDED)))
    chosen = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(chosen, list | tuple) or not chosen:
        raise TaskError(f"tasks.{name}.options.family={wanted!r}; give a name, a list, or `all`")
    for family in chosen:
        if family in EXCLUDED:
            raise TaskError(f"tasks.{name}: family {family!r} can't be used: {EXCLUDED[family]}")
        if family not in DATASETS:
            close = get_close_matches(str(family), DATASETS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "docs/tasks.md lists them"
            raise TaskError(f"tasks.{name}.options.family={family!r} is unknown; {hint}")
    return tuple(chosen)


def _is_validation(question: str) -> bool:
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0


def _scattered(position: int, size: int) -> int:
    digest = hashlib.sha256(position.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big") % size
