"""Data sets of both forms, the packaged list, the store, and what the tests' report means."""

import hmac
import json
from pathlib import Path

import pytest

from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.environment.base import CommandResult
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.pypi_bugs import BuildError, build_pypi, fetch, site_key
from prorl_hpc.tasks.swe.bug import Form, Release, read_bugs
from prorl_hpc.tasks.swe.score import Ran, grade, read_report
from prorl_hpc.tasks.swe.store import InstanceStore, Verdict
from prorl_hpc.tasks.swe.task import excluded, make_swe
from prorl_hpc.tasks.swe.validate import EMPTY, why_gold_is_wrong, why_untouched_is_wrong
from tests.prorl_hpc.tasks.swe_bug import make_store, make_task, row

TEST_PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
index 1111111..2222222 100644
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-old
+new
"""
BENCH = {
    "instance_id": "owner__name-1", "repo": "owner/name", "base_commit": "abc",
    "problem_statement": "It breaks.", "patch": "", "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["tests/test_a.py::test_a"]', "PASS_TO_PASS": "[]",
    "image_name": "owner/name:1",
}  # fmt: skip


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def config(tmp_path: Path, **changes: object) -> TaskConfig:
    options = {"store": str(tmp_path / "store"), **changes.pop("options", {})}  # type: ignore[dict-item]
    values: dict[str, object] = {
        "kind": "swe", "environment": EnvironmentKind.bubblewrap, "validation_size": 1,
        "score_timeout_seconds": 300.0, "options": options,
    }  # fmt: skip
    return TaskConfig(**(values | changes))  # type: ignore[arg-type]


def test_the_packaged_list() -> None:
    bugs = read_bugs("swe", None)
    assert len(bugs) == 20
    assert {bug.form for bug in bugs} == {Form.pypi}
    assert all(bug.fail_to_pass and bug.pypi and bug.pypi.requirements for bug in bugs)


def test_the_form_of_swe_bench(tmp_path: Path) -> None:
    (bug,) = read_bugs("swe", write(tmp_path / "d.jsonl", BENCH))
    assert bug.form is Form.swe_bench
    assert bug.fail_to_pass == ("tests/test_a.py::test_a",)
    assert bug.test_command[-1] == "tests/test_a.py"
    assert bug.rule.tests == ("tests/test_a.py",)
    assert bug.image == "owner/name:1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": [1]}, "aren't a list of texts"),
        ({"instance_id": "../x"}, "can't name a directory"),
        ({"problem_statement": " "}, "isn't a text"),
        ({"test_patch": "hello"}, "test_patch"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path / "d.jsonl", BENCH, BENCH | {"instance_id": "b"} | change)
    with pytest.raises(TaskError, match=message) as caught:
        read_bugs("swe", path)
    assert "line 2" in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {k: v for k, v in BENCH.items() if k != "test_patch"})
    with pytest.raises(TaskError, match="no field 'test_patch'"):
        read_bugs("swe", path)


def test_twice_the_same_instance(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="twice"):
        read_bugs("swe", write(tmp_path / "d.jsonl", BENCH, BENCH))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "aren't built"),
        ({"environment": EnvironmentKind.process}, "can't hold untrusted code"),
        ({"options": {"imge": "x"}}, "options.imge is unknown"),
        ({"options": {"accept_missing": ["nothing"]}}, "accept_missing"),
        ({"options": {"test_seconds": 900}}, "test_seconds"),
    ],
)
def test_what_cannot_be_set_up(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_swe("swe", config(tmp_path, **changes), 0)


def test_an_image_by_name_needs_a_store(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", BENCH, BENCH | {"instance_id": "b"})
    changes = {"data": path, "environment": EnvironmentKind.apptainer}
    task = make_swe("swe", config(tmp_path, **changes), 0)
    with pytest.raises(TaskError, match="PRORL_IMAGES"):
        task.environment_spec(task.instance(0, kind=Kind.train))


def test_building_splits_repository_hidden_tests_and_gold_patch(tmp_path: Path) -> None:
    store, data = make_store(tmp_path)
    task, bug = make_task(store, data)
    built = task.built(bug)
    assert built.hidden == ("tests/test_add.py",)
    gold = task.gold(bug).decode()
    assert "a/adder/sums.py" in gold
    assert "a/adder/old.py" in gold
    assert "README" not in gold
    assert "tests/" not in gold
    seen = (store.repository(bug.instance_id) / "repo.tar").read_bytes()
    assert b"test_adds" not in seen
    # found again, not built again
    before = (store.bug(bug.instance_id) / "built.json").stat().st_mtime_ns
    assert build_pypi(bug, store) == built
    assert (store.bug(bug.instance_id) / "built.json").stat().st_mtime_ns == before
    assert list((store.root / ".making").iterdir()) == []


def test_a_release_with_another_digest_is_refused(tmp_path: Path) -> None:
    store = InstanceStore(root=tmp_path / "store")
    facts = row(store)
    release = Release(package="adder", version="1.0", sha256="0" * 64)
    with pytest.raises(BuildError, match=facts["buggy_sdist_sha256"]):
        fetch(release, store)


def test_another_tree_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    store = InstanceStore(root=tmp_path / "store")
    path = write(tmp_path / "d.jsonl", row(store, buggy_tree="0" * 40))
    (bug,) = read_bugs("swe", path)
    assert bug.pypi is not None
    store.site(site_key(bug.pypi)).mkdir(parents=True)
    with pytest.raises(BuildError, match="buggy_tree"):
        build_pypi(bug, store)
    assert store.built(bug.instance_id) is None


def test_what_a_check_found_wanting_is_left_out(tmp_path: Path) -> None:
    store, data = make_store(tmp_path)
    task, bug = make_task(store, data)
    key = task.built(bug).key
    store.record(Verdict(instance_id=bug.instance_id, key=key, ok=False, reason="flaky"))
    assert excluded(store, bug) == "flaky"
    with pytest.raises(TaskError, match="leaves nothing to train of 1"):
        make_swe("swe", config(tmp_path, data=str(data)), 0)
    # a check of another build says nothing of this one
    store.record(Verdict(instance_id=bug.instance_id, key="old", ok=False, reason="flaky"))
    assert make_swe("swe", config(tmp_path, data=str(data)), 0).size(Kind.train) == 1


def test_the_prompt_tells_no_secret(tmp_path: Path) -> None:
    store, data = make_store(tmp_path)
    task, bug = make_task(store, data)
    instance = task.instance_of(bug)
    assert "gives -1" in instance.messages[0].content
    assert "test_adds" not in str(instance)
    assert "return a + b" not in str(instance)


# --- reports -----------------------------------------------------------------------------------


KEY = b"of this session"


def signed(*rows: object, first: int = 0, key: bytes = KEY) -> list[bytes]:
    """Lines as the reporter writes them."""
    found = []
    for number, one in enumerate(rows, start=first):
        text = json.dumps(one).encode()
        mark = hmac.new(key, str(number).encode() + b"\t" + text, "sha256").hexdigest()
        found.append(text + b"\t" + mark.encode() + b"\n")
    return found


def report(*rows: object, code: int = 0, timed_out: bool = False) -> object:
    return read(signed(*rows), code=code, timed_out=timed_out)


def read(lines: list[bytes], *, code: int = 0, timed_out: bool = False) -> Ran:
    done = CommandResult(
        output=b"PASSED tests/test_add.py::test_adds\n", exit_code=code, duration_seconds=1.0,
        timed_out=timed_out,
    )  # fmt: skip
    return read_report(b"".join(lines), done, key=KEY)


def passed(name: str, when: str = "call", outcome: str = "passed") -> dict[str, str]:
    return {"test": f"tests/test_add.py::{name}", "when": when, "outcome": outcome}


def test_grades(tmp_path: Path) -> None:
    (bug,) = read_bugs("swe", write(tmp_path / "d.jsonl", row(InstanceStore(root=tmp_path))))
    both = (passed("test_adds"), passed("test_zero"))
    end = {"end": 0}
    for rows, reward, fraction in (
        ((*both, end), 1.0, 1.0),
        ((passed("test_zero"), passed("test_adds", outcome="failed"), end), 0.0, 0.5),
        (both, 0.0, 0.0),  # the session didn't come to its end
        ((), 0.0, 0.0),  # words on the output aren't outcomes
        ((*both, passed("test_adds", when="teardown", outcome="failed"), end), 0.0, 0.5),
        ((passed("test_adds", outcome="other"), passed("test_zero"), end), 0.0, 0.5),
        ((passed("test_adds", when="setup"), passed("test_zero"), end), 0.0, 0.5),
    ):
        score = grade(bug, report(*rows))  # type: ignore[arg-type]
        assert (score.reward, score.components["fraction"]) == (reward, fraction), rows
    assert grade(bug, report(*both, end, timed_out=True)).reward == 0.0  # type: ignore[arg-type]


def test_a_report_with_lines_of_somebody_else_is_of_no_session() -> None:
    rows = (passed("test_adds"), passed("test_zero", outcome="failed"), {"end": 1})
    ours = signed(*rows)
    assert read(ours).complete
    for lines in (
        [*ours, b'{"end": 0}\n'],
        [ours[0], ours[2]],  # the failure is taken away
        [ours[0], ours[1].replace(b"failed", b"passed"), ours[2]],
        [ours[0], ours[0], *ours[1:]],
        signed(*rows, key=b"of another"),
        [*ours, *signed({"end": 0}, first=4)],
        [ours[0][:-10]],
    ):
        found = read(lines)
        assert (found.complete, found.tampered) == (False, True), lines
    cut = read(ours[:2])
    assert (cut.complete, cut.tampered) == (False, False), "a session that was ended"


def test_why_an_instance_is_excluded(tmp_path: Path) -> None:
    (bug,) = read_bugs("swe", write(tmp_path / "d.jsonl", row(InstanceStore(root=tmp_path))))
    end = {"end": 0}
    fair = report(passed("test_zero"), passed("test_adds", outcome="failed"), end)
    whole = report(passed("test_zero"), passed("test_adds"), end)
    broken = report(passed("test_zero", outcome="failed"), end)
    assert why_untouched_is_wrong(bug, fair) == ""  # type: ignore[arg-type]
    assert "passes without a repair" in why_untouched_is_wrong(bug, whole)  # type: ignore[arg-type]
    assert "should pass" in why_untouched_is_wrong(bug, broken)  # type: ignore[arg-type]
    assert why_gold_is_wrong(bug, whole, EMPTY) == ""  # type: ignore[arg-type]
    assert "test_adds" in why_gold_is_wrong(bug, fair, EMPTY)  # type: ignore[arg-type]
    assert "an end" in why_gold_is_wrong(bug, report(), EMPTY)  # type: ignore[arg-type]
