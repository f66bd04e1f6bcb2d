"""The learner's loop against a fake buffer, as its tests start it."""

from collections.abc import Callable

from prorl_hpc.learner import session
from prorl_hpc.policy import read_manifest
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

from .conftest import VOCABULARY

Stop = Callable[[], str | None]


def client(**settings: object) -> FakeClient:
    return FakeClient(vocabulary=VOCABULARY, **settings)  # type: ignore[arg-type]


def go(run: Run, fake: FakeClient, *, stop: Stop = lambda: None) -> str:
    return session.train(
        run, connect=lambda patience_seconds: fake, read=fake.read, stop_reason=stop
    )


def after(num_calls: int) -> Stop:
    """Asks to stop once it was asked so many times."""
    left = iter(range(num_calls))
    return lambda: None if next(left, None) is not None else "the walltime is near"


def weights_hash(run: Run, version: int) -> str:
    return read_manifest(run.policy(version)).files["model.safetensors"]


def told(fake: FakeClient, name: str) -> list[object]:
    return [value for call, value in fake.calls if call == name]
