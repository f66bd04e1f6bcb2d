"""A NeMo Gym resources server: sessions by cookie, a counter with tools, /verify in Gym's form.

Follows the packaged `nemo-gym` (base resources server, session-state example): the real ones need a
newer Python and Ray, so test_gym_real.py runs them only where an interpreter with them is given.
"""

import secrets
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

Verify = Callable[[dict[str, Any], "GymServer"], Any]


class GymServer:
    """What the test looks into, and the application."""

    def __init__(self, verify: Verify | None = None) -> None:
        self.counters: dict[str, int] = {}
        self.seen: list[tuple[str, Any]] = []
        """(path, body) in the order they came."""
        self.statuses: list[int] = []
        """Answered first, instead of what the routes say."""
        self._verify = verify or by_counter
        self.app = FastAPI()
        for path in ("seed_session", "increment_counter", "get_counter_value", "verify"):
            self.app.add_api_route(f"/{path}", self._route(path), methods=["POST"])

    def _route(self, path: str) -> Any:
        async def answer(request: Request) -> Response:
            body = await request.json()
            self.seen.append((path, body))
            if self.statuses:
                return JSONResponse({"detail": "not now"}, status_code=self.statuses.pop(0))
            session = request.cookies.get("session")
            if path == "seed_session":
                session = secrets.token_hex(4)
                self.counters[session] = int(body.get("initial_count", 0))
            elif session not in self.counters:
                return JSONResponse({"detail": "no session"}, status_code=404)
            response = self._answer(path, body, str(session))
            response.set_cookie("session", str(session))
            return response

        return answer

    def _answer(self, path: str, body: Any, session: str) -> Response:
        if path == "increment_counter":
            if not isinstance(body.get("count"), int):
                return JSONResponse({"detail": "count must be an integer"}, status_code=422)
            self.counters[session] += body["count"]
            return JSONResponse({"success": True})
        if path == "get_counter_value":
            return JSONResponse({"count": self.counters[session]})
        if path == "verify":
            answer = self._verify(body | {"counter": self.counters[session]}, self)
            return answer if isinstance(answer, Response) else JSONResponse(body | answer)
        return JSONResponse({})


def by_counter(body: dict[str, Any], _: GymServer) -> dict[str, Any]:
    """Right when the session's counter ended where the row says."""
    return {"reward": float(body["expected_count"] == body["counter"])}


def by_text(body: dict[str, Any], _: GymServer) -> dict[str, Any]:
    """Right when the message holds the expected answer; with components."""
    text = "".join(
        part["text"]
        for item in body["response"]["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    right = float(body["expected_answer"] in text)
    return {"reward": right, "reward_components": {"correct": right, "length": float(len(text))}}
