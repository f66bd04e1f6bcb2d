"""A little endpoint of OpenAI's completions API, in a thread of the test. A fake, and says so.

`dialect` is what it understands: `tokens` (ids in and out, as vLLM's does), `text` (refuses prompts
of ids and fields it doesn't know, as strict ones do), `chat` (no completions at all).
"""

import threading
import time
from typing import Any

from tests.fakes.http_fake import FakeHandler, PortServer

KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream"}


class Endpoint:
    """Runs until it is stopped; `answer` is what it says in the text dialect."""

    def __init__(
        self, *, dialect: str, key: str = "", answer: str = "12", token_seconds: float = 0.0
    ) -> None:
        self.dialect = dialect
        self.key = key
        self.text = answer
        self.token_seconds = token_seconds
        self.requests: list[dict[str, Any]] = []
        self.running = 0
        self.aborted = 0
        self.gate = threading.Lock()
        handler = type("Bound", (Handler,), {"endpoint": self})
        self._server = PortServer(("127.0.0.1", 0), handler)
        self.port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Handler(FakeHandler):
    endpoint: Endpoint

    def allowed(self) -> bool:
        key = self.endpoint.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401, {"error": {"message": "wrong key"}})
            return False
        return True

    def do_GET(self) -> None:
        if not self.allowed():
            return
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "their-model"}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.body()
        endpoint = self.endpoint
        if not self.allowed():
            return
        endpoint.requests.append(body)
        if self.path != "/v1/completions" or endpoint.dialect == "chat":
            self.answer(404, {"detail": "Not Found"})
        elif endpoint.dialect == "tokens":
            self.tokens(body)
        elif unknown := set(body) - KNOWN:
            self.answer(400, {"error": {"message": f"unrecognised arguments {sorted(unknown)}"}})
        elif not isinstance(body["prompt"], str):
            self.answer(400, {"error": {"message": "prompt must be a string"}})
        else:
            choice = {"index": 0, "text": endpoint.text, "finish_reason": "stop"}
            self.answer(200, {"choices": [choice]})

    def tokens(self, body: dict[str, Any]) -> None:
        """Token i is (length of the prompt + i) % 50."""
        endpoint, stream = self.endpoint, bool(body.get("stream"))
        ids: list[int] = []
        if stream:
            self.begin_events()
        with endpoint.gate:
            endpoint.running += 1
        try:
            reason = None
            while reason is None:
                time.sleep(endpoint.token_seconds)
                if self.client_is_gone():
                    endpoint.aborted += 1
                    self.close_connection = True
                    return
                ids.append((len(body["prompt"]) + len(ids)) % 50)
                if ids[-1] in body["stop_token_ids"]:
                    reason = "stop"
                elif len(ids) >= body["max_tokens"]:
                    reason = "length"
                if stream:
                    self.event({"choices": [choice_of(ids[-1:], reason)]})
        finally:
            with endpoint.gate:
                endpoint.running -= 1
        if stream:
            self.event({"choices": [], "usage": {}})
            self.end_events()
        else:
            self.answer(200, {"choices": [choice_of(ids, reason)]})


def choice_of(ids: list[int], reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "".join(f"<{token}>" for token in ids),
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.25] * len(ids)},
    }
