"""The start gate: places of a node over several workers, and an image's first start alone."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.environment.gate import StartGate

PATIENCE_SECONDS = 120.0


def run(main: object) -> None:
    asyncio.run(asyncio.wait_for(main, PATIENCE_SECONDS))  # type: ignore[arg-type]


async def entered(task: "asyncio.Task[None]", begun: asyncio.Event) -> bool:
    """Whether it gets in while others hold on; many turns of the loop, no clock."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done() or begun.is_set()
    return begun.is_set()


class Starter:
    """One start that goes on until told."""

    def __init__(self, gate: StartGate, image: Path | None) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._start(gate, image))

    async def _start(self, gate: StartGate, image: Path | None) -> None:
        async with gate.start(image):
            self.begun.set()
            await self.go_on.wait()

    async def is_in(self) -> bool:
        return await entered(self.task, self.begun)

    async def end(self) -> None:
        self.go_on.set()
        await self.task


def test_workers_of_a_node_share_its_places(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = (StartGate(tmp_path, num_places=2) for _ in range(2))
        first, second, third = (Starter(gate, None) for gate in (one, two, two))
        assert await first.is_in()
        assert await second.is_in()
        assert not await third.is_in()
        elsewhere = Starter(StartGate(tmp_path / "other", num_places=1), None)
        assert await elsewhere.is_in()
        await first.end()
        await third.begun.wait()
        for starter in (second, third, elsewhere):
            await starter.end()

    run(main())


def test_the_first_start_of_an_image_goes_alone(tmp_path: Path) -> None:
    async def main() -> None:
        gate = StartGate(tmp_path, num_places=8)
        first, second, other = (Starter(gate, Path(name)) for name in ("a", "a", "b"))
        assert await first.is_in()
        assert await other.is_in()
        assert not await second.is_in()
        await first.end()
        await second.begun.wait()
        third = Starter(gate, Path("a"))
        assert await third.is_in(), "known by now"
        for starter in (second, third, other):
            await starter.end()

    run(main())


def test_a_first_start_that_fails_leaves_the_image_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        gate = StartGate(tmp_path, num_places=8)
        with pytest.raises(ZeroDivisionError):
            async with gate.start(Path("a")):
                raise ZeroDivisionError
        first, second = (Starter(gate, Path("a")) for _ in range(2))
        assert await first.is_in()
        assert not await second.is_in()
        for starter in (first, second):
            await starter.end()

    run(main())


@pytest.mark.process
def test_a_dead_workers_place_is_free(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from prorl_hpc.environment.gate import StartGate\n"
        "async def main():\n"
        "    async with StartGate(Path(sys.argv[1]), num_places=1).start(None):\n"
        "        print('in', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).resolve().parents[3]
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"

        async def main() -> None:
            waiting = Starter(StartGate(tmp_path, num_places=1), None)
            assert not await waiting.is_in()
            other.kill()
            await waiting.begun.wait()
            await waiting.end()

        run(main())


def test_no_place_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_concurrent_starts=0"):
        StartGate(tmp_path, num_places=0)
