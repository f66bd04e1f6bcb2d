"""Runs the checks that `make lint` and `make test` name, bounded and one after another.

Knows how each check is started, how long it may take, and how to leave nothing running behind:
every step is a process group of its own, ended together, and the private cluster is stopped by its
own script whatever happened. Knows nothing of what the tests test.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
CLUSTER = ROOT / "tests" / "cluster" / "minicluster"
GRACE_SECONDS = 90
STARTED = time.monotonic()
WHOLE_SECONDS = 4700
"""For all steps together, below what .ci/run allows, so that the summary is always written."""
SLOW = "process or cluster or container"
SCRIPTS = [".ci/run", ".ci/setup", *sorted(str(p.relative_to(ROOT)) for p in CLUSTER.iterdir())]


class Interrupted(Exception):
    """Someone asked the whole run to stop."""


@dataclass
class Report:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    reruns: list[str] = field(default_factory=list)


def on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Interrupted(f"stopped by signal {number}")


def end_group(process: "subprocess.Popen[str]") -> None:
    """Ask the step's process group to end, and insist after the grace time."""
    for number, wait_seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            continue


def left(limit_seconds: float, *, keep_seconds: float = 0.0) -> float:
    """The step's limit, or what is left of the whole run's after so much is kept for others."""
    rest = WHOLE_SECONDS - keep_seconds - (time.monotonic() - STARTED)
    return max(60.0, min(limit_seconds, rest))


def step(argv: list[str], *, limit_seconds: float, env: dict[str, str] | None = None) -> int:
    """Run one command with its output passed through; its exit status, 124 when out of time."""
    return Step(argv, env=env).finish(limit_seconds)


class Step:
    """One command in a process group of its own, begun at once; `finish` waits and ends it."""

    def __init__(
        self, argv: list[str], *, env: dict[str, str] | None = None, aside: bool = False
    ) -> None:
        self.shown = " ".join(argv).replace(f"{BIN}/", "").replace(f"{ROOT}/", "")
        self.aside = aside
        """Its output is kept until it has ended, since another step prints beside it."""
        print(f"\n== {self.shown}{' (beside the next)' if aside else ''}", flush=True)
        self.started = time.monotonic()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # A thread, since a daemon that inherited the pipe mustn't be able to hold up the deadline.
        self.reader = threading.Thread(target=self._pump, daemon=True)
        self.reader.start()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if not self.aside:
                print(line, end="", flush=True)

    def finish(self, limit_seconds: float) -> int:
        try:
            code = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            print(f"== out of time after {limit_seconds:.0f} s: {self.shown}", flush=True)
            code = 124
        finally:
            end_group(self.process)
        self.reader.join(10)
        if self.aside:
            print(f"\n== {self.shown}\n{''.join(self.lines)}", end="")
        print(f"== exit {code} after {time.monotonic() - self.started:.0f} s", flush=True)
        return code


def lint(report: Report) -> None:
    tools = [
        ([str(BIN / "ruff"), "check", "."], 300),
        ([str(BIN / "ruff"), "format", "--check", "."], 300),
        ([str(BIN / "mypy")], 900),
        ([str(BIN / "lint-imports")], 300),
        ([str(BIN / "shellcheck"), "-x", "-P", ".", *shell_scripts()], 300),
    ]
    for argv, limit_seconds in tools:
        if step(argv, limit_seconds=limit_seconds) != 0:
            report.failed += 1
            report.failures.append(f"lint: {Path(argv[0]).name} {' '.join(argv[1:3])}".rstrip())


def shell_scripts() -> list[str]:
    shell = re.compile(rb"^#!.*\b(ba)?sh\b")
    return [s for s in SCRIPTS if (ROOT / s).is_file() and is_shell(ROOT / s, shell)]


def is_shell(path: Path, pattern: re.Pattern[bytes]) -> bool:
    return path.suffix == ".sh" or bool(pattern.match(path.read_bytes()[:80]))


class Pytest:
    """One run of pytest; its counts come from its own machine-readable result."""

    def __init__(self, name: str, args: list[str], *, aside: bool = False) -> None:
        self.name = name
        self.scratch = tempfile.TemporaryDirectory(prefix="prorl-check-")
        self.result = Path(self.scratch.name) / "result.xml"
        argv = [str(BIN / "python"), "-m", "pytest", f"--junitxml={self.result}", *args]
        self.step = Step(argv, env=test_environment(), aside=aside)

    def finish(self, report: Report, limit_seconds: float) -> None:
        with self.scratch:
            code = self.step.finish(limit_seconds)
            counted = count(report, self.result)
        again = {ln.split()[1] for ln in self.step.lines if re.match(r"RERUN \S+::", ln)}
        report.reruns += sorted(again)
        if code != 0 and (not counted or code != 1):
            report.failed += 1
            report.failures.append(f"{self.name}: pytest ended with status {code}")


def count(report: Report, result: Path) -> int:
    """Add one result file; how many failures it names."""
    try:
        # The file is our own pytest's: nothing in it is a stranger's.
        cases = list(ElementTree.parse(result).iter("testcase"))  # noqa: S314
    except (OSError, ElementTree.ParseError):
        return 0
    # A test that was run again has an entry for each run, and only the last one may hold a failure.
    runs: dict[str, list[ElementTree.Element]] = {}
    for case in cases:
        runs.setdefault(f"{case.get('classname')}::{case.get('name')}", []).append(case)
    failures = 0
    for name, entries in runs.items():
        skipped = next(
            (s for s in (entry.find("skipped") for entry in entries) if s is not None), None
        )
        if any(entry.find(kind) is not None for entry in entries for kind in ("failure", "error")):
            failures += 1
            report.failures.append(name)
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            report.skipped += 1
            report.skips[skipped.get("message") or "no reason given"] += 1
        else:
            report.passed += 1
    report.failed += failures
    return failures


def test_environment() -> dict[str, str]:
    foreign = re.compile(r"^(SLURM|SBATCH|SRUN|APPTAINER|SINGULARITY|PMI|PYTEST)_")
    env = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    env["PATH"] = f"{BIN}:{env.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return env


def prepare_cluster() -> None:
    """Install what the cluster and container tests need; without it those tests say so and skip."""
    for script, limit_seconds in (("install-slurm", 1200), ("install-apptainer", 900)):
        for _attempt in range(2):
            limit = left(limit_seconds, keep_seconds=3300)
            if step([str(CLUSTER / script)], limit_seconds=limit) == 0:
                break


def tests(report: Report) -> None:
    prepare_cluster()
    extra = "" if os.environ.get("PRORL_TEST_VLLM") else " and not vllm"
    prefix = os.environ.get("PRORL_CLUSTER_PREFIX")
    owned = prefix is None
    if prefix is None:
        prefix = tempfile.mkdtemp(prefix="prorl-cluster-", dir="/var/tmp")
        Path(prefix).chmod(0o755)
        os.environ["PRORL_CLUSTER_PREFIX"] = prefix
    try:
        # A machine under load fails a bound now and then: once more, and told at the end.
        again = ["-raR", "--durations=15", "--reruns"]
        fast = ["-n", "3", "--dist", "loadscope", "-m", f"not ({SLOW}){extra}", "-q", *again, "1"]
        Pytest("fast tests", fast).finish(report, left(1800, keep_seconds=1500))
        slow_tests(report, ["-m", f"({SLOW}){extra}", "-v", *again, "2"])
    finally:
        for cluster in sorted(entry for entry in Path(prefix).glob("*") if entry.is_dir()):
            step([str(CLUSTER / "down"), str(cluster)], limit_seconds=120)
        if owned:
            shutil.rmtree(prefix, ignore_errors=True)
    if extra:
        report.skips["marked vllm: set PRORL_TEST_VLLM=1 where vLLM's CPU build is installed"] += 0


def slow_tests(report: Report, args: list[str]) -> None:
    """Two runs side by side: both mostly wait for processes, and only one has the private Slurm."""
    aside = Pytest(
        "tests of processes and containers", [*args, "--ignore=tests/cluster"], aside=True
    )
    try:
        cluster = Pytest("cluster tests", [*args, "tests/cluster"])
        cluster.finish(report, left(3600, keep_seconds=200))
    except BaseException:
        end_group(aside.step.process)
        raise
    aside.finish(report, left(3600, keep_seconds=100))


def summarise(report: Report, names: list[str]) -> int:
    print("\n" + "=" * 78)
    for reason, times in sorted(report.skips.items()):
        print(f"left out{f' ({times})' if times else ''}: {reason}")
    for name in report.reruns:
        print(f"NEEDED A SECOND RUN: {name}")
    for failure in report.failures:
        print(f"FAILED {failure}")
    if "test" in names:
        print(
            f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped", flush=True
        )
    elif not report.failures:
        print("lint: clean", flush=True)
    return 1 if report.failures else 0


def main(names: list[str]) -> int:
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    report = Report()
    try:
        if "lint" in names:
            lint(report)
        if "test" in names:
            tests(report)
    except Interrupted as err:
        report.failures.append(str(err))
        report.failed += 1
    return summarise(report, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
