"""Makes environments for one worker: its scratch, its probe of the node, its start gate.

Knows what environments of one node share; knows nothing of what runs in them.
"""

from pathlib import Path

from hpc.container import Features, resolve
from hpc.container_probe import probe
from hpc.isolation import Isolation
from prorl_hpc.environment.base import EnvironmentSpec
from prorl_hpc.environment.gate import StartGate
from prorl_hpc.environment.scratch import WorkerScratch
from prorl_hpc.environment.shell import ShellEnvironment
from prorl_hpc.environment.tree import SharedSnapshot


class EnvironmentFactory:
    """One per worker process and event loop; `close` it when the worker ends."""

    def __init__(
        self, scratch_root: Path, *, max_concurrent_starts: int = 4,
        features: Features | None = None,
    ) -> None:  # fmt: skip
        """Cleans what dead workers left under `scratch_root` (node-local disk) and claims a part.

        Workers with the same root share its `max_concurrent_starts`. Raises SandboxStartError when
        the place can't be used.
        """
        self._features = features
        self._worker = WorkerScratch(scratch_root)
        self._snapshot = SharedSnapshot()
        self._gate = StartGate(scratch_root, num_places=max_concurrent_starts)

    @property
    def features(self) -> Features:
        """What works on this node; probed at the first question (blocking, under a second)."""
        if self._features is None:
            self._features = probe()
        return self._features

    def check(self, spec: EnvironmentSpec) -> Isolation:
        """The isolation that `spec` would get. Raises IsolationError with the admin's fix."""
        _, isolation = resolve(
            self.features, backend=spec.backend.value, accept_missing=spec.accept_missing
        )
        return isolation

    def create(self, spec: EnvironmentSpec) -> ShellEnvironment:
        """A new environment, not started: `async with factory.create(spec) as environment`."""
        return ShellEnvironment(
            spec, features=self.features, worker=self._worker, snapshot=self._snapshot,
            gate=self._gate,
        )  # fmt: skip

    def close(self) -> None:
        """Removes this worker's scratch; environments must be closed before."""
        self._worker.close()
