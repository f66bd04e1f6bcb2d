"""Programming problems, scored by running their tests in a sandbox. Knows no engine.

    reads and prints        {"inputs", "outputs"} (APPS), public/private_test_cases (LiveCodeBench)
    a function is called    the same with a function's name, or assertions (MBPP)

Expected results stay outside of the sandbox: a program computes, and the comparison is made here.
"""

import ast
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_hpc.environment.base import (
    CommandResult,
    Environment,
    EnvironmentEnded,
    EnvironmentSpec,
    Limits,
    TransferError,
)
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.code_cases import Case, CaseKind, decode_problem
from prorl_hpc.tasks.code_compare import same_output, same_value
from prorl_hpc.tasks.code_harness import SOURCE as HARNESS
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.problems import Problem, split_problems
from prorl_hpc.tasks.sandboxes import OPTIONS, Sandboxes, check_options, read_sandboxes

WORK = "/tmp/code"  # noqa: S108 - inside the sandbox
LIMITS = Limits(memory_bytes=1 << 30, num_processes=64, disk_bytes=256 << 20, output_bytes=4 << 20)
EVAL_SHARE = 0.8
"""Of the scoring time: tests that weren't run by then count as failed."""

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a task of this kind."""

    sandboxes: Sandboxes
    seconds_per_test: float
    num_tests: int | None
    """At most so many tests of a problem, from the front; None: all."""
    all_or_nothing: bool
    """Reward 1 only when all pass; else the fraction."""
    budget_seconds: float


class CodeTask:
    """Problems with tests."""

    def __init__(
        self, name: str, settings: Settings, problems: dict[Kind, Sequence[Problem]]
    ) -> None:
        self.name = name
        self.settings = settings
        self._problems = problems

    def size(self, kind: Kind) -> int:
        return len(self._problems[kind])

    def instance(self, index: int, *, kind: Kind) -> Instance:
        problem = self._problems[kind][index]
        return Instance(
            task=self.name,
            instance_id=problem.identity or f"{self.name}-{kind.value}-{index}",
            index=index,
            messages=problem.messages,
            answer=problem.answer,
            metadata=problem.metadata,
        )

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        raise VerifierError(f"{instance.instance_id}: programs are scored in an environment only")

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:
        sandboxes = self.settings.sandboxes
        return EnvironmentSpec(
            backend=sandboxes.backend,
            image=sandboxes.image_of(instance.instance_id),
            directory=WORK,
            variables={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            limits=sandboxes.limits,
            accept_missing=sandboxes.accept_missing,
        )

    def demonstration(self, instance: Instance) -> str | None:
        """The data set's own solution as an answer, where it has one (MBPP, APPS)."""
        solution = instance.metadata.get("solution")
        return f"```python\n{solution}\n```" if solution else None

    async def setup(self, instance: Instance, environment: Environment) -> None:
        """Nothing: the program is in the answer."""

    async def result(self, instance: Instance, environment: Environment) -> bytes:  # noqa: ARG002
        """Nothing is taken from the agent's sandbox."""
        return b""

    async def score_in(
        self, instance: Instance, *, result: bytes, response: str,  # noqa: ARG002
        make_environment: MakeEnvironment,
    ) -> Score:  # fmt: skip
        """The fraction of tests that the program of the answer passes."""
        program = program_in(response)
        if program is None:
            return Score(reward=0.0, components={"no_program": 1.0}, outcome=Outcome.invalid)
        cases: list[Case] = instance.answer
        cases = cases[: self.settings.num_tests]
        end = time.monotonic() + self.settings.budget_seconds
        num_passed = 0
        async with make_environment(self.environment_spec(instance)) as environment:
            try:
                runner = await Runner.prepare(
                    environment, program, seconds_per_test=self.settings.seconds_per_test
                )
                for case in cases:
                    if time.monotonic() > end:
                        break
                    num_passed += await runner.passes(case)
            except EnvironmentEnded:
                pass  # the program's doing: what has passed counts
            except TransferError as err:
                raise VerifierError(f"the scoring sandbox takes no files: {err}") from err
        return self._graded(num_passed, len(cases))

    def _graded(self, num_passed: int, num_cases: int) -> Score:
        fraction = num_passed / num_cases
        all_passed = float(num_passed == num_cases)
        return Score(
            reward=all_passed if self.settings.all_or_nothing else fraction,
            components={"fraction": fraction, "all_passed": all_passed},
        )


class Runner:
    """One program in its sandbox."""

    def __init__(self, environment: Environment, *, seconds_per_test: float) -> None:
        self._environment = environment
        self._seconds = seconds_per_test

    @classmethod
    async def prepare(
        cls, environment: Environment, program: str, *, seconds_per_test: float
    ) -> "Runner":
        await environment.put(f"{WORK}/solution.py", program.encode("utf-8", "replace"))
        await environment.put(f"{WORK}/.harness.py", HARNESS.encode())
        return cls(environment, seconds_per_test=seconds_per_test)

    async def passes(self, case: Case) -> bool:
        """Whether the program does what the test expects. Raises EnvironmentEnded."""
        if case.kind is CaseKind.program:
            done = await self._run("python3 solution.py", case.given)
            return done.exit_code == 0 and same_output(done.text, case.expected)
        mark = secrets.token_hex(12)
        done = await self._run(f"python3 .harness.py {mark}", case.given)
        value = _marked(done, mark)
        if value is None:
            return False
        try:
            found = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return False
        if case.kind is CaseKind.assertion:
            return found is True
        return same_value(found, case.literal)

    async def _run(self, command: str, given: str) -> CommandResult:
        name = secrets.token_hex(6)
        path = f"{WORK}/.input-{name}"
        await self._environment.put(path, given.encode("utf-8", "replace"))
        # each test starts from the same directory, whatever the one before it left behind
        text = (
            f"cd {WORK} && {command} <{path} 2>/dev/null; __code=$?; rm -f {path}; (exit $__code)"
        )
        return await self._environment.run(text, self._seconds)


def _marked(done: CommandResult, mark: str) -> str | None:
    """The text after the mark: what the harness says, not what the program prints."""
    if done.exit_code != 0 or done.truncated:
        return None
    _, found, value = done.text.rpartition(mark)
    return value.strip() if found else None


def program_in(response: str) -> str | None:
    """The last block of code of an answer; None when there is none."""
    blocks = _BLOCK.findall(after_thinking(response))
    return next((block for block in reversed(blocks) if block.strip()), None)


def make_code(name: str, config: TaskConfig, seed: int) -> CodeTask:  # noqa: ARG001
    """The task of a recipe. Raises TaskError for what can't be set up, naming the key."""
    options = config.options
    check_options(name, options, OPTIONS | {"seconds_per_test", "num_tests", "reward"})
    reward = options.get("reward", "fraction")
    if reward not in ("fraction", "all"):
        raise TaskError(f"tasks.{name}.options.reward={reward!r}; choose fraction or all")
    try:
        seconds = float(options.get("seconds_per_test", 6.0))
        num_tests = None if options.get("num_tests") is None else int(options["num_tests"])
    except (ValueError, TypeError) as err:
        raise TaskError(f"tasks.{name}.options: {err}") from err
    if seconds <= 0 or (num_tests is not None and num_tests < 1):
        raise TaskError(
            f"tasks.{name}.options: seconds_per_test={seconds:g} must be positive and "
            f"num_tests={num_tests} at least 1"
        )
    settings = Settings(
        sandboxes=read_sandboxes(name, config, default_image="code", limits=LIMITS),
        seconds_per_test=seconds,
        num_tests=num_tests,
        all_or_nothing=reward == "all",
        budget_seconds=config.score_timeout_seconds * EVAL_SHARE,
    )
    problems = split_problems(
        name, config, decode=lambda row: decode_problem(row, system_prompt=config.system_prompt)
    )
    return CodeTask(name, settings, problems)
