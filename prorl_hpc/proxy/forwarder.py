"""Runs inside the sandbox: starts a program with an address at which it finds the model.

    program --TCP, 127.0.0.1 of the sandbox--> this --Unix socket--> rollout worker

`forwarder.py SETTINGS` with a JSON file. Needs Python 3.6 and its standard library, and nothing of
this project: it is copied into the sandbox. Ends with the program, and with its exit code.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading

READ_BYTES = 1 << 16
NOT_FOUND = 127

# Its own packages come first on the program's path, and on nobody else's: commands that it starts
# find the Python path of the sandbox.
LAUNCH = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); del sys.argv[:2]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def main(path: str) -> int:
    """Returns the exit code."""
    with open(path, encoding="utf-8") as stream:  # noqa: PTH123
        settings = json.load(stream)
    home = os.getcwd()  # noqa: PTH109
    os.chdir(os.path.dirname(settings["socket"]))  # noqa: PTH120 - addresses hold 107 bytes
    listener = socket.socket(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    target = os.path.basename(settings["socket"])  # noqa: PTH119
    threading.Thread(target=accept, args=(listener, target), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    values = dict(settings["values"], url=url)
    environment = {k: fill(v, values) for k, v in settings["variables"].items()}
    command = [fill(part, values) for part in settings["command"]]
    try:
        program = subprocess.Popen(
            launched(command, settings["package"]),
            cwd=home,
            env=dict(os.environ, **environment),
            stdin=subprocess.DEVNULL,
        )
    except OSError as err:
        sys.stderr.write(f"{command[0][:200]} can't be started: {err.strerror}\n")
        return NOT_FOUND
    code = program.wait()
    return 128 - code if code < 0 else code


def fill(text: str, values: "dict[str, str]") -> str:
    """Every {name} of a known name, once: what is put in isn't looked at again."""
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m.group(1), m.group(0)), text)


def launched(command: "list[str]", package: str) -> "list[str]":
    """The command, where its first word may be a script of the package."""
    script = os.path.join(package, "bin", command[0]) if package else ""  # noqa: PTH118
    if not script or not os.path.isfile(script):  # noqa: PTH113
        return command
    with open(script, "rb") as stream:  # noqa: PTH123
        first = stream.readline(4096)
    if not first.startswith(b"#!") or b"python" not in first:
        return [script] + command[1:]  # noqa: RUF005
    return [sys.executable, "-I", "-c", LAUNCH, package, script] + command[1:]  # noqa: RUF005


def accept(listener: socket.socket, target: str) -> None:
    """Relays every connection."""
    while True:
        client = listener.accept()[0]
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(target)
        except OSError:  # the episode is over
            client.close()
            server.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=relay, args=pair, daemon=True).start()


def relay(source: socket.socket, sink: socket.socket) -> None:
    """Bytes one way, until either end is gone; then both are let go."""
    try:
        while True:
            data = source.recv(READ_BYTES)
            if not data:
                break
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
