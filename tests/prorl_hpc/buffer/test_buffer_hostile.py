"""Clients without the run's key, garbage, oversized messages, full disks, damaged shards."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from prorl_hpc.buffer import frames, manifest
from prorl_hpc.buffer.channel import BlockingChannel, Identity, configure
from prorl_hpc.buffer.client import LearnerClient, RolloutClient
from prorl_hpc.buffer.keys import ClientKeys, KeysError, load_client_keys, make_keys
from prorl_hpc.buffer.manifest import ManifestError, Owner, Quarantined, read_lines
from prorl_hpc.buffer.messages import (
    BufferGone,
    Finish,
    LeaseRequest,
    Refusal,
    Refused,
    StatusRequest,
)
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.buffer.server import ServerConfig
from prorl_hpc.buffer.shard import ShardDamaged
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import (
    DEADLINE_SECONDS,
    Running,
    make_run,
    make_trajectory,
    produce,
    serving,
    wait_for,
)


def learner_with(buffer: Running, keys: ClientKeys, *, patience_seconds: float) -> LearnerClient:
    return LearnerClient(
        buffer.address,
        keys=keys,
        run=buffer.run.name,
        attempt=1,
        patience_seconds=patience_seconds,
        pulse_seconds=0,
    )


@contextmanager
def raw(buffer: Running, *, role: str = "rollout") -> Iterator["zmq.Socket[bytes]"]:
    """A socket with the right key that may say anything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    configure(client, keys=load_client_keys(buffer.run, role=role))
    client.connect(buffer.address)
    try:
        yield client
    finally:
        client.close(linger=0)
        context.term()


def still_works(buffer: Running) -> None:
    """A node and a learner get through a whole group."""
    learner = buffer.learner()

    async def node() -> None:
        client = await buffer.rollout()
        for lease in (await client.lease(64)).leases:
            assert set((await client.push(produce(lease))).values()) == {"stored"}
        await client.close()

    asyncio.run(node())
    assert len(learner.take(2, timeout_seconds=DEADLINE_SECONDS)) == 2
    learner.close()


def test_unknown_keys_are_refused_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    with serving(run) as buffer, caplog.at_level(logging.WARNING):
        mine, theirs = (
            load_client_keys(run, role="learner"),
            load_client_keys(other, role="learner"),
        )
        strangers = ClientKeys(
            public=theirs.public, secret=theirs.secret, server_public=mine.server_public
        )
        for keys in (strangers, theirs):
            client = learner_with(buffer, keys, patience_seconds=1.5)
            with pytest.raises(BufferGone, match="no answer from the buffer"):
                client.heartbeat()
            client.close()
        wait_for(lambda: buffer.server.refused.count >= 2, what="both refusals")
        refusals = [r.getMessage() for r in caplog.records if "without a key" in r.getMessage()]
        assert len(refusals) == 1
        still_works(buffer)


def test_garbage_bytes_on_the_port_disturb_nobody(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "run")) as buffer:
        host, port = buffer.address.removeprefix("tcp://").split(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + b"\0" * 8 + b"\x7f"):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as stream:
                stream.sendall(data)
        still_works(buffer)


def test_garbage_from_a_client_with_the_key_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer, caplog.at_level(logging.WARNING), raw(buffer) as client:
        me = Identity(run=run.name, worker="w", attempt=1)
        header, body = frames.encode(me.envelope(1), LeaseRequest(capacity=1))
        push, arrays = frames.encode_push([make_trajectory(0, 0)])
        cut = [*frames.encode(me.envelope(2), push), *arrays[:-1], b"1234567"]
        for message in (
            [b"\xc1garbage"],
            [b"\xc1garbage", b"\xff"],
            [header, b"\xc1"],
            [header, msgspec.msgpack.encode({"type": "Unknown"})],
            cut,
            [msgspec.msgpack.encode([99, *msgspec.msgpack.decode(header)[1:]]), body],
        ):
            client.send_multipart(message)
            assert client.poll(int(DEADLINE_SECONDS * 1000))
            reply = frames.decode_reply(client.recv_multipart()[1])
            assert isinstance(reply, Refusal)
            assert reply.code == "malformed"
        still_works(buffer)


def test_roles_and_runs_are_kept_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        cases = (
            ("rollout", run.name, Finish(reason="mine"), "role"),
            ("observer", run.name, LeaseRequest(capacity=1), "role"),
            ("rollout", "elsewhere", StatusRequest(), "run"),
        )
        for role, name, body, code in cases:
            channel = BlockingChannel(
                lambda: buffer.address,
                keys=load_client_keys(run, role=role),
                identity=Identity(run=name, worker="x", attempt=1),
                patience_seconds=DEADLINE_SECONDS,
            )
            with pytest.raises(Refused) as caught:
                channel.ask(body)
            assert caught.value.code == code
            channel.close()
        assert buffer.server.service.phase == "running"


def test_an_oversized_message_is_refused(tmp_path: Path) -> None:
    server = ServerConfig(seal_seconds=0.02, max_message_bytes=1 << 16, goodbye_seconds=0.1)
    with serving(make_run(tmp_path / "run"), server=server) as buffer:
        learner = buffer.learner()

        async def node(num_tokens: int) -> str:
            client = await buffer.rollout()
            try:
                await client.lease(1)
                done = await client.push([make_trajectory(0, 0, num_tokens=num_tokens)])
                return done[0, 0]
            finally:
                await client.close()

        with pytest.raises(Refused, match="at most 65536"):
            asyncio.run(node(16_000))  # 5 bytes a token: refused by the buffer
        with raw(buffer) as client:
            client.send_multipart([b"x" * (1 << 20)])  # cut off by the transport
            assert asyncio.run(node(100)) == "stored"
        learner.close()


async def fill_all(buffer: Running, worker: str = "w0") -> int:
    client: RolloutClient = await buffer.rollout(worker)
    made = 0
    while leases := (await client.lease(64)).leases:
        for lease in leases:
            made += len(await client.push(produce(lease)))
    await client.close()
    return made


def spoil(run: Run, shard: int) -> None:
    path = run.shard(shard)
    path.write_bytes(path.read_bytes()[:-100])


def test_a_truncated_shard_is_quarantined_at_start_and_made_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()
        asyncio.run(fill_all(buffer))
        ref = learner.take(1, timeout_seconds=DEADLINE_SECONDS)[0]
        learner.close()
    shard = ref.members[0][0]
    spoil(run, shard)
    with serving(run, attempt=2) as buffer:
        learner = buffer.learner(attempt=2)
        assert (run.quarantine / run.shard(shard).name).exists()

        async def again() -> int:
            made = 0
            while made == 0:
                made = await fill_all(buffer, "w1")
            return made

        assert asyncio.run(again()) >= 1
        refs = learner.take(4, timeout_seconds=DEADLINE_SECONDS)
        assert [ref.group_id for ref in refs] == [0, 1, 2, 3]
        reader = GroupReader(run)
        assert all(len(reader.read(ref).trajectories) == 4 for ref in refs)
        reader.close()
        learner.close()
    lines = [line for line, _ in read_lines(run.manifest)]
    assert [line.number for line in lines if isinstance(line, Quarantined)] == [shard]


def test_a_shard_found_damaged_by_the_learner_comes_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()
        asyncio.run(fill_all(buffer))
        ref = learner.take(1, timeout_seconds=DEADLINE_SECONDS)[0]
        spoil(run, ref.members[0][0])
        reader = GroupReader(run)
        with pytest.raises(ShardDamaged, match="digest") as caught:
            reader.read(ref)
        learner.damaged(caught.value.shard, group_id=ref.group_id, reason=str(caught.value))
        assert asyncio.run(fill_all(buffer)) >= 1
        back = learner.take(4, timeout_seconds=DEADLINE_SECONDS)
        assert sorted(r.group_id for r in back) == [0, 1, 2, 3]
        for each in back:
            assert len(reader.read(each).trajectories) == 4
        reader.close()
        learner.close()


def test_manifest_torn_tail_newer_format_and_old_owner(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    first, second = manifest.ManifestWriter(path, owner=1), manifest.ManifestWriter(path, owner=2)
    first.append([Owner(format=1, attempt=1, host="a"), manifest.Limit(limit=4, version=0)])
    second.append([Owner(format=1, attempt=2, host="b")])
    first.append([manifest.Limit(limit=9, version=9)])  # written after it was superseded
    second.append([manifest.Limit(limit=6, version=1)])
    with path.open("ab") as stream:
        stream.write(b'{"type":"lim')
    limits = [x for x in manifest.valid_lines(path) if isinstance(x, manifest.Limit)]
    assert [x.limit for x in limits] == [4, 6]
    manifest.cut_torn_tail(path)
    assert path.read_bytes().endswith(b"}\n")
    second.append([Owner(format=3, attempt=3, host="c")])
    with pytest.raises(ManifestError, match="newer than 2"):
        list(manifest.valid_lines(path))
    first.close()
    second.close()


def test_keys_are_private_and_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = load_client_keys(run, role="rollout")
    make_keys(run)
    assert load_client_keys(run, role="rollout") == before
    path = run.secrets / "curve-rollout.json"
    assert (path.stat().st_mode & 0o777, run.secrets.stat().st_mode & 0o777) == (0o600, 0o700)
    assert before.secret.decode() not in repr(before)
    path.chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        load_client_keys(run, role="rollout")
