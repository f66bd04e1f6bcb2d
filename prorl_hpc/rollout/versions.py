"""Which policy version the engine serves, when some rollouts are bound to one. Knows no tokens.

One engine holds one version. Rollouts that are bound to a version (validation, deterministic
training) run while the engine holds exactly that; the others run at any time and are stamped with
whatever made each token. A newer version is loaded at once, unless bound rollouts still need the
present one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_hpc.inference.engine import Engine, EngineError
from prorl_hpc.run import Run

PUBLISH_SECONDS = 60.0
"""Longest wait for a version's directory to be seen on a shared file system."""

RETRY_SECONDS = 5.0
"""Pause before a newest version that couldn't be loaded is tried again."""


class Versions:
    """The engine's version, and who waits for which."""

    def __init__(
        self, engine: Engine, *, run: Run, publish_seconds: float = PUBLISH_SECONDS
    ) -> None:
        self._engine = engine
        self._run = run
        self._publish_seconds = publish_seconds
        self._condition = asyncio.Condition()
        self._bound: Counter[int] = Counter()
        self._active: Counter[int] = Counter()
        self._newest = engine.version
        self._changed = asyncio.Event()
        self.last_error = ""
        """Why the newest version isn't served; empty when it is."""

    @property
    def version(self) -> int:
        """What new tokens are sampled from."""
        return self._engine.version

    def offer(self, version: int) -> None:
        """A version was published."""
        if version > self._newest:
            self._newest = version
            self._changed.set()

    def bind(self, version: int | None) -> None:
        """A rollout that needs `version` was taken on; `unbind` when it is done with sampling."""
        if version is not None:
            self._bound[version] += 1

    def unbind(self, version: int | None) -> None:
        if version is not None:
            self._bound[version] -= 1
            self._bound += Counter()  # drops zeros
            self._changed.set()

    @asynccontextmanager
    async def held(self, version: int | None) -> AsyncIterator[None]:
        """While inside, the engine stays at `version`. Raises EngineError if it can't be loaded."""
        if version is None:
            yield
            return
        async with self._condition:
            await self._condition.wait_for(lambda: self._may_start(version))
            if self._engine.version != version:
                await self._load(version)
            self._active[version] += 1
        try:
            yield
        finally:
            await asyncio.shield(self._release(version))

    async def follow(self) -> None:
        """Loads the newest version whenever no bound rollout forbids it. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._condition:
                self._condition.notify_all()
                if self._bound or self._engine.version >= self._newest:
                    continue
                try:
                    await self._load(self._newest)
                    self.last_error = ""
                except EngineError as err:
                    self.last_error = str(err)
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed.set)

    def _may_start(self, version: int) -> bool:
        if self._active.total():
            return self._active[version] > 0
        return version == min(self._bound, default=version)

    async def _release(self, version: int) -> None:
        async with self._condition:
            self._active[version] -= 1
            self._active += Counter()
            self._condition.notify_all()

    async def _load(self, version: int) -> None:
        path = self._run.policy(version)
        deadline = time.monotonic() + self._publish_seconds
        while not path.is_dir():
            if time.monotonic() >= deadline:
                raise EngineError(f"policy version {version} isn't there: {path}")
            await asyncio.sleep(0.2)
        await self._engine.load(version, path=path)
