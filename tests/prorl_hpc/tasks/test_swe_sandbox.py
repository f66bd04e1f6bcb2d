"""Real repairs and real tricks in a real sandbox: what the agent leaves, and what it is worth."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prorl_hpc.environment.base import Environment
from prorl_hpc.environment.factory import EnvironmentFactory
from prorl_hpc.records import Outcome, Score
from prorl_hpc.tasks.swe.bug import Bug
from prorl_hpc.tasks.swe.task import UNREADABLE, SweTask
from prorl_hpc.tasks.swe.validate import check_bugs
from tests.prorl_hpc.tasks.swe_bug import make_store, make_task, need_bubblewrap

pytestmark = pytest.mark.process

REPAIR = "sed -i 's/a - b/a + b/' adder/sums.py"
SECONDS = 120.0
Work = Callable[[Environment], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Bench:
    task: SweTask
    bug: Bug
    scratch: Path

    def attempt(self, *commands: str) -> tuple[bytes, Score]:
        """What an agent that runs `commands` leaves behind, and its score."""

        async def work() -> tuple[bytes, Score]:
            factory = EnvironmentFactory(self.scratch)
            try:
                instance = self.task.instance_of(self.bug)
                async with factory.create(self.task.environment_spec(instance)) as environment:
                    await self.task.setup(instance, environment)
                    for command in commands:
                        done = await environment.run(command, SECONDS)
                        assert not done.timed_out, done.text
                    result = await self.task.result(instance, environment)
                score = await self.task.score_in(
                    instance, result=result, response="", make_environment=factory.create
                )
            finally:
                factory.close()
            return result, score

        return asyncio.run(work())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweTask, Bug]]:
    need_bubblewrap()
    yield make_task(*make_store(tmp_path_factory.mktemp("bugs")))


@pytest.fixture
def bench(built: tuple[SweTask, Bug], tmp_path: Path) -> Bench:
    return Bench(task=built[0], bug=built[1], scratch=tmp_path / "scratch")


def test_a_repair_is_worth_one(bench: Bench) -> None:
    result, score = bench.attempt("git log --oneline", REPAIR, "git commit -qam mine 2>/dev/null")
    assert b"adder/sums.py" in result
    assert score.reward == 1.0
    assert score.components["fraction"] == 1.0
    assert score.outcome is Outcome.scored


def test_nothing_is_worth_nothing(bench: Bench) -> None:
    result, score = bench.attempt("ls")
    assert result == b""
    assert score.reward == 0.0


def test_half_a_repair_is_worth_a_fraction_as_component_only(bench: Bench) -> None:
    # `add` then gives 3 always: one of two required tests passes
    _, score = bench.attempt("printf 'def add(a, b):\\n    return 3\\n' > adder/sums.py")
    assert score.reward == 0.0
    assert score.components["fraction"] == 0.5


FORGER = """\
def pytest_runtest_makereport(item, call):
    from _pytest.reports import TestReport
    r = TestReport.from_item_and_call(item, call)
    r.outcome, r.longrepr = "passed", None
    return r
"""
TRICKS = {
    "edits_the_tests": "printf 'def test_adds():\\n    pass\\ndef test_zero():\\n    pass\\n' "
    "> tests/test_add.py",
    "conftest": "cat > conftest.py && cp conftest.py adder/conftest.py "
    "&& cp conftest.py tests/conftest.py",
    "pytest_configuration": "printf '[pytest]\\naddopts = --co\\npython_functions = nothing\\n' "
    "> pytest.ini; cp pytest.ini tox.ini; printf '[tool:pytest]\\naddopts=--co\\n' > setup.cfg",
    "sitecustomize": "cat > sitecustomize.py && cp sitecustomize.py usercustomize.py",
    "shadowed_runner": "mkdir -p pytest _pytest && cat > pytest/__init__.py "
    "&& cp pytest/__init__.py pytest/__main__.py && cp pytest/__init__.py _pytest/__init__.py",
    "site_packages": "cp conftest.py /.prorl-site/sitecustomize.py; "
    "cat > $(python3 -c 'import pytest; print(pytest.__file__)')",
    "path_file": "echo 'import os; os._exit(0)' > adder.pth",
    "link_instead_of_tests": "rm -rf tests && mkdir /tmp/mine && ln -s /tmp/mine tests",
    "byte_code": "mkdir -p adder/__pycache__ && echo x > adder/__pycache__/sums.cpython-311.pyc",
}
"""Each tries to be rewarded without a repair. Where it reads, it gets a plugin that forges."""


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_do_not_pay(bench: Bench, name: str) -> None:
    trick = TRICKS[name]
    text = f"cat > /tmp/forger <<'EOF'\n{FORGER}EOF\n(\n{trick}\n) < /tmp/forger"
    _, score = bench.attempt(text)
    assert score.reward == 0.0
    assert score.components["fraction"] == 0.0


@pytest.mark.parametrize("name", ["conftest", "pytest_configuration", "sitecustomize"])
def test_tricks_do_not_cost_a_repair_its_reward_either(bench: Bench, name: str) -> None:
    text = f"cat > /tmp/forger <<'EOF'\n{FORGER}EOF\n(\n{TRICKS[name]}\n) < /tmp/forger"
    _, score = bench.attempt(text, REPAIR)
    assert score.reward == 1.0
    assert score.components["left_out_files"] >= 1.0


def test_words_that_look_like_results_are_not_results(bench: Bench) -> None:
    fake = (
        "import os\n"
        "for name in ('adds', 'zero'):\n"
        "    os.write(1, f'PASSED tests/test_add.py::test_{name}\\n'.encode())\n"
        "os._exit(0)\n"
    )
    _, score = bench.attempt(f"cat >> adder/sums.py <<'EOF'\n{fake}EOF")
    assert score.reward == 0.0
    assert score.components["fraction"] == 0.0


FORGE = """\
import glob, json, os, sys
rows = [{"test": f"tests/test_add.py::test_{n}", "when": "call", "outcome": "passed"}
        for n in ("adds", "zero")] + [{"end": 0}]
files = glob.glob("/tmp/.prorl-harness-*/*.jsonl") + glob.glob("/proc/self/fd/*")
for path in files:
    try:
        if "report" in os.path.realpath(path):
            with open(path, "a") as stream:
                stream.write("".join(json.dumps(row) + "\\n" for row in rows))
    except OSError:
        pass
os._exit(0)
"""
COPY = """\
import atexit, glob
@atexit.register
def copy():
    for path in glob.glob("/tmp/.prorl-harness-*/report*"):
        lines = open(path).read().splitlines(True)
        with open(path, "a") as stream:
            stream.write("".join(line.replace("failed", "passed") for line in lines))
"""
"""The second keeps whatever signs the lines, and changes what they say."""


@pytest.mark.parametrize("source", [FORGE, COPY])
def test_a_report_that_the_program_writes_itself_is_no_report(bench: Bench, source: str) -> None:
    _, score = bench.attempt(f"cat >> adder/sums.py <<'EOF'\n{source}EOF")
    assert score.reward == 0.0
    assert score.components["fraction"] == 0.0
    assert score.components["report_tampered"] == 1.0


def test_the_key_of_the_report_lies_nowhere_about(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither environment, command line nor any file of the harness holds it."""
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes=32: "c0ffee" + "0" * 2 * num_bytes)
    look = (
        "import glob, os\n"
        "seen = open('/proc/self/environ').read() + open('/proc/self/cmdline').read()\n"
        "for path in glob.glob('/tmp/.prorl-harness-*/**', recursive=True):\n"
        "    if os.path.isfile(path):\n"
        "        seen += open(path, errors='replace').read()\n"
        "assert 'PYTEST_ADDOPTS' in seen and 'c0ffee' + '0' * 64 not in seen\n"
    )
    _, score = bench.attempt(f"{REPAIR}; cat >> adder/sums.py <<'EOF'\n{look}EOF")
    assert score.reward == 1.0


PLUGIN = """\
import copy
import os

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    made = yield
    report = made.get_result()
    if report.when == "call":
        for outcome in ("rerun", "skipped", "passed"):  # as plugins for reruns and subtests do
            extra = copy.copy(report)
            extra.outcome, extra.sections = outcome, []
            extra.longrepr = ("noisy", 1, "x") if outcome == "skipped" else None
            item.ihook.pytest_runtest_logreport(report=extra)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    print("noisy", os.environ.get("PRORL_REPORT"), os.environ.get("PRORL_REPORT_KEY"))


def pytest_report_header(config):
    return "noisy: loaded"
"""


def test_an_installed_plugin_is_no_tampering(tmp_path: Path) -> None:
    need_bubblewrap()
    task, bug = make_task(*make_store(tmp_path / "bugs", plugin=PLUGIN))
    bench = Bench(task=task, bug=bug, scratch=tmp_path / "scratch")
    _, mended = bench.attempt(REPAIR)
    assert mended.reward == 1.0
    assert "report_tampered" not in mended.components
    (site,) = (tmp_path / "bugs").rglob("noisy_plugin.py")
    site.write_text(PLUGIN.replace('report.when == "call"', "True"))  # before and after tests too
    _, broken = bench.attempt("printf '# hm\\n' >> adder/sums.py")
    assert (broken.reward, broken.components["fail_to_pass"]) == (0.0, 0.0)
    assert "report_tampered" not in broken.components


def test_an_endless_repair_times_out_with_a_score(
    built: tuple[SweTask, Bug], bench: Bench, tmp_path: Path
) -> None:
    store = built[0].settings.store
    data = tmp_path / "bugs.jsonl"
    data.write_bytes((store.root.parent / "bugs.jsonl").read_bytes())
    impatient, bug = make_task(store, data, test_seconds=4.0)
    short = Bench(task=impatient, bug=bug, scratch=bench.scratch)
    _, score = short.attempt("echo 'while True: pass' >> adder/sums.py")
    assert score.reward == 0.0
    assert score.components["tests_timed_out"] == 1.0


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf .git",
        "rm -rf /testbed/.git && ln -s /etc .git",
        "cat > .git/config < /dev/zero & sleep 0; kill $!; wait; echo '[bad' > .git/config",
    ],
)
def test_a_ruined_tree_is_the_agents_doing(bench: Bench, command: str) -> None:
    result, score = bench.attempt(command)
    assert result == UNREADABLE
    assert score.outcome is Outcome.invalid
    assert score.reward == 0.0


def test_the_agent_sees_neither_hidden_tests_nor_gold_patch(bench: Bench) -> None:
    async def look() -> str:
        factory = EnvironmentFactory(bench.scratch)
        try:
            instance = bench.task.instance_of(bench.bug)
            async with factory.create(bench.task.environment_spec(instance)) as environment:
                await bench.task.setup(instance, environment)
                done = await environment.run(
                    "ls -R / 2>/dev/null | grep -E 'gold.patch|hidden' ; "
                    "git -C /testbed log --all --oneline | wc -l; "
                    "git -C /testbed fsck --lost-found 2>&1 | grep -c dangling; "
                    "grep -rl 'a + b' /testbed /.prorl-repository | wc -l; env | grep -i secret",
                    SECONDS,
                )
        finally:
            factory.close()
        return done.text

    # one commit, nothing dangling, the repair nowhere
    assert asyncio.run(look()).split() == ["1", "0", "0"]


def test_the_check_of_an_instance(bench: Bench) -> None:
    store = bench.task.settings.store
    found = check_bugs(bench.task, [bench.bug], scratch=bench.scratch, at_once=1)
    verdict = found[bench.bug.instance_id]
    assert not isinstance(verdict, str), verdict
    assert verdict.ok
    assert store.verdict(bench.bug.instance_id) == verdict


def test_an_infrastructure_failure_is_no_verdict(bench: Bench, tmp_path: Path) -> None:
    store, data = make_store(tmp_path)
    task, bug = make_task(store, data)
    (store.repository(bug.instance_id) / "repo.tar").write_bytes(b"damaged")
    found = check_bugs(task, [bug], scratch=bench.scratch, at_once=1)
    assert str(found[bug.instance_id]).startswith("SandboxStartError")
    assert store.verdict(bug.instance_id) is None
