"""The task of mending bugs: prompts, sandboxes, and what is scored. Knows no engine, no container.

The agent's sandbox holds the buggy tree and its test requirements, and nothing else of an instance:
hidden tests and gold patch stay outside. Scoring opens a second sandbox of the same kind.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.environment.base import (
    Environment,
    EnvironmentSpec,
    Limits,
    SandboxStartError,
    TransferError,
)
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Message, Score
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.sandboxes import OPTIONS as SANDBOX_OPTIONS
from prorl_hpc.tasks.sandboxes import Sandboxes, check_options, read_sandboxes
from prorl_hpc.tasks.swe.bug import Bug, Form, read_bugs
from prorl_hpc.tasks.swe.score import GIT, STEP_SECONDS, TREE, refused, score_patch
from prorl_hpc.tasks.swe.store import Built, InstanceStore

SITE, REPOSITORY = "/.prorl-site", "/.prorl-repository"
BASE = "refs/prorl/base"
UNREADABLE = b"\0unreadable\n"
"""Stands for a tree that the agent left without a way to read it."""

TESTBEDS = """\
for one in /opt/miniconda3/envs/testbed /testbed/.venv; do
  if [ -x "$one/bin/python" ]; then export PATH="$one/bin:$PATH" CONDA_PREFIX="$one"; break; fi
done"""
"""Where published images of SWE-bench form keep the interpreter that has the requirements."""

PROMPT = """\
The repository of {name} is in {tree}. It has this fault:

{statement}

Mend it in the source. Hidden tests will be run; changes of tests and of their configuration are \
not counted. There is no network."""

OPTIONS = SANDBOX_OPTIONS | {"store", "test_seconds", "replay", "prologue"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a task of this kind."""

    sandboxes: Sandboxes
    store: InstanceStore
    test_seconds: float
    prologue: str = TESTBEDS
    """Run in each shell over an image of SWE-bench form."""


class SweTask:
    """Bugs with hidden tests."""

    def __init__(self, name: str, settings: Settings, bugs: Mapping[Kind, list[Bug]]) -> None:
        self.name = name
        self.settings = settings
        self._bugs = bugs
        self._by_id = {bug.instance_id: bug for side in bugs.values() for bug in side}

    def size(self, kind: Kind) -> int:
        return len(self._bugs[kind])

    def instance(self, index: int, *, kind: Kind) -> Instance:
        return self.instance_of(self._bugs[kind][index], index=index)

    def instance_of(self, bug: Bug, *, index: int = 0) -> Instance:
        """The instance of a bug, as the agent is told of it."""
        text = PROMPT.format(
            name=bug.repository or bug.instance_id, tree=TREE, statement=bug.statement
        )
        return Instance(
            task=self.name, instance_id=bug.instance_id, index=index,
            messages=(Message(role="user", content=text),),
        )  # fmt: skip

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        raise VerifierError(f"{instance.instance_id}: a bug is scored in an environment only")

    def demonstration(self, instance: Instance) -> str | None:  # noqa: ARG002
        """None: an episode of commands is no answer that could be shown."""
        return None

    # --- the agent's side ----------------------------------------------------------------------

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:
        """The same for the agent and for scoring."""
        bug = self._bug(instance)
        binds: tuple[tuple[Path, str], ...] = ()
        if bug.form is Form.pypi:
            built, store = self.built(bug), self.settings.store
            binds = (
                (store.repository(bug.instance_id), REPOSITORY),
                (store.site(built.site), SITE),
            )
        sandboxes = self.settings.sandboxes
        return EnvironmentSpec(
            backend=sandboxes.backend, image=sandboxes.image_of(bug.instance_id, own=bug.image),
            directory=TREE, variables=variables_of(bug), binds=binds,
            prologue=self.settings.prologue if bug.form is Form.swe_bench else "",
            accept_missing=sandboxes.accept_missing, limits=sandboxes.limits,
        )  # fmt: skip

    async def setup(self, instance: Instance, environment: Environment) -> None:
        """Unpacks the tree, or marks where the image's own stands."""
        bug = self._bug(instance)
        if bug.form is Form.pypi:
            step = f"tar --no-same-owner -xf {REPOSITORY}/repo.tar -C {TREE} && cd {TREE}"
        else:
            step = f"cd {TREE} && {GIT} update-ref {BASE} HEAD"
        done = await environment.run(step, STEP_SECONDS)
        if done.exit_code != 0:
            raise SandboxStartError(
                f"{bug.instance_id}: {TREE} can't be made ready: {done.text.strip()[-300:]}"
            )

    async def result(self, instance: Instance, environment: Environment) -> bytes:
        """The agent's changes as a patch; a mark when it left no tree to compare."""
        bug = self._bug(instance)
        base = self.built(bug).base_commit if bug.form is Form.pypi else BASE
        try:
            return await environment.diff(TREE, base)
        except TransferError:
            return UNREADABLE

    # --- scoring -------------------------------------------------------------------------------

    async def score_in(
        self, instance: Instance, *, result: bytes, response: str,  # noqa: ARG002
        make_environment: MakeEnvironment,
    ) -> Score:  # fmt: skip
        """Reward 1 when all required tests pass, else 0; the fraction is a component."""
        if result == UNREADABLE:
            return refused("unreadable_tree")
        bug = self._bug(instance)
        async with make_environment(self.environment_spec(instance)) as environment:
            await self.setup(instance, environment)
            return await score_patch(
                bug, environment, patch=result, hidden=self.hidden(bug),
                test_seconds=self.settings.test_seconds, variables=variables_of(bug),
            )  # fmt: skip

    def hidden(self, bug: Bug) -> bytes:
        """The hidden tests: a tar archive, or a patch. Raises VerifierError."""
        if bug.form is Form.swe_bench:
            return bug.test_patch.encode()
        return self._read(self.settings.store.hidden(bug.instance_id))

    def gold(self, bug: Bug) -> bytes:
        """The gold patch, for replay and validation only. Raises VerifierError."""
        if bug.form is Form.swe_bench:
            return bug.patch.encode()
        return self._read(self.settings.store.gold(bug.instance_id))

    def bugs(self) -> list[Bug]:
        """All bugs of both splits."""
        return list(self._by_id.values())

    def built(self, bug: Bug) -> Built:
        """What was built of a PyPI bug. Raises TaskError when it wasn't."""
        found = self.settings.store.built(bug.instance_id)
        if found is None:
            raise TaskError(not_built(self.name, self.settings.store, [bug.instance_id]))
        return found

    # --- parts ---------------------------------------------------------------------------------

    def _bug(self, instance: Instance) -> Bug:
        return self._by_id[instance.instance_id]

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as err:
            raise VerifierError(f"{path} can't be read: {err.strerror}") from err


def variables_of(bug: Bug) -> dict[str, str]:
    """What agent and tests find in their environment."""
    source = f"{TREE}/{bug.pythonpath}" if bug.pythonpath else TREE
    plain = {
        "LC_ALL": "C.UTF-8", "TZ": "UTC", "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }  # fmt: skip
    if bug.form is Form.swe_bench:
        return plain
    return plain | {"PYTHONPATH": f"{source}:{SITE}"}


def make_swe(name: str, config: TaskConfig, seed: int) -> SweTask:  # noqa: ARG001
    """The task of a recipe. Raises TaskError for what can't be set up, naming the key."""
    return open_swe(name, config, usable_only=True)


def open_swe(name: str, config: TaskConfig, *, usable_only: bool) -> SweTask:
    """Like `make_swe`; with `usable_only=False` also what isn't built, or was excluded."""
    settings = settings_of(name, config)
    train = read_bugs(name, config.data)
    held = read_bugs(name, config.validation_data) if config.validation_data else []
    if usable_only:
        train = usable(name, settings.store, train)
        held = usable(name, settings.store, held) if held else held
    return SweTask(name, settings, split(name, config, train, held))


def usable(name: str, store: InstanceStore, bugs: list[Bug]) -> list[Bug]:
    """Those that are built and weren't found wanting. Raises TaskError when that leaves none."""
    missing = [
        bug.instance_id
        for bug in bugs
        if bug.form is Form.pypi and store.built(bug.instance_id) is None
    ]
    if missing:
        raise TaskError(not_built(name, store, missing))
    left = [bug for bug in bugs if not excluded(store, bug)]
    if not left:
        raise TaskError(
            f"tasks.{name}: every instance was excluded by its check; see prorl-hpc instances list"
        )
    return left


def excluded(store: InstanceStore, bug: Bug) -> str:
    """Why a bug isn't used; empty when it is. A check of an older build doesn't count."""
    verdict, built = store.verdict(bug.instance_id), store.built(bug.instance_id)
    if verdict is None or verdict.ok or (built is not None and verdict.key != built.key):
        return ""
    return verdict.reason


def not_built(name: str, store: InstanceStore, missing: list[str]) -> str:
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return (
        f"tasks.{name}: {len(missing)} instances aren't built in {store.root} ({shown}); on a "
        f"machine with network: prorl-hpc instances build recipe=swe (or name the store: "
        f"PRORL_INSTANCES, tasks.{name}.options.store)"
    )


def split(
    name: str, config: TaskConfig, train: list[Bug], held: list[Bug]
) -> dict[Kind, list[Bug]]:
    """Training and validation, apart by a hash of the name; all is validation with weight 0."""
    if held:
        held = held[: config.validation_size]
    elif config.weight == 0:
        return {Kind.train: [], Kind.validation: train[: config.validation_size]}
    else:
        if len(train) <= config.validation_size:
            raise TaskError(
                f"tasks.{name}.validation_size={config.validation_size} leaves nothing to train of "
                f"{len(train)} instances; lower it or give validation_data"
            )
        by_hash = sorted(train, key=lambda b: hashlib.sha256(b.instance_id.encode()).digest())
        held = by_hash[: config.validation_size]
    apart = {bug.instance_id for bug in held}
    rest = [bug for bug in train if bug.instance_id not in apart][: config.train_size]
    if not rest:
        raise TaskError(f"tasks.{name}: every training instance is in validation_data as well")
    return {Kind.train: rest, Kind.validation: held}


def settings_of(name: str, config: TaskConfig) -> Settings:
    """The options, checked. Raises TaskError."""
    options = config.options
    check_options(name, options, OPTIONS)
    try:
        seconds = float(options.get("test_seconds") or config.score_timeout_seconds / 2)
    except (ValueError, TypeError) as err:
        raise TaskError(f"tasks.{name}.options.test_seconds: {err}") from err
    if not 0 < seconds < config.score_timeout_seconds:
        raise TaskError(
            f"tasks.{name}.options.test_seconds={seconds:g} must be positive and less than "
            f"score_timeout_seconds={config.score_timeout_seconds:g}"
        )
    return Settings(
        sandboxes=read_sandboxes(name, config, default_image="swe", limits=Limits()),
        store=InstanceStore(root=store_root(options.get("store"))),
        test_seconds=seconds,
        prologue=TESTBEDS if options.get("prologue") is None else str(options["prologue"]),
    )


def store_root(given: object) -> Path:
    """Where built instances lie: as given, else $PRORL_INSTANCES, else in the user's cache."""
    text = str(given) if given else os.environ.get("PRORL_INSTANCES", "")
    return Path(text or "~/.cache/prorl-hpc/instances").expanduser().absolute()
