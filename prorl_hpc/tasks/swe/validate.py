"""Checks that an instance's tests tell the bug from its repair, in the sandbox that scores.

    untouched tree + hidden tests: every FAIL_TO_PASS fails, every PASS_TO_PASS passes
    gold patch     + hidden tests: all pass, through the same filter as an agent's patch

Knows no job array: `prorl_hpc.cli.instances` spreads the work.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc.errors import HpcError
from prorl_hpc.environment.factory import EnvironmentFactory
from prorl_hpc.tasks.base import VerifierError
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.swe.bug import Bug
from prorl_hpc.tasks.swe.patches import Filtered, filter_patch
from prorl_hpc.tasks.swe.score import PatchRefused, Ran, run_hidden_tests
from prorl_hpc.tasks.swe.store import Verdict
from prorl_hpc.tasks.swe.task import SweTask, variables_of

EMPTY = Filtered(kept=b"", left_out=())


async def check_bug(task: SweTask, bug: Bug, *, make_environment: MakeEnvironment) -> Verdict:
    """Both runs. Raises HpcError when the infrastructure fails: that says nothing of the bug."""
    key = task.built(bug).key if task.settings.store.built(bug.instance_id) else ""
    untouched = await _run(task, bug, EMPTY, make_environment)
    reason = why_untouched_is_wrong(bug, untouched)
    seconds, gold_seconds = untouched.seconds, 0.0
    if not reason:
        filtered = filter_patch(task.gold(bug), bug.rule)
        try:
            gold = await _run(task, bug, filtered, make_environment)
        except PatchRefused as err:
            reason = f"the gold patch doesn't apply: {err}"
        else:
            reason, gold_seconds = why_gold_is_wrong(bug, gold, filtered), gold.seconds
    return Verdict(
        instance_id=bug.instance_id, key=key, ok=not reason, reason=reason,
        untouched_seconds=round(seconds, 2), gold_seconds=round(gold_seconds, 2),
        image=str(task.environment_spec(task.instance_of(bug)).image or "host"),
    )  # fmt: skip


async def _run(
    task: SweTask, bug: Bug, filtered: Filtered, make_environment: MakeEnvironment
) -> Ran:
    instance = task.instance_of(bug)
    async with make_environment(task.environment_spec(instance)) as environment:
        await task.setup(instance, environment)
        return await run_hidden_tests(
            bug, environment, filtered=filtered, hidden=task.hidden(bug),
            test_seconds=task.settings.test_seconds, variables=variables_of(bug),
        )  # fmt: skip


def why_untouched_is_wrong(bug: Bug, ran: Ran) -> str:
    """Empty when the untouched tree fails exactly as it should."""
    if ran.timed_out:
        return f"the untouched tree's tests were stopped after {ran.seconds:.0f} s"
    already = [test for test in bug.fail_to_pass if test in ran.passed - ran.failed]
    if already:
        return f"passes without a repair: {_some(already)}"
    broken = [test for test in bug.pass_to_pass if test not in ran.passed - ran.failed]
    if broken:
        return f"fails without a repair, though it should pass: {_some(broken)}{_said(ran)}"
    return ""


def why_gold_is_wrong(bug: Bug, ran: Ran, filtered: Filtered) -> str:
    """Empty when the gold patch passes everything required."""
    if ran.timed_out:
        return f"the gold patch's tests were stopped after {ran.seconds:.0f} s"
    if not ran.complete:
        return f"with the gold patch the tests don't come to an end{_said(ran)}"
    good = ran.passed - ran.failed
    bad = [test for test in (*bug.fail_to_pass, *bug.pass_to_pass) if test not in good]
    if not bad:
        return ""
    apart = f"; not counted of the patch: {_some(filtered.left_out)}" if filtered.left_out else ""
    return f"fails with the gold patch: {_some(bad)}{apart}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _said(ran: Ran) -> str:
    lines = ran.tail.splitlines()
    return f" ({lines[-1].strip()[:160]})" if lines else ""


def check_bugs(
    task: SweTask, bugs: Sequence[Bug], *, scratch: Path, at_once: int,
    tell: Callable[[Bug, Verdict | str, float], None] = lambda *_: None,
) -> dict[str, Verdict | str]:  # fmt: skip
    """Checks and records all; by instance the verdict, or the line of an infrastructure failure."""

    async def work() -> dict[str, Verdict | str]:
        factory = EnvironmentFactory(scratch)
        gate = asyncio.Semaphore(at_once)
        found: dict[str, Verdict | str] = {}

        async def one(bug: Bug) -> None:
            async with gate:
                started = time.monotonic()
                result: Verdict | str
                try:
                    result = await check_bug(task, bug, make_environment=factory.create)
                    task.settings.store.record(result)
                except OSError as err:
                    result = f"the result can't be kept: {err}"
                except HpcError as err:
                    result = " ".join(f"{type(err).__name__}: {err}".split())
                found[bug.instance_id] = result
                tell(bug, result, time.monotonic() - started)

        try:
            async with asyncio.TaskGroup() as group:
                for bug in bugs:
                    group.create_task(one(bug))
        finally:
            factory.close()
        return found

    if not bugs:
        raise VerifierError("no instance is to be checked")
    return asyncio.run(work())
