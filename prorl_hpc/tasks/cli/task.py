"""The task of the command line: problems worked in a shell, scored by what lies there afterwards.

    files, setup -> [agent's sandbox: commands] -> archive of its directories -> checks, here
                                                                            \\-> [second sandbox:
                                                                                 verify scripts]

Nothing that is checked is ever in the agent's sandbox. Checks read the archive on the host, as
data. Scripts run in a fresh sandbox over the same files, from a directory whose name is drawn
then; links that lead out of the kept directories aren't laid out beside them. Knows no engine.
"""

import asyncio
import secrets
import shlex
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prorl_hpc.agents.bash import command_in
from prorl_hpc.choices import AgentKind
from prorl_hpc.environment.base import (
    Environment,
    EnvironmentEnded,
    EnvironmentSpec,
    Limits,
    SandboxStartError,
    TransferError,
)
from prorl_hpc.environment.files import SEARCH_PATH
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Message, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking, prompt_messages
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.cli.checks import judge
from prorl_hpc.tasks.cli.problem import CliProblem, lay_out
from prorl_hpc.tasks.cli.source import OPTIONS, Source, read_source
from prorl_hpc.tasks.cli.state import EntryKind, StateError, confined, pack, read_state
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.sandboxes import Sandboxes, check_options, read_sandboxes

LIMITS = Limits(
    memory_bytes=2 << 30, num_processes=256, disk_bytes=1 << 30, transfer_bytes=32 << 20
)
STEP_SECONDS = 120.0
EVAL_SHARE = 0.8
"""Of the scoring time: scripts that weren't run by then don't hold."""

UNREADABLE = b"\0unreadable\n"
"""Stands for directories that the agent left without a way to read them."""

REMEMBERED = 4096
"""Solutions kept for agents that replay them."""

PROMPT = """\
{instruction}

You start in {workdir}. There is no network. What counts is the files that you leave, not what you \
say."""

ONE_SHOT = """\
{instruction}

Answer with one ```bash block: a script that does this, run in {workdir}. There is no network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a task of this kind."""

    sandboxes: Sandboxes
    one_shot: bool
    """The answer is a script, and the only one: the agent has no shell."""
    all_or_nothing: bool
    """Reward 1 only when everything is right; else the fraction."""
    budget_seconds: float
    """Of all scripts of a problem, and of the one that is an answer."""
    system_prompt: str | None


class CliTask:
    """Problems of the command line, made or from a file."""

    def __init__(self, name: str, settings: Settings, source: Source) -> None:
        self.name = name
        self.settings = settings
        self._source = source
        self._solutions: OrderedDict[str, str] = OrderedDict()

    def size(self, kind: Kind) -> int:
        return self._source.size(kind)

    def instance(self, index: int, *, kind: Kind) -> Instance:
        """Raises TaskError when the families have too few distinct problems for two sides."""
        problem = self._source.problem(index, kind=kind)
        form = ONE_SHOT if self.settings.one_shot else PROMPT
        # not str.format: an instruction may hold braces
        text = form.replace("{workdir}", problem.workdir)
        text = text.replace("{instruction}", problem.instruction.strip())
        self._solutions[text] = problem.solution
        while len(self._solutions) > REMEMBERED:
            self._solutions.popitem(last=False)
        return Instance(
            task=self.name,
            instance_id=problem.id or f"{self.name}-{kind.value}-{index}",
            index=index,
            messages=prompt_messages(text, system_prompt=self.settings.system_prompt),
            answer=problem,
        )

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        raise VerifierError(f"{instance.instance_id}: a shell's work is scored in an environment")

    def demonstration(self, instance: Instance) -> str | None:
        """The solution as the only answer; None where an episode of commands is asked for."""
        problem: CliProblem = instance.answer
        if not self.settings.one_shot or not problem.solution:
            return None
        return f"```bash\n{problem.solution}\n```"

    def solution_for(self, messages: Sequence[Message]) -> str:
        """The solution of an instance that was made here, by its prompt; for replay only.

        Empty where the problem has none, or isn't known. Of rows with equal prompts it is that of
        the one made last.
        """
        return self._solutions.get(messages[-1].content, "")

    # --- the agent's side ----------------------------------------------------------------------

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:
        problem: CliProblem = instance.answer
        sandboxes = self.settings.sandboxes
        return EnvironmentSpec(
            backend=sandboxes.backend,
            image=sandboxes.image_of(instance.instance_id, own=problem.image),
            directory=problem.workdir,
            variables={"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1"},
            writable=problem.kept,
            limits=sandboxes.limits,
            accept_missing=sandboxes.accept_missing,
        )

    async def setup(self, instance: Instance, environment: Environment) -> None:
        """Lays out the files and runs the problem's own script."""
        problem: CliProblem = instance.answer
        await unpack(environment, pack(problem.state()))
        if problem.setup.strip():
            await _run_setup(environment, problem, name=instance.instance_id)

    async def result(self, instance: Instance, environment: Environment) -> bytes:
        """An archive of the kept directories; a mark where none can be made."""
        problem: CliProblem = instance.answer
        most = self.settings.sandboxes.limits.transfer_bytes
        return await snapshot(environment, problem.kept, limit_bytes=most)

    # --- scoring -------------------------------------------------------------------------------

    async def score_in(
        self, instance: Instance, *, result: bytes, response: str,
        make_environment: MakeEnvironment,
    ) -> Score:  # fmt: skip
        """Every check and every script, or (`reward: fraction`) the share of those that hold."""
        problem: CliProblem = instance.answer
        if self.settings.one_shot:
            script = command_in(after_thinking(response))
            if script is None:
                return refused("no_script")
            result = await self._run_once(instance, script, make_environment)
        if result == UNREADABLE:
            return refused("unreadable")
        try:
            state = await asyncio.to_thread(read_state, result)
        except StateError:
            return refused("unreadable")
        verdict = await asyncio.to_thread(judge, problem.checks, state, directory=problem.workdir)
        num_held, num_goals = verdict.num_held, verdict.num_goals + len(problem.verify)
        late = False
        if verdict.guarded and problem.verify:
            files = await asyncio.to_thread(lambda: pack(confined(state, problem.kept)))
            more, late = await self._verify(instance, files, make_environment)
            num_held += more
        return self._graded(num_held, num_goals, guarded=verdict.guarded, late=late)

    def _graded(self, num_held: int, num_goals: int, *, guarded: bool, late: bool) -> Score:
        fraction = num_held / num_goals if guarded else 0.0
        done = float(guarded and num_held == num_goals)
        components = {"fraction": fraction, "done": done, "guarded": float(guarded)}
        if late:
            components["out_of_time"] = 1.0
        return Score(
            reward=done if self.settings.all_or_nothing else fraction, components=components
        )

    async def _run_once(
        self, instance: Instance, script: str, make_environment: MakeEnvironment
    ) -> bytes:
        """What one script leaves behind, in a sandbox of its own."""
        problem: CliProblem = instance.answer
        async with make_environment(self.environment_spec(instance)) as environment:
            await self.setup(instance, environment)
            try:
                most = min(problem.timeout_seconds, self.settings.budget_seconds)
                await environment.run(script, most)
                return await self.result(instance, environment)
            except EnvironmentEnded:
                return UNREADABLE

    async def _verify(
        self, instance: Instance, files: bytes, make_environment: MakeEnvironment
    ) -> tuple[int, bool]:
        """How many scripts end with 0, over the agent's files in a fresh sandbox.

        And whether the time was up before all had ended.
        """
        problem: CliProblem = instance.answer
        spec = self.environment_spec(instance)
        # a json.py that the agent left in the working directory isn't the verifier's
        spec = replace(spec, variables={**spec.variables, "PYTHONSAFEPATH": "1"})
        num_held, num_run, late = 0, 0, False
        async with make_environment(spec) as environment:
            await self.setup(instance, environment)
            try:
                for root in problem.kept:
                    where = shlex.quote(root)
                    await _step(
                        environment, f"mkdir -p {where} && find {where} -mindepth 1 -delete"
                    )
                try:
                    await unpack(environment, files)
                except SandboxStartError:
                    return 0, False  # names that no file system takes: the agent's doing
                end = time.monotonic() + self.settings.budget_seconds
                for script in problem.verify.values():
                    left = min(end - time.monotonic(), problem.timeout_seconds)
                    late = late or left <= 0
                    if late:
                        break
                    num_held += await _holds(environment, problem, script, seconds=left)
                    num_run += 1
            except EnvironmentEnded:
                pass  # what the agent left there ended it: what has held counts
            except TransferError as err:
                if num_run:  # a script may have run a program of the agent's, and that did it
                    return num_held, late
                raise VerifierError(f"the scoring sandbox takes no files: {err}") from err
        return num_held, late


def refused(reason: str) -> Score:
    """The score where there is nothing to be looked at, by the agent's doing."""
    return Score(reward=0.0, components={"fraction": 0.0, reason: 1.0}, outcome=Outcome.invalid)


async def unpack(environment: Environment, files: bytes) -> None:
    """Lays out an archive over the root. Raises SandboxStartError or TransferError."""
    path = f"/tmp/.prorl-files-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
    await environment.put(path, files)
    await _step(environment, f"tar -C / --no-same-owner -xpf {path} && rm -f {path}")


async def snapshot(environment: Environment, roots: Sequence[str], *, limit_bytes: int) -> bytes:
    """An archive of what lies below `roots`, whatever the agent did to its shell or its tools.

    UNREADABLE where there is more of it; no more than that is ever written.
    """
    path = f"/tmp/.prorl-files-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
    names = " ".join(shlex.quote(root.lstrip("/")) for root in roots)
    script = (
        f"(set +eux; set +f; PATH={SEARCH_PATH}; unset -f command tar head cd; unset TAR_OPTIONS; "
        f'builtin cd /; set --; for one in {names}; do [ -d "$one" ] && set -- "$@" "./$one"; '
        "done; umask 077; command tar --format=gnu --hard-dereference -cf - -T /dev/null "
        f'"$@" | command head -c {limit_bytes + 1} >{path}; [ "${{PIPESTATUS[0]}}" -le 1 ])'
    )
    try:
        done = await environment.run(script, STEP_SECONDS)
        if done.exit_code != 0:
            return UNREADABLE
        return await environment.get(path)
    except TransferError:
        return UNREADABLE


async def _step(environment: Environment, command: str) -> None:
    done = await environment.run(command, STEP_SECONDS)
    if done.exit_code != 0:
        raise SandboxStartError(f"{command!r} in the sandbox: {done.text.strip()[-300:]}")


async def _run_setup(environment: Environment, problem: CliProblem, *, name: str) -> None:
    path = f"/tmp/.prorl-setup-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
    await environment.put(path, problem.setup.encode())
    done = await environment.run(f"bash {path} </dev/null", problem.timeout_seconds)
    await environment.run(f"rm -f {path}", STEP_SECONDS)
    if done.exit_code != 0:
        raise SandboxStartError(f"{name}: setup failed: {done.text.strip()[-300:]}")


async def _holds(
    environment: Environment, problem: CliProblem, script: str, *, seconds: float
) -> bool:
    """One script, from a directory that nobody could know before."""
    hidden = f"/tmp/.prorl-verify-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
    for path, entry in lay_out(problem.verify_files, hidden).items():
        if entry.kind is EntryKind.file:
            await environment.put(path, entry.data)
    await environment.put(f"{hidden}/verify.sh", script.encode())
    command = (
        f"cd {shlex.quote(problem.workdir)} && VERIFY={hidden} bash {hidden}/verify.sh </dev/null; "
        f"__code=$?; rm -rf {hidden}; (exit $__code)"
    )
    done = await environment.run(command, seconds)
    return done.exit_code == 0 and not done.timed_out and not done.shell_restarted


def make_cli(name: str, config: TaskConfig, seed: int) -> CliTask:
    """The task of a recipe. Raises TaskError for what can't be set up, naming the key."""
    options = config.options
    check_options(name, options, OPTIONS)
    reward = options.get("reward", "all")
    if reward not in ("fraction", "all"):
        raise TaskError(f"tasks.{name}.options.reward={reward!r}; choose fraction or all")
    settings = Settings(
        sandboxes=read_sandboxes(name, config, default_image="code", limits=LIMITS),
        one_shot=config.agent is AgentKind.single_turn and not options.get("replay"),
        all_or_nothing=reward == "all",
        budget_seconds=config.score_timeout_seconds * EVAL_SHARE,
        system_prompt=config.system_prompt,
    )
    return CliTask(name, settings, read_source(name, config, seed))
