"""SGLang servers of this node as one engine. Knows SGLang's command line; imports no SGLang.

SGLang lives in an environment of its own (`rollout.engine.python`) or in an image
(`rollout.engine.image`). It listens on a port of 127.0.0.1: it knows no Unix sockets.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.inference.engine import EngineError, Sampling
from prorl_hpc.inference.fleet_engine import (
    FleetEngine,
    check_arguments,
    check_interpreter,
    devices_of,
    in_image,
    serving_environment,
)
from prorl_hpc.inference.http import ServerGone
from prorl_hpc.inference.sglang_server import SglangServer
from prorl_hpc.inference.supervise import Launch
from prorl_hpc.recipe import Recipe

OUR_FLAGS = (
    "--model-path", "--model", "--served-model-name", "--host", "--port", "--sampling-defaults",
    "--stream-output", "--incremental-streaming-output", "--skip-tokenizer-init", "--api-key",
)  # fmt: skip
"""What a recipe's own arguments mustn't change."""

RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""With this variable set, SGLang gives log-probabilities without the temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangOptions:
    """What a recipe says of its SGLang servers."""

    num_servers: int
    python: str
    context_tokens: int
    dtype: str
    max_batch: int
    image: str | None = None
    tensor_parallel: int = 1
    num_gpus: int = 0
    arguments: tuple[str, ...] = ()
    start_seconds: float = 600.0
    request_seconds: float = 1800.0
    log_directory: Path | None = None


class SglangEngine(FleetEngine):
    """SGLang servers, each on a port of its own."""

    def __init__(self, options: SglangOptions, *, path: Path, version: int) -> None:
        super().__init__(
            path=path,
            version=version,
            num_servers=options.num_servers,
            start_seconds=options.start_seconds,
            log_directory=options.log_directory,
            use_ports=True,
        )
        self._options = options

    def prepare(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise EngineError(f"model {path} has no config.json")

    def launch(self, *, slot: int, address: str, identity: str, path: Path) -> Launch:
        return Launch(
            command=sglang_command(self._options, path=path, address=address, identity=identity),
            environment=sglang_environment(self._options, slot=slot, base=os.environ),
            address=address,
            identity=identity,
        )

    async def connect(self, launch: Launch, version: int) -> SglangServer:
        """A server that is well, is the one that was started, and has answered once."""
        server = SglangServer(
            launch.address, version=version, request_seconds=self._options.request_seconds
        )
        try:
            await server.check()
            found = await server.identity()
            if found != launch.identity:
                raise ServerGone(f"{launch.address} is somebody else's server ({found})")
            await server.prepare()
            await server.generate((0,), sampling=Sampling(temperature=1.0, max_new_tokens=1))
        except BaseException:
            await server.close()
            raise
        return server


def make_sglang(recipe: Recipe, *, path: Path, version: int) -> SglangEngine:
    """The engine of a recipe. Raises RecipeError for an interpreter that doesn't exist."""
    engine, rollout = recipe.rollout.engine, recipe.rollout
    check_interpreter(recipe, holds="SGLang")
    check_arguments(recipe, ours=OUR_FLAGS)
    logs = os.environ.get("PRORL_LOGS")
    options = SglangOptions(
        num_servers=engine.servers_per_node,
        python=engine.python or ("python3" if engine.image else sys.executable),
        image=engine.image,
        context_tokens=recipe.model.context_tokens,
        dtype=recipe.model.dtype,
        max_batch=engine.max_batch,
        tensor_parallel=engine.tensor_parallel,
        num_gpus=rollout.gpus_per_node,
        arguments=tuple(engine.arguments),
        start_seconds=engine.start_seconds,
        request_seconds=engine.request_seconds,
        log_directory=Path(logs) / "sglang" if logs else None,
    )
    return SglangEngine(options, path=path.resolve(), version=version)


def sglang_command(
    options: SglangOptions, *, path: Path, address: str, identity: str
) -> tuple[str, ...]:
    """The command line of one server; the recipe's own arguments come last."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    command: tuple[str, ...] = (
        options.python, "-m", "sglang.launch_server",
        "--model-path", str(path),
        "--served-model-name", identity,
        "--host", host,
        "--port", port,
        "--context-length", str(options.context_tokens),
        "--max-running-requests", str(options.max_batch),
        "--dtype", options.dtype,
        "--tp-size", str(options.tensor_parallel),
        # The model's generation_config.json must not change how tokens are drawn.
        "--sampling-defaults", "openai",
        *(("--device", "cpu") if options.num_gpus == 0 else ()),
        *options.arguments,
    )  # fmt: skip
    return in_image(
        command,
        image=options.image,
        binds=(path.parent,),
        address=address,
        has_gpus=options.num_gpus > 0,
    )


def sglang_environment(
    options: SglangOptions, *, slot: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The job's environment with what a server needs; each server has GPUs of its own."""
    environment = serving_environment(base)
    environment.pop(RAW_LOGPROBS, None)
    environment.pop("PYTHONPATH", None)
    if options.num_gpus == 0:
        return environment
    return environment | devices_of(
        slot,
        num_servers=options.num_servers,
        tensor_parallel=options.tensor_parallel,
        num_gpus=options.num_gpus,
        base=base,
    )
