"""A little HTTP server that speaks the part of vLLM's interface that we use. A fake, and says so.

It answers whole or as server-sent events, and gives a request up when its client goes away. As
with the real one, a stream's spans of versions come with its last event only.

It has no model: token i of a completion is a function of seed, place and policy version, made one
at a time so that updates fall between tokens. It takes vLLM's own command line; trouble is asked
for through the environment:

    FAKE_VLLM_TROUBLE   never_well | dies | load_fails | unwell_file:PATH (503 while PATH exists)
                        | other_spans (streams end with an account of another version)
    FAKE_VLLM_TOKEN_SECONDS   pause before each token
"""

import argparse
import os
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs as a script

from tests.fakes.http_fake import FakeHandler, PortServer, UnixServer

TROUBLE = os.environ.get("FAKE_VLLM_TROUBLE", "")
TOKEN_SECONDS = float(os.environ.get("FAKE_VLLM_TOKEN_SECONDS", "0"))
VOCABULARY = 97


class State:
    """What the server holds."""

    def __init__(self, model: str, name: str) -> None:
        self.model = model
        self.name = name
        self.version = "default"
        self.gate = threading.Condition()
        self.paused = False
        self.updating = False
        self.num_tokens = 0
        self.running = 0
        self.aborted = 0


def token_of(*, seed: int, place: int, version: str) -> int:
    """The fake's token: any function that tests can compute too."""
    return (seed * 31 + place * 7 + int(version) * 13) % VOCABULARY


class Handler(FakeHandler):
    state: State

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/health":
            unwell = TROUBLE.startswith("unwell_file:") and Path(TROUBLE[12:]).exists()
            self.answer(503 if TROUBLE == "never_well" or unwell else 200, {})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": state.name}]})
        elif self.path == "/fake":
            counts = {"num_tokens": state.num_tokens, "running": state.running}
            self.answer(200, counts | {"aborted": state.aborted})
        else:
            self.answer(404, {"error": "no such route"})

    def do_POST(self) -> None:
        body = self.body()
        state, route = self.state, self.path.partition("?")[0]
        with state.gate:
            if route == "/update_weight_version":
                state.version = body["new_version"]
            elif route in ("/pause", "/resume"):
                state.paused = route == "/pause"
                state.gate.notify_all()
            elif route == "/start_weight_update":
                if not state.paused:  # the real one dies of this
                    os._exit(1)
                state.updating = True
            elif route == "/update_weights":
                if TROUBLE == "load_fails" or not Path(body["update_info"]["path"]).is_dir():
                    self.answer(500, {"error": "can't read the weights"})
                    return
            elif route == "/finish_weight_update":
                assert state.updating
                state.updating, state.version = False, body["weight_version"]
        if route == "/inference/v1/generate":
            self.generate(body)
        else:
            self.answer(200, {"message": "done"})

    def generate(self, body: dict[str, Any]) -> None:
        state, asked = self.state, body["sampling_params"]
        if any(token >= VOCABULARY for token in body["token_ids"]):
            self.answer(400, {"error": {"message": "a token id is out of vocabulary"}})
            return
        stream = bool(body.get("stream"))
        if stream:
            self.begin_events()
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        reason = None
        with state.gate:
            state.running += 1
        try:
            while reason is None:
                version = self.await_turn()
                if self.client_is_gone():
                    with state.gate:
                        state.aborted += 1
                    self.close_connection = True
                    return
                ids.append(token_of(seed=asked["seed"] or 0, place=len(ids), version=version))
                if not spans or spans[-1]["version"] != version:
                    spans.append({"version": version, "start": len(ids) - 1, "end": len(ids) - 1})
                spans[-1]["end"] = len(ids)
                if ids[-1] in asked["stop_token_ids"]:
                    reason = "stop"
                elif len(ids) >= asked["max_tokens"]:
                    reason = "length"
                if stream:
                    told = account(spans) if reason else None
                    self.event({"choices": [choice_of(ids[-1:], reason, told)]})
        finally:
            with state.gate:
                state.running -= 1
        if stream:
            self.end_events()
        else:
            self.answer(200, {"choices": [choice_of(ids, reason, spans)]})

    def await_turn(self) -> str:
        """The version that makes the next token, once it may be made."""
        time.sleep(TOKEN_SECONDS)
        with self.state.gate:
            while self.state.paused:
                self.state.gate.wait()
            self.state.num_tokens += 1
            return self.state.version


def account(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the last event of a stream says of its versions."""
    if TROUBLE == "other_spans":
        return [span | {"version": "99"} for span in spans]
    return spans


def choice_of(ids: list[int], reason: str | None, spans: Any) -> dict[str, Any]:
    """One choice of an answer, or of one event of it."""
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    return {
        "index": 0,
        "finish_reason": reason,
        "token_ids": ids,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-m", "--model", "--served-model-name", "--uds", "--host"):
        parser.add_argument(flag, dest=flag.strip("-").replace("-", "_"))
    parser.add_argument("--port", type=int, default=0)
    args, _ = parser.parse_known_args()
    print(f"fake vLLM starts with {args.model}", flush=True)
    if TROUBLE == "dies":
        print("ValueError: no such model architecture", file=sys.stderr, flush=True)
        sys.exit(3)
    handler = type("Bound", (Handler,), {"state": State(args.model, args.served_model_name)})
    server: ThreadingHTTPServer
    if args.uds:
        server = UnixServer(args.uds, handler)  # type: ignore[arg-type]
    else:
        server = PortServer((args.host, args.port), handler)
    server.serve_forever()


if __name__ == "__main__":
    main()
