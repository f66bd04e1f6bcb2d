"""Clients that behave badly: the right status, nothing left behind, and the next one is served."""

import asyncio
import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest

from tests.prorl_hpc.proxy.helpers import CHAT, episode, until, user

DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def post(path=CHAT, body=b"{}", **headers):
    fields = {"content-length": str(len(body)), "host": "model"} | headers
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
    return head.encode() + b"\r\n" + body


async def talk(e, data, *, all_of_it=True):
    """Sends bytes as they are; returns the status and the body of the first answer."""
    reader, writer = await asyncio.open_unix_connection(str(e.socket))
    try:
        writer.write(data)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        status = int(head.split(b" ")[1])
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                      if line.startswith(b"content-length"))  # fmt: skip
        return status, json.loads(await asyncio.wait_for(reader.readexactly(length), 60))
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(body=b"{not json"), 400),
        (post(body=b'{"messages": [{"role": "user", "content": "\xff"}]}'), 400),
        (post(body=b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400),
        (post(body=DEEP), 400),
        (post(**{"content-length": "9" * 5000}), 400),
        (post(body=b""), 400),
        (post("/etc/passwd"), 404),
        (post("/v1/chat/completions/../../x"), 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\nhost: m\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nhost: m\r\n\r\n", 404),
        (b"\x16\x03\x01 not http at all\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: m\r\nx: " + b"y" * 300_000 + b"\r\n\r\n", 431),
        (post(body=b"x" * 5000), 413),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1400\r\n" + b"x" * 5120 + b"\r\n",
            413,
        ),
    ],
    ids=["json", "utf8", "surrogate", "deep", "digits", "empty", "path", "dots", "method", "root",
         "tls", "header", "body", "chunked"],
)  # fmt: skip
def test_bad_requests_are_answered_and_the_next_is_served(tmp_path, data, status):
    bound = 4096 if status == 413 else 1 << 20

    async def work():
        async with episode(tmp_path, "fine", bounds={"max_body_bytes": bound}) as e:
            answered, body = await talk(e, data)
            assert answered == status, body
            assert body["error"]["message"]
            assert (await e.say(user("a")))["content"] == "fine"
            await e.client.aclose()
            await until(lambda: e.server.num_connections == 0, what="no connection is left")

    asyncio.run(work())


def test_what_can_be_read_and_not_written_again_is_no_defect(tmp_path, caplog):
    """Arguments just as deep as JSON may be: the conversation around them makes them deeper."""

    def nested(depth):
        arguments = "[" * depth + "]" * depth
        call = {"function": {"name": "bash", "arguments": arguments}}
        return json.dumps({"messages": [user("a"), {"role": "assistant", "tool_calls": [call]}]})

    def readable(depth):
        try:
            msgspec.json.decode("[" * depth + "]" * depth)
        except RecursionError:
            return False
        return True

    low, high = 1, 200_000
    while low < high:  # the deepest that can be read
        middle = (low + high + 1) // 2
        low, high = (middle, high) if readable(middle) else (low, middle - 1)

    async def work():
        answers = ["fine"] * 200
        async with episode(tmp_path, *answers, context_tokens=500_000, max_turns=500) as e:
            depths = range(max(low - 80, 1), low + 80)
            statuses = [(await talk(e, post(body=nested(d).encode())))[0] for d in depths]
            assert set(statuses) == {200, 400}

    asyncio.run(work())
    assert "failed" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_answer(tmp_path, stream):
    async def work():
        async with episode(tmp_path, "never", "fine", held=True) as e:
            body = json.dumps({"messages": [user("a")], "stream": stream}).encode()
            _, writer = await asyncio.open_unix_connection(str(e.socket))
            writer.write(post(body=body))
            await e.engine.started.wait()
            writer.close()
            await until(lambda: e.engine.num_cancelled == 1, what="the answer is cancelled")
            await until(lambda: e.server.num_connections == 0, what="no connection is left")
            e.engine.hold.set()
            assert (await e.say(user("b")))["content"] == "never"
            assert len(e.capture.tree.calls) == 1

    asyncio.run(work())


def test_an_engine_that_fails_in_a_stream_is_told_in_the_stream(tmp_path):
    async def work():
        async with episode(tmp_path) as e:  # the script has no answer
            reply = await e.chat(user("a"), stream=True)
            error = json.loads(reply.text.removeprefix("data: "))["error"]
            assert error["message"] == "the engine failed; the episode is over"
            assert e.capture.over.is_set()

    asyncio.run(work())


def test_one_who_asks_before_sending_a_body_is_told_to_go_on(tmp_path):
    async def work():
        async with episode(tmp_path, "x") as e:
            body = json.dumps({"messages": [user("a")]}).encode()
            reader, writer = await asyncio.open_unix_connection(str(e.socket))
            writer.write(post(body=body, expect="100-continue").removesuffix(body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(work())


def test_many_calls_at_once(tmp_path):
    async def work():
        async with episode(
            tmp_path, *["x"] * 60, max_turns=40, bounds={"max_connections": 64}
        ) as e:
            replies = await asyncio.gather(*(e.chat(user(str(i))) for i in range(60)))
            codes = sorted(reply.status_code for reply in replies)
            assert codes == [200] * 40 + [403] * 20
            assert e.conversation.turns == 40
            # No two calls were sampled with the same seed.
            assert len({sampling.seed for _, sampling in e.engine.calls}) == 40

    asyncio.run(work())


def test_calls_that_are_being_sampled_outlive_the_last_turn(tmp_path):
    async def work():
        async with episode(tmp_path, "x", "y", max_turns=2, held=True) as e:
            waiting = [asyncio.create_task(e.chat(user(str(i)))) for i in range(2)]
            await until(lambda: e.conversation.turns == 2, what="both are being sampled")
            assert (await e.chat(user("c"))).status_code == 403
            assert not e.capture.over.is_set()
            e.engine.hold.set()
            assert [(await one).status_code for one in waiting] == [200, 200]
            assert e.capture.over.is_set()
            e.capture.conclude()
            assert e.conversation.finish_reason == "turns"
            assert len(e.capture.tree.calls) == 2

    asyncio.run(work())


def test_connections_are_bounded(tmp_path):
    async def work():
        async with episode(tmp_path, "x", bounds={"max_connections": 4}) as e:
            pairs = [await asyncio.open_unix_connection(str(e.socket)) for _ in range(4)]
            await until(lambda: e.server.num_connections == 4, what="four are open")
            status, body = await talk(e, post(body=b"{}"))
            assert status == 503
            assert "connections" in body["error"]["message"]
            for _, writer in pairs:
                writer.close()
            await until(lambda: e.server.num_connections == 0, what="all are closed")
            assert (await e.say(user("a")))["content"] == "x"

    asyncio.run(work())


def test_after_the_end_nobody_listens_and_nothing_is_left(tmp_path):
    async def work():
        async with episode(tmp_path, "x", held=True) as e:
            _, writer = await asyncio.open_unix_connection(str(e.socket))
            writer.write(post(body=json.dumps({"messages": [user("a")]}).encode()))
            await e.engine.started.wait()
        assert e.engine.num_cancelled == 1
        assert not e.socket.exists()
        with pytest.raises(OSError):
            await asyncio.open_unix_connection(str(e.socket))
        writer.close()
        assert e.server.num_connections == 0

    asyncio.run(work())


def test_a_path_that_no_socket_address_could_hold(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    async def work():
        async with episode(deep, "x") as e:
            status = e.socket.stat()
            assert stat.S_ISSOCK(status.st_mode)
            assert stat.S_IMODE(status.st_mode) == 0o600

    asyncio.run(work())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_user_is_turned_away(tmp_path, mode):
    """By the socket's mode; and where somebody opened that, by the user id of the peer."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(60); "
        "s.connect(sys.argv[1]); "
        "s.sendall(b'GET /v1/models HTTP/1.1\\r\\nhost: m\\r\\n\\r\\n'); print(s.recv(100))"
    )

    async def work(directory):
        async with episode(directory, "x") as e:
            e.socket.chmod(mode)
            done = await asyncio.to_thread(
                subprocess.run, ["/usr/bin/python3", "-c", code, str(e.socket)], user=65534,
                capture_output=True, text=True, cwd="/",
            )  # fmt: skip
            assert "models" not in done.stdout
            if mode == 0o600:
                assert "PermissionError" in done.stderr
            else:
                refused = ("ConnectionReset", "BrokenPipe")
                assert done.stdout == "b''\n" or any(word in done.stderr for word in refused)
            assert (await e.say(user("a")))["content"] == "x"

    with tempfile.TemporaryDirectory(prefix="prorl-proxy-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)  # the way to the socket is open: what protects it is its own
        asyncio.run(work(Path(name)))


def test_a_defect_is_a_500_and_no_crash(tmp_path, monkeypatch):
    async def work():
        async with episode(tmp_path, "x") as e:
            monkeypatch.setattr(e.capture, "prepare", lambda ask: 1 / 0)
            assert (await e.chat(user("a"))).status_code == 500
            monkeypatch.undo()
            assert (await e.say(user("a")))["content"] == "x"

    asyncio.run(work())
