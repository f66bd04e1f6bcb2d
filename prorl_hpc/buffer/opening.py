"""What a new group is about: task, instance, rollouts, policy version. Pure.

The mixture gives task and instance, the curriculum may give another instance, capacity says which
version the group belongs to, the stage of that version how many rollouts it has.
"""

from collections.abc import Iterable

from prorl_hpc.buffer.capacity import Capacity
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.curriculum import Choice, Curriculum, SolveRates
from prorl_hpc.buffer.groups import OpenGroup
from prorl_hpc.buffer.manifest import Chosen, Closed, Line, Validation
from prorl_hpc.buffer.messages import VALIDATION_BASE
from prorl_hpc.buffer.mixture import Mixture
from prorl_hpc.buffer.validation import IDS_PER_VERSION, ValidationSet
from prorl_hpc.choices import CurriculumKind
from prorl_hpc.records import Kind


def make_curriculum(config: BufferConfig) -> Curriculum | None:
    """The one that the recipe names. Raises BanditMissing."""
    if config.curriculum is CurriculumKind.solve_rate:
        return SolveRates(seed=config.seed)
    if config.curriculum is CurriculumKind.bandit:
        from prorl_hpc.buffer.bandit import Bandit

        return Bandit(seed=config.seed)
    return None


class Opening:
    """Makes groups with nothing done yet, and remembers what was chosen for them."""

    def __init__(self, config: BufferConfig, *, capacity: Capacity) -> None:
        self._config = config
        self._capacity = capacity
        self._mixture = Mixture(config.tasks, seed=config.seed)
        self._curriculum = make_curriculum(config)
        self._chosen: dict[int, int] = {}
        self._validations: dict[int, ValidationSet] = {}

    def restore(self, lines: Iterable[Line]) -> None:
        """Takes over what earlier attempts have chosen."""
        for line in lines:
            if isinstance(line, Chosen):
                self._chosen[line.group] = line.index
                if self._curriculum is not None:
                    choice = Choice(
                        index=line.index, context=line.context, probability=line.probability
                    )
                    self._curriculum.chosen(line.group, choice)

    def note(self, line: Closed) -> None:
        """A group is closed: the curriculum learns how it went."""
        if self._curriculum is not None and line.kind is Kind.train:
            task, index = self._mixture.pick(line.group)
            self._curriculum.note(
                line.group,
                task=task,
                index=self._chosen.get(line.group, index),
                num_solved=line.num_solved,
                known=line.num_known,
            )

    @property
    def num_extreme(self) -> int:
        """Instances that the curriculum passes over most of the time."""
        return 0 if self._curriculum is None else self._curriculum.num_extreme()

    def train(self, group_id: int) -> tuple[OpenGroup, Chosen | None]:
        """A training group, and the line to record if its instance was chosen just now."""
        version = self._capacity.version_of(group_id)
        task, index = self._mixture.pick(group_id)
        line = None
        if self._curriculum is not None and group_id not in self._chosen:
            choice = self._curriculum.choose(
                group_id,
                task=task,
                index=index,
                size=self._config.tasks[task].train_size,
                floor=self._capacity.first_of(version),
            )
            line = Chosen(
                group=group_id,
                index=choice.index,
                context=choice.context,
                probability=choice.probability,
            )
            self._chosen[group_id] = choice.index
        stage = self._config.stage(version)
        number = self._config.rollouts_of(task, stage=stage)
        group = OpenGroup(
            group_id=group_id,
            kind=Kind.train,
            task=task,
            instance_index=self._chosen.get(group_id, index),
            num_rollouts=number,
            min_usable=min(self._config.min_usable, number),
            policy_version=version if self._config.deterministic else None,
            context_tokens=stage.context_tokens if stage is not None else None,
            one_instance=self._curriculum is not None,
        )
        return group, line

    def validation(self, version: int) -> ValidationSet | None:
        """The groups of a validation that was asked for."""
        return self._validations.get(version)

    def add_validation(self, line: Validation) -> ValidationSet:
        """A validation is asked for."""
        wanted = self._validations[line.version] = ValidationSet(line)
        return wanted

    def validated(self, group_id: int) -> OpenGroup | None:
        """A validation group by its id."""
        wanted = self.validation((group_id - VALIDATION_BASE) // IDS_PER_VERSION)
        return None if wanted is None else wanted.open_group(group_id)
