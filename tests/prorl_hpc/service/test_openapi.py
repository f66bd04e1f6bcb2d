"""Requests made up from the OpenAPI document never break the server, and answers keep to it.

schemathesis makes requests that fit the document and requests that don't, from a fixed seed,
against a real server. `/stop` is left out: after it v1's own 503 is the right answer to `/process`.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.prorl_hpc.service.conftest import serving

NUM_EXAMPLES = 15
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service in a thread of its own: schemathesis blocks."""
    found: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(tmp_path_factory.mktemp("service"), over_tcp=True) as service:
            await service.client.post("/start")
            found.append(service.url)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    done.set()
    thread.join(60)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_breaks_the_server(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/stop":
            continue
        strategy: Any = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=NUM_EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: Any) -> None:
            if "wait_seconds" in (case.query or {}):
                case.query["wait_seconds"] = 0.0  # the test mustn't wait for jobs
            case.call_and_validate(checks=CHECKS, timeout=120)

        try:
            check()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, operation.label  # any text is a job's id
        else:
            tried.append(operation.label)
    assert len(tried) >= 6, tried
