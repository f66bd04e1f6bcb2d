"""Scores one patch in a fresh sandbox, and says what each required test did.

    fresh tree -> the agent's changes that count -> hidden tests -> test command -> report -> reward

Nothing of the agent's runs before its changes are in and the hidden tests lie over them. Each line
of the report is signed with a key of this session alone. Knows no store and no prompt. What stays
possible is what any test in the same process allows: a repair that reaches into the running pytest,
or finds the key in its memory. It would have to be written into the program's own source.
"""

import hmac
import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import SandboxError
from prorl_hpc.environment.base import (
    CommandResult,
    Environment,
    EnvironmentEnded,
    TransferError,
)
from prorl_hpc.records import Outcome, Score
from prorl_hpc.tasks.base import VerifierError
from prorl_hpc.tasks.swe import reporter
from prorl_hpc.tasks.swe.bug import Bug, Form
from prorl_hpc.tasks.swe.patches import Filtered, PatchError, filter_patch

TREE = "/testbed"
HARNESS = "/tmp/.prorl-harness"  # noqa: S108 - inside the sandbox
STEP_SECONDS = 300.0
GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.autocrlf=false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What the tests said."""

    passed: frozenset[str]
    failed: frozenset[str]
    """Failed or broke in any phase."""
    complete: bool
    """The session came to its end."""
    tampered: bool
    """The report holds what its writer didn't write."""
    timed_out: bool
    seconds: float
    tail: str
    """Last lines of the output, for people."""


class PatchRefused(Exception):
    """The agent's patch doesn't apply to the tree that it was made from."""


async def score_patch(
    bug: Bug, environment: Environment, *, patch: bytes, hidden: bytes, test_seconds: float,
    variables: Mapping[str, str],
) -> Score:  # fmt: skip
    """The reward of `patch`, in an environment that holds the untouched tree.

    Raises SandboxError or VerifierError when it isn't the agent's fault that there is none.
    """
    try:
        filtered = filter_patch(patch, bug.rule)
    except PatchError:
        return refused("malformed_patch")
    left_out = {"left_out_files": float(len(filtered.left_out))}
    if not filtered.kept.strip():
        return Score(reward=0.0, components={"fraction": 0.0, "empty_patch": 1.0, **left_out})
    try:
        ran = await run_hidden_tests(
            bug, environment, filtered=filtered, hidden=hidden, test_seconds=test_seconds,
            variables=variables,
        )  # fmt: skip
    except PatchRefused:
        return refused("patch_refused")
    except EnvironmentEnded:
        return refused("ended_its_sandbox")
    score = grade(bug, ran)
    return Score(reward=score.reward, components=score.components | left_out)


def refused(reason: str) -> Score:
    """The score of a result that can't be tested, by the agent's doing."""
    return Score(reward=0.0, components={"fraction": 0.0, reason: 1.0}, outcome=Outcome.invalid)


def grade(bug: Bug, ran: Ran) -> Score:
    """1 when every required test passed in a session that came to its end; else 0."""
    required = (*bug.fail_to_pass, *bug.pass_to_pass)
    good = ran.passed - ran.failed
    num_good = sum(test in good for test in required)
    done = ran.complete and num_good == len(required)
    mended = sum(test in good for test in bug.fail_to_pass)
    kept = sum(test in good for test in bug.pass_to_pass)
    return Score(
        reward=float(done),
        components={
            "fraction": num_good / len(required) if ran.complete else 0.0,
            "fail_to_pass": mended / len(bug.fail_to_pass),
            "pass_to_pass": kept / len(bug.pass_to_pass) if bug.pass_to_pass else 1.0,
            "tests_timed_out": float(ran.timed_out),
            **({"report_tampered": 1.0} if ran.tampered else {}),
        },
    )


async def run_hidden_tests(
    bug: Bug, environment: Environment, *, filtered: Filtered, hidden: bytes, test_seconds: float,
    variables: Mapping[str, str],
) -> Ran:  # fmt: skip
    """Lays patch and hidden tests over the tree and runs the tests.

    Raises PatchRefused, EnvironmentEnded (the patch's doing), SandboxError or VerifierError.
    """
    token, key = secrets.token_hex(8), secrets.token_hex(32).encode()
    work = f"{HARNESS}-{token}"
    try:
        if filtered.kept.strip():
            await _apply(environment, f"{work}/agent.patch", filtered.kept)
        await _put_hidden(bug, environment, f"{work}/hidden", hidden)
        source = await _plugin_source()
        await environment.put(f"{work}/plugin/prorl_{token}.py", source)
        await environment.put(f"{work}/key", key)
    except TransferError as err:
        raise VerifierError(f"the scoring sandbox takes no files: {err}") from err
    report = f"{work}/report.jsonl"
    paths = ":".join([f"{work}/plugin", *filter(None, [variables.get("PYTHONPATH", "")])])
    settings = {
        "PYTHONPATH": paths, "PYTEST_ADDOPTS": f"-p prorl_{token}", "PRORL_REPORT": report,
        "PRORL_REPORT_KEY": f"{work}/key",
    }  # fmt: skip
    command = ["python3" if word == "python" else word for word in bug.test_command[:1]]
    words = [*(f"{key}={value}" for key, value in settings.items()), *command]
    text = shlex.join(["env", *words, *bug.test_command[1:]])
    done = await environment.run(f"cd {TREE} && {text}", test_seconds)
    if done.shell_restarted and done.exit_code == 0:
        raise SandboxError("the scoring shell was lost while the tests ran")
    try:
        lines = await environment.get(report)
    except TransferError:
        lines = b""
    return read_report(lines, done, key=key)


def signed_rows(lines: bytes, *, key: bytes) -> tuple[list[dict[str, object]], bool]:
    """The rows that the reporter wrote, and whether there is nothing else in the file.

    Reading stops at the first line that is not the next of the reporter's own.
    """
    rows: list[dict[str, object]] = []
    for number, line in enumerate(lines.splitlines()):
        text, _, mark = line.rpartition(b"\t")
        wanted = hmac.new(key, b"%d\t%b" % (number, text), "sha256").hexdigest()
        if not hmac.compare_digest(wanted.encode(), mark):
            return rows, False
        rows.append(json.loads(text))
    return rows, True


def read_report(lines: bytes, done: CommandResult, *, key: bytes) -> Ran:
    """Outcomes by test id. A report that holds anything else is of no complete session."""
    rows, whole = signed_rows(lines, key=key)
    passed, failed, complete = set(), set(), False
    for row in rows:
        if "end" in row:
            complete = True
        elif row.get("outcome") == "failed":
            failed.add(str(row.get("test")))
        elif row.get("outcome") == "passed" and row.get("when") == "call":
            passed.add(str(row.get("test")))
    timed_out = done.timed_out or done.stopped_for is not None
    tail = "\n".join(done.text.rstrip().splitlines()[-15:])
    return Ran(
        passed=frozenset(passed), failed=frozenset(failed), tampered=not whole,
        complete=complete and whole and not timed_out, timed_out=timed_out,
        seconds=done.duration_seconds, tail=tail,
    )  # fmt: skip


async def _apply(environment: Environment, path: str, patch: bytes) -> None:
    await environment.put(path, patch)
    done = await environment.run(
        f"cd {TREE} && {GIT} apply --whitespace=nowarn {shlex.quote(path)}", STEP_SECONDS
    )
    if done.exit_code != 0:
        raise PatchRefused(done.text.strip()[-300:])


async def _put_hidden(bug: Bug, environment: Environment, path: str, hidden: bytes) -> None:
    """Hidden tests over whatever is there; failing here is never the agent's fault."""
    await environment.put(path, hidden)
    if bug.form is Form.pypi:
        step = f"tar --no-same-owner -xf {path} -C {TREE}"
    else:
        step = f"cd {TREE} && {GIT} apply --whitespace=nowarn {path}"
    done = await environment.run(step, STEP_SECONDS)
    if done.exit_code != 0:
        raise VerifierError(
            f"{bug.instance_id}: the hidden tests can't be put in: {done.text.strip()[-300:]}"
        )


async def _plugin_source() -> bytes:
    return Path(reporter.__file__).read_bytes()
