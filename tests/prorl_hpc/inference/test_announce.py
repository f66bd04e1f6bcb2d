"""Announcements of inference jobs: fencing, beats that stand still, files that aren't ours."""

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from hpc.allocation import Allocation
from prorl_hpc.inference.announce import (
    BEAT_SECONDS,
    Announcement,
    Board,
    TokenError,
    announce,
    beating,
    describe,
    load_token,
    make_token,
    read,
    read_all,
    withdraw,
)
from prorl_hpc.inference.herald import Herald
from prorl_hpc.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.root.mkdir()
    return run


def made(**changes: object) -> Announcement:
    values = {
        "run": "r", "index": 0, "attempt": 1, "host": "10.0.0.1", "port": 81, "identity": "a",
        "beat": 1, "version": 0, "in_flight": 0,
    }  # fmt: skip
    return Announcement(**(values | changes))  # type: ignore[arg-type]


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_older_attempt_can_not_take_the_place_of_its_successor(run: Run) -> None:
    assert announce(run, made(attempt=2, identity="new"))
    assert not announce(run, made(attempt=1, identity="old"))
    withdraw(run, index=0, identity="old")
    found = read(run, 0)
    assert found is not None
    assert found.identity == "new"
    withdraw(run, index=0, identity="new")
    assert read(run, 0) is None


def test_a_beat_that_stands_still_is_of_a_dead_server(run: Run) -> None:
    clock = Clock()
    board = Board(run, clock=clock, expiry_seconds=60.0)
    announce(run, made(index=0, beat=5))
    announce(run, made(index=1, beat=5, identity="b"))
    assert [one.index for one in board.look()] == [0, 1]
    clock.now = 50.0
    announce(run, made(index=1, beat=6, identity="b"))
    assert [one.index for one in board.look()] == [0, 1]
    clock.now = 70.0  # 70 s without a beat of server 0, 20 s of server 1
    assert [one.index for one in board.look()] == [1]
    announce(run, made(index=0, beat=1, attempt=2, identity="successor"))
    assert [one.identity for one in board.look()] == ["successor", "b"]


def herald(run: Run, clock: Clock, *, attempt: int = 1, identity: str = "a") -> Herald:
    allocation = Allocation(
        run_directory=run.root, job="inference", role="inference", index=0, attempt=attempt,
        job_id="7_0", deadline=None, grace_seconds=60, scratch=run.root, node_rank=0, hosts=("h",),
    )  # fmt: skip
    return Herald(run, allocation, identity=identity, at=("10.0.0.1", 81), clock=clock)


def test_a_server_is_announced_while_it_is_well_and_only_then(run: Run) -> None:
    clock = Clock()
    ours = herald(run, clock)
    ours.tell("", version=3, in_flight=1)
    found = read(run, 0)
    assert found is not None
    assert (found.beat, found.version, found.job_id) == (1, 3, "7_0")
    clock.now = BEAT_SECONDS / 2
    ours.tell("", version=4, in_flight=0)
    assert read(run, 0) == found  # not every round writes a file
    clock.now = BEAT_SECONDS
    ours.tell("", version=4, in_flight=0)
    found = read(run, 0)
    assert found is not None
    assert (found.beat, found.version) == (2, 4)
    ours.tell("the engine is dead", version=4, in_flight=0)
    assert read(run, 0) is None
    ours.tell("", version=4, in_flight=0)  # well again: told at once, not at the next beat
    assert read(run, 0) is not None
    successor = herald(run, clock, attempt=2, identity="b")
    successor.tell("", version=4, in_flight=0)
    assert not ours.fenced
    clock.now = 3 * BEAT_SECONDS
    ours.tell("", version=4, in_flight=0)
    assert ours.fenced
    ours.withdraw()
    found = read(run, 0)
    assert found is not None
    assert found.identity == "b"


def test_files_of_other_runs_newer_formats_and_garbage_are_left_out(run: Run) -> None:
    announce(run, made(index=0, run="another"))
    announce(run, made(index=1, format=99))
    announce(run, made(index=2))
    run.announcement(3).write_bytes(b"{")
    (run.announcements / "notes.json").write_text("{}")
    (run.announcements / ".4.json.tmp").write_bytes(msgspec.json.encode(made(index=4)))
    assert [one.index for one in read_all(run)] == [2]
    assert Board(Run(run.root / "absent")).look() == []


def test_servers_in_one_line() -> None:
    assert describe([]) == "inference: no server is announced"
    one, two = made(version=3, in_flight=2), made(index=1, version=5, in_flight=1)
    assert describe([one]) == (
        "inference: 1 server announced, policy version 3, 2 requests in flight"
    )
    assert "2 servers announced, policy version 3 to 5, 3 requests" in describe([one, two])


def test_addresses(run: Run) -> None:
    assert made().address == "http://10.0.0.1:81"
    assert made(host="fd00::1").address == "http://[fd00::1]:81"


def test_the_token_is_made_once_and_must_be_private(run: Run) -> None:
    with pytest.raises(TokenError, match="can't be read"):
        load_token(run)
    make_token(run)
    token = load_token(run)
    make_token(run)
    assert load_token(run) == token
    assert len(token) > 30
    run.inference_token.chmod(0o644)
    with pytest.raises(TokenError, match="chmod 600"):
        load_token(run)
    run.inference_token.chmod(0o600)
    run.inference_token.write_text("\n")
    with pytest.raises(TokenError, match="is empty"):
        load_token(run)


def test_a_file_that_can_not_be_read_just_now_is_not_withdrawn(run: Run) -> None:
    clock = Clock()
    board = Board(run, clock=clock, expiry_seconds=60.0)
    announce(run, made(index=0))
    announce(run, made(index=1, identity="b"))
    assert [one.index for one in board.look()] == [0, 1]
    clock.now = 30.0
    run.announcement(0).unlink()
    run.announcement(0).mkdir()  # there, and reading it fails
    assert [one.index for one in board.look()] == [0, 1]
    clock.now = 70.0  # its beat was seen 70 s ago
    announce(run, made(index=1, identity="b", beat=2))
    assert [one.index for one in board.look()] == [1]
    run.announcement(1).unlink()  # this one is withdrawn
    assert board.look() == []


def test_who_looks_once_leaves_out_what_was_not_written_lately(run: Run) -> None:
    announce(run, made(index=0))
    announce(run, made(index=1, identity="b"))
    os.utime(run.announcement(0), (1000.0, 1000.0))
    os.utime(run.announcement(1), (1050.0, 1050.0))
    assert [one.index for one in beating(run, now=1060.0)] == [0, 1]
    assert [one.index for one in beating(run, now=1061.0)] == [1]
    assert len(read_all(run)) == 2
