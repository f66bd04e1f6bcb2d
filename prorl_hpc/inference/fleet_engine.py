"""An engine of servers that this process starts: a fleet of processes behind a pool.

What one server's command line is and how it is greeted is each engine's own (`vllm_engine`,
`sglang_engine`); what they have in common, GPUs and images included, is here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from hpc.scratch import OwnedDirectory
from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.server import Server
from prorl_hpc.inference.supervise import Fleet, Launch
from prorl_hpc.recipe import Recipe, RecipeError


class FleetEngine(ABC):
    """Starts servers, spreads requests over them, moves them to new versions in flight."""

    def __init__(
        self,
        *,
        path: Path,
        version: int,
        num_servers: int,
        start_seconds: float,
        log_directory: Path | None = None,
        use_ports: bool = False,
    ) -> None:
        self._owned: OwnedDirectory | None = OwnedDirectory.make("engine")
        self.directory = self._owned.path
        """Private, removed with the engine."""
        self.pool = HttpPool(
            version=version, path=path, lost=lambda server: self.fleet.lost(server)
        )
        self.fleet = Fleet(
            pool=self.pool,
            num_servers=num_servers,
            make_launch=self.launch,
            connect=self.connect,
            start_seconds=start_seconds,
            log_directory=log_directory or self.directory / "logs",
            use_ports=use_ports,
        )

    @abstractmethod
    def prepare(self, path: Path) -> None:
        """Checks the model and writes what servers need. Raises EngineError."""

    @abstractmethod
    def launch(self, *, slot: int, address: str, identity: str, path: Path) -> Launch:
        """How a server is started."""

    @abstractmethod
    async def connect(self, launch: Launch, version: int) -> Server:
        """A server that is well and ours. Raises EngineError while it isn't."""

    @property
    def version(self) -> int:
        return self.pool.version

    async def start(self) -> None:
        """Raises EngineError with a server's last words when none comes up."""
        assert self.pool.path is not None
        await asyncio.to_thread(self.prepare, self.pool.path)
        await self.pool.start()
        await self.fleet.start()

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        return await self.pool.generate(prompt_ids, sampling=sampling, affinity=affinity)

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        return self.pool.stream(prompt_ids, sampling=sampling, affinity=affinity)

    async def load(self, version: int, *, path: Path) -> None:
        await self.pool.load(version, path=path.resolve())

    async def close(self) -> None:
        await self.fleet.close()
        await self.pool.close()
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()


def check_interpreter(recipe: Recipe, *, holds: str) -> None:
    """Raises RecipeError for an interpreter that doesn't exist."""
    engine = recipe.rollout.engine
    if engine.python is not None and engine.image is None and not Path(engine.python).is_file():
        raise RecipeError(
            f"rollout.engine.python={engine.python!r} doesn't exist; name the interpreter of the "
            f"environment that holds {holds}"
        )


def check_arguments(recipe: Recipe, *, ours: Sequence[str]) -> None:
    """Raises RecipeError for an argument that would change what we rely on."""
    for argument in recipe.rollout.engine.arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in ours:
            raise RecipeError(
                f"rollout.engine.arguments holds {argument!r}, which prorl-hpc sets itself; "
                "take it out"
            )


def serving_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The job's environment without what would lead a server astray."""
    # A launcher's rank variables would make a server join the learner's or a step's process group.
    dropped = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONHOME")
    environment = {name: value for name, value in base.items() if name not in dropped}
    return environment | {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}


def devices_of(
    slot: int, *, num_servers: int, tensor_parallel: int, num_gpus: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The GPUs of one server as a variable. Raises EngineError when the node has too few."""
    visible = base.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(n) for n in range(num_gpus)]
    mine = devices[slot * tensor_parallel : (slot + 1) * tensor_parallel]
    if len(mine) < tensor_parallel:
        raise EngineError(
            f"server {slot} of {num_servers} with tensor_parallel={tensor_parallel} needs more "
            f"than the {len(devices)} GPUs of this node; lower rollout.engine.servers_per_node"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def in_image(
    command: tuple[str, ...],
    *,
    image: str | None,
    binds: Sequence[Path],
    address: str,
    has_gpus: bool,
) -> tuple[str, ...]:
    """The command, run in an image if there is one; a socket's directory is bound too."""
    if image is None:
        return command
    places = [str(bind) for bind in binds]
    if address.startswith("unix:"):
        places.append(str(Path(address.removeprefix("unix:")).parent))
    bound = [part for place in places for part in ("--bind", place)]
    gpu = ("--nv",) if has_gpus else ()
    return ("apptainer", "exec", *gpu, "--no-home", *bound, image, *command)
