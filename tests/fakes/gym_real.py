"""Runs one of nemo-gym's own resources servers on a free port, without Ray and a head server.

    PYTHON gym_real.py MODULE SERVER-CLASS CONFIG-CLASS      prints the port

PYTHON has nemo-gym; this file imports nothing of ours.
"""

import importlib
import socket
import sys
from typing import Any
from unittest.mock import MagicMock


def main() -> None:
    import uvicorn
    from nemo_gym.server_utils import ServerClient

    module: Any = importlib.import_module(sys.argv[1])
    config = getattr(module, sys.argv[3])(host="127.0.0.1", port=1, entrypoint="", name="gym")
    client = MagicMock(spec=ServerClient)
    server = getattr(module, sys.argv[2])(config=config, server_client=client)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = server.setup_webserver()
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
