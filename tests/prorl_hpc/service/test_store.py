"""The jobs on disk: an older format, what is kept how long, a disk that refuses."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from prorl_hpc.records import Kind, Trajectory
from prorl_hpc.service import store
from prorl_hpc.service.schema import JobResult, JobState, Sample, encode_result
from prorl_hpc.service.store import FORMAT, JobStore, StoreError
from tests.prorl_hpc.service.conftest import run, serving, until

JOB = {"task": "sums", "index": 3}

OLD = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,
    idempotency_key TEXT UNIQUE, request TEXT NOT NULL, state TEXT NOT NULL,
    submitted REAL NOT NULL, fetched REAL, result BLOB, detail TEXT NOT NULL DEFAULT ''
);
INSERT INTO jobs (id, request, state, submitted) VALUES ('a', '{"task": "sums"}', 'queued', 1.0);
PRAGMA user_version=1;
"""


def test_a_file_of_format_1_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    old = sqlite3.connect(path)
    old.executescript(OLD)
    old.close()
    for _ in range(2):
        store = JobStore(path)
        assert [job.id for job in store.unfinished()] == ["a"]
        assert store.num_added == 1
        store.close()


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version={FORMAT + 1}")
    newer.close()
    with pytest.raises(StoreError, match="update prorl-hpc"):
        JobStore(path)
    (tmp_path / "damaged").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="can't be opened"):
        JobStore(tmp_path / "damaged")


def test_what_is_kept_how_long(tmp_path: Path) -> None:
    now = 0.0
    store = JobStore(tmp_path / "jobs.sqlite", now=lambda: now)
    for name in ("fetched", "waiting", "cancelled", "queued"):
        store.add(name, request="{}", idempotency_key=None)
    for name, state in (("fetched", "done"), ("waiting", "done"), ("cancelled", "cancelled")):
        store.finish(name, state=JobState(state), result=b"{}", detail="", num_finished=2)
    store.mark_fetched("fetched")

    def left(at: float) -> set[str]:
        nonlocal now
        now = at
        store.sweep(keep_fetched_seconds=10, keep_unfetched_seconds=100)
        names = ("fetched", "waiting", "cancelled", "queued")
        return {name for name in names if store.get(name) is not None}

    assert left(9.0) == {"fetched", "waiting", "cancelled", "queued"}
    assert left(11.0) == {"waiting", "queued"}
    assert left(101.0) == {"queued"}
    assert store.num_added == 4
    store.close()


def test_a_disk_that_refuses_loses_no_result(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            service.engine.gate.clear()
            job_id = (await service.post(JOB)).json()["id"]
            await until(lambda: service.engine.in_flight == 1)
            store = service.jobs._store
            real = store._db

            class Full:
                def execute(self, *_: object) -> None:
                    raise sqlite3.OperationalError("database or disk is full")

            store._db = Full()  # type: ignore[assignment]
            service.engine.gate.set()
            await until(lambda: service.jobs._unsaved)
            answer = await service.post(JOB)
            assert (answer.status_code, "disk" in answer.json()["detail"]) == (503, True)
            waiting = await service.client.get(f"/v1/jobs/{job_id}/result")
            assert waiting.status_code == 202  # still at work, as far as the client is told
            store._db = real
            service.jobs.sweep()
            result = await service.finished(job_id)
            assert [sample["reward"] for sample in result["samples"]] == [1.0]

    run(check())


def test_a_result_is_written_as_the_schema_reads_it() -> None:
    trajectory = Trajectory(
        group_id=1,
        rollout_index=2,
        kind=Kind.train,
        task="sums",
        instance_id="i",
        tokens=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([0, 1], dtype=np.uint8),
        logprobs=np.array([0.0, -0.1], dtype=np.float32),
        versions=np.array([-1, 4], dtype=np.int32),
        reward=0.5,
        components={"a": 1.0},
        timings={"run": 0.1},
        isolation={"backend": "none"},
    )
    data = encode_result(
        "job", state=JobState.done, task="sums", trajectories=[trajectory], detail="d"
    )
    result = JobResult.model_validate_json(data)
    assert set(json.loads(data)["samples"][0]) == set(Sample.model_fields)
    (sample,) = result.samples
    assert (sample.tokens, sample.loss_mask, sample.versions) == ([1, 2], [0, 1], [-1, 4])
    assert np.float32(sample.logprobs[1]) == np.float32(-0.1)  # float32 survives as it was
    assert (result.instance_id, sample.reward, sample.outcome) == ("i", 0.5, "scored")


def test_a_kill_while_an_older_file_is_taken_over_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.sqlite"
    old = sqlite3.connect(path)
    old.executescript(OLD)
    old.close()
    with monkeypatch.context() as patched:
        patched.setattr(store, "_FROM_1", (*store._FROM_1[:2], "ALTER TABLE nothing ADD COLUMN x"))
        with pytest.raises(StoreError, match="can't be opened"):
            JobStore(path)
    again = JobStore(path)
    assert [job.num_usable for job in again.unfinished()] == [0]
    again.close()
