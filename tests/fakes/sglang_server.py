"""A little HTTP server that speaks the part of SGLang's native interface that we use. A fake.

Written after SGLang's documentation (0.5: `/generate`, `/pause_generation`, `/abort_request`,
`/update_weights_from_disk`, `/flush_cache`, `/continue_generation`, `/update_weight_version`); the
real one needs a GPU. As there, a pause in mode `abort` ends every request with what it has, waiting
requests are held until it is over, and an answer names the version at its end. It never notices a
closed connection: only `/abort_request` frees a request.

It has no model: token i of a request is a function of its prompt's length, i and the policy
version. Trouble is asked for through the environment:

    FAKE_SGLANG_TROUBLE   load_fails | flush_fails | incremental (events hold new tokens only)
    FAKE_SGLANG_TOKEN_SECONDS   pause before each token
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs as a script

from tests.fakes.http_fake import FakeHandler, PortServer

TROUBLE = os.environ.get("FAKE_SGLANG_TROUBLE", "")
TOKEN_SECONDS = float(os.environ.get("FAKE_SGLANG_TOKEN_SECONDS", "0"))
VOCABULARY = 97


def token_of(*, place: int, version: int) -> int:
    """The fake's token at a place of the whole sequence, prompt included."""
    return (place * 7 + version * 13) % VOCABULARY


class State:
    """What the server holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "default"
        self.gate = threading.Condition()
        self.paused = False
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.counts = {"num_tokens": 0, "aborted": 0, "flushed": 0, "requests": 0}
        self.cached_at = ""
        """Version that computed what the prefix cache holds; empty when it is empty."""
        self.stale = 0
        """Requests that found a cache of another version."""


class Handler(FakeHandler):
    state: State

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, {})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": self.state.name}]})
        elif self.path == "/fake":
            state = self.state
            more = {"running": len(state.running), "stale": state.stale}
            self.answer(200, state.counts | more)
        else:
            self.answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = self.body()
        routes = {
            "/generate": self.generate,
            "/update_weight_version": self.name_version,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update,
            "/flush_cache": self.flush,
        }
        routes[self.path](body)

    def name_version(self, body: Any) -> None:
        self.state.version = body["new_version"]
        self.answer(200, {"success": True, "message": "done", "new_version": body["new_version"]})

    def pause(self, body: Any) -> None:
        state = self.state
        assert body["mode"] == "abort"
        with state.gate:
            state.paused = True
            state.aborted |= state.running
            while state.running:
                state.gate.wait()
        self.answer(200, {"status": "ok"})

    def resume(self, body: Any) -> None:
        with self.state.gate:
            self.state.paused = False
            self.state.gate.notify_all()
        self.answer(200, {"status": "ok"})

    def abort(self, body: Any) -> None:
        with self.state.gate:
            self.state.aborted.add(body["rid"])
        self.answer(200, {})

    def update(self, body: Any) -> None:
        state = self.state
        assert state.paused
        if TROUBLE == "load_fails" or not Path(body["model_path"]).is_dir():
            self.answer(400, {"success": False, "message": "can't read the weights"})
            return
        state.version = body["weight_version"]
        self.answer(200, {"success": True, "message": "done", "num_paused_requests": 0})

    def flush(self, body: Any) -> None:
        if TROUBLE == "flush_fails":
            self.answer(400, {"message": "requests are running"})
            return
        self.state.cached_at = ""
        self.state.counts["flushed"] += 1
        self.answer(200, {})

    def generate(self, body: dict[str, Any]) -> None:
        if any(token >= VOCABULARY for token in body["input_ids"]):
            self.answer(400, {"error": {"message": "a token id is out of vocabulary"}})
            return
        state, rid = self.state, body["rid"]
        with state.gate:
            while state.paused:
                state.gate.wait()
            state.running.add(rid)
            state.counts["requests"] += 1
            state.stale += state.cached_at not in ("", state.version)
            state.cached_at = state.version
        try:
            self.decode(body, rid)
        finally:
            with state.gate:
                state.running.discard(rid)
                state.gate.notify_all()

    def decode(self, body: dict[str, Any], rid: str) -> None:
        state, asked = self.state, body["sampling_params"]
        stream, ids = bool(body.get("stream")), []
        finish: dict[str, Any] | None = None
        if stream:
            self.begin_events()
        while finish is None:
            time.sleep(TOKEN_SECONDS)
            with state.gate:
                if rid in state.aborted:
                    state.counts["aborted"] += 1
                    finish = {"type": "abort", "message": "aborted"}
                else:
                    state.counts["num_tokens"] += 1
                    place = len(body["input_ids"]) + len(ids)
                    ids.append(token_of(place=place, version=int(state.version)))
                    if ids[-1] in asked["stop_token_ids"]:
                        finish = {"type": "stop", "matched": ids[-1]}
                    elif len(ids) >= asked["max_new_tokens"]:
                        finish = {"type": "length", "length": len(ids)}
            if stream:
                new = ids[-1:] if finish is None or finish["type"] != "abort" else []
                given = new if TROUBLE == "incremental" else ids
                self.event(self.said(given, total=len(ids), finish=finish))
        if stream:
            self.end_events()
        else:
            self.answer(200, self.said(ids, total=len(ids), finish=finish))

    def said(self, ids: list[int], *, total: int, finish: Any) -> dict[str, Any]:
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "finish_reason": finish,
                "weight_version": self.state.version,
                "completion_tokens": total,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-m", "--model-path", "--served-model-name", "--host"):
        parser.add_argument(flag, dest=flag.strip("-").replace("-", "_"))
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args()
    handler = type("Bound", (Handler,), {"state": State(args.served_model_name)})
    print(f"fake SGLang starts with {args.model_path}", flush=True)
    PortServer((args.host, args.port), handler).serve_forever()


if __name__ == "__main__":
    main()
