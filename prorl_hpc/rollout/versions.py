"""Which policy version the engine serves, when some rollouts are bound to one. Knows no tokens.

One engine holds one version. Rollouts that are bound to a version (validation, deterministic
training) run while the engine holds exactly that; the others are stamped with whatever made each
token. A newer version is loaded at once, unless bound rollouts still need the present one. A
rollout that isn't bound starts after that load: leases are given out as soon as a version is
published, and what starts with the one before would be too old by the time it is trained.

A number alone does not name a version: a learner that crashed may train it again, with other
weights. What the engine holds is known by number and manifest digest, and is compared with what is
published.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prorl_hpc.inference.engine import Engine, EngineError
from prorl_hpc.policy import digest_at
from prorl_hpc.run import Run

PUBLISH_SECONDS = 60.0
"""Longest wait for a version's directory to be seen on a shared file system."""

RETRY_SECONDS = 5.0
"""Pause before a newest version that couldn't be loaded is tried again."""

CATCH_UP_SECONDS = 600.0
"""Longest that a rollout waits for the load of a version before it starts with the one before."""

LOOK_SECONDS = 5.0
"""At most so often the published manifest of the engine's own version is looked at again."""


class Versions:
    """The engine's version, and who waits for which."""

    def __init__(
        self,
        engine: Engine,
        *,
        run: Run,
        digest: str = "",
        publish_seconds: float = PUBLISH_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        catch_up_seconds: float = CATCH_UP_SECONDS,
    ) -> None:
        """`digest`: of the manifest that the engine was started from; empty if it had none."""
        self._engine = engine
        self._run = run
        self._digest = digest
        self._publish_seconds = publish_seconds
        self._look_seconds = look_seconds
        self._catch_up_seconds = catch_up_seconds
        self._condition = asyncio.Condition()
        self._bound: Counter[int] = Counter()
        self._active: Counter[int] = Counter()
        self._replaced = False
        """What is held was published again with other weights: those who use it end first."""
        self._newest = self._told = engine.version
        self._next_look = 0.0
        self._changed = asyncio.Event()
        self._looked = asyncio.Event()
        """Set, and replaced, whenever a rollout that waits for a load should look again."""
        self.last_error = ""
        """Why the newest version isn't served; empty when it is."""

    @property
    def version(self) -> int:
        """What new tokens are sampled from."""
        return self._engine.version

    def offer(self, version: int) -> None:
        """The newest published version, as the learner told it; it may be told again and again.

        A lower number than before is an answer that came late, or the truth: a learner resumed at
        an older step, and what it lost is gone from the disk.
        """
        now = time.monotonic()
        if version > self._newest or now >= self._next_look:
            self._newest = max(version, self._newest)
            self._told = version
            self._next_look = now + self._look_seconds
            self._changed.set()

    def bind(self, version: int | None) -> None:
        """A rollout that needs `version` was taken on; `unbind` when it is done with sampling."""
        if version is not None:
            self._bound[version] += 1
            self._look_again()

    def unbind(self, version: int | None) -> None:
        if version is not None:
            self._bound[version] -= 1
            self._bound += Counter()  # drops zeros
            self._changed.set()

    @asynccontextmanager
    async def held(self, version: int | None) -> AsyncIterator[None]:
        """While inside, the engine stays at `version`; None: it is entered once a load that is due
        is done, and later ones go on.

        Raises EngineError if it can't be loaded, and at the end if the number has been published
        again meanwhile: what was sampled belongs to weights that the run has lost.
        """
        if version is None:
            await self._catch_up()
            yield
            return
        async with self._condition:
            while True:
                await self._condition.wait_for(lambda: self._may_start(version))
                if await self._holds(version):
                    break
                if not self._active.total():
                    await self._load(version)
                    break
                self._replaced = True
            self._active[version] += 1
        try:
            yield
            if not await self._holds(version):
                raise EngineError(
                    f"policy version {version} was published again with other weights while this "
                    "rollout ran; it is to be sampled again"
                )
        finally:
            await asyncio.shield(self._release(version))

    async def _catch_up(self) -> None:
        """Waits while a newer version is to be loaded and nothing stands against it."""

        # Not by the condition: who gives up waiting for it must have its lock, and a load has it.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._catch_up_seconds):
                while self._behind():
                    await self._looked.wait()

    def _look_again(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

    def _behind(self) -> bool:
        return self._newest > self._engine.version and not self._bound and not self.last_error

    async def follow(self) -> None:
        """Loads what is published whenever no bound rollout forbids it. Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._condition:
                if not self._bound:
                    await self._load_newest()
                self._condition.notify_all()
            self._look_again()

    async def _load_newest(self) -> None:
        try:
            wanted = await self._wanted()
            if wanted is not None:
                await self._load(wanted)
            self.last_error = ""
        except EngineError as err:
            self.last_error = str(err)
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed.set)

    async def _wanted(self) -> int | None:
        """The version to load next; None while the engine holds the right one."""
        held = self._engine.version
        if self._told < self._newest and not self._run.policy(self._newest).is_dir():
            self._newest = self._told
        if self._newest > held:
            return self._newest
        if not await self._holds(held):
            return held
        lost = self._newest < held and not self._run.policy(held).is_dir()
        return self._newest if lost else None

    async def _holds(self, version: int) -> bool:
        """Whether the engine has what is published under this number, as far as that is known."""
        if self._engine.version != version:
            return False
        found = await asyncio.to_thread(digest_at, self._run.policy(version))
        return found in ("", self._digest)

    def _may_start(self, version: int) -> bool:
        if self._active.total():
            return self._active[version] > 0 and not self._replaced
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
        # Read before the weights: if the directory is replaced in between, the next look differs.
        digest = await asyncio.to_thread(digest_at, path)
        await self._engine.load(version, path=path)
        self._digest, self._replaced = digest, False
