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
    return run_step(argv, limit_seconds=limit_seconds, env=env)[0]


def run_step(
    argv: list[str], *, limit_seconds: float, env: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    shown = " ".join(argv).replace(f"{BIN}/", "").replace(f"{ROOT}/", "")
    print(f"\n== {shown}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
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
    lines: list[str] = []

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)

    # A thread, since a daemon that inherited the pipe must not be able to hold up the deadline.
    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    try:
        code = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        print(f"== out of time after {limit_seconds:.0f} s: {shown}", flush=True)
        code = 124
    finally:
        end_group(process)
    reader.join(10)
    print(f"== exit {code} after {time.monotonic() - started:.0f} s", flush=True)
    return code, lines


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


def pytest(report: Report, name: str, args: list[str], *, limit_seconds: float) -> None:
    """One run of pytest, its counts added to the report from its own machine-readable result."""
    with tempfile.TemporaryDirectory(prefix="prorl-check-") as scratch:
        result = Path(scratch) / "result.xml"
        code, lines = run_step(
            [str(BIN / "python"), "-m", "pytest", f"--junitxml={result}", *args],
            limit_seconds=limit_seconds,
            env=test_environment(),
        )
        counted = count(report, result)
    report.reruns += sorted({ln.split()[1] for ln in lines if re.match(r"RERUN \S+::", ln)})
    if code != 0 and (not counted or code != 1):
        report.failed += 1
        report.failures.append(f"{name}: pytest ended with status {code}")


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
        pytest(report, "fast tests", fast, limit_seconds=left(1800, keep_seconds=1500))
        slow = ["-m", f"({SLOW}){extra}", "-v", *again, "2"]
        name = "process, cluster and container tests"
        pytest(report, name, slow, limit_seconds=left(3600, keep_seconds=200))
    finally:
        for cluster in sorted(entry for entry in Path(prefix).glob("*") if entry.is_dir()):
            step([str(CLUSTER / "down"), str(cluster)], limit_seconds=120)
        if owned:
            shutil.rmtree(prefix, ignore_errors=True)
    if extra:
        report.skips["marked vllm: set PRORL_TEST_VLLM=1 where vLLM's CPU build is installed"] += 0


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
