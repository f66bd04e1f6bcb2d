"""vLLM servers of this node as one engine. Knows vLLM's command line; imports no vLLM.

vLLM lives in an environment of its own (`rollout.engine.python`) or in an image
(`rollout.engine.image`); a plugin of ours is shown to it through PYTHONPATH.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.inference import vllm_plugin
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
from prorl_hpc.inference.server import VllmServer
from prorl_hpc.inference.supervise import Launch
from prorl_hpc.recipe import Recipe

PLUGIN_MODULE = "prorl_vllm_plugin"
OUR_FLAGS = (
    "--model", "--served-model-name", "--uds", "--host", "--port", "--enable-scale-out",
    "--logprobs-mode", "--generation-config", "--override-generation-config",
    "--weight-transfer-config",
)  # fmt: skip
"""What a recipe's own arguments mustn't change: addresses, and what log-probabilities mean."""

CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""A seeded request whose prompt is read in parts, be it at an update, ends vLLM 0.32's engine on
CPUs: it winds the request's random generator back, which CPU generators can't."""

MIN_CPU_HEAD_SIZE = 32
"""vLLM's CPU attention crashes at the first request below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmOptions:
    """What a recipe says of its vLLM servers."""

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


class VllmEngine(FleetEngine):
    """vLLM servers with our weight transfer, each on a private Unix socket."""

    def __init__(self, options: VllmOptions, *, path: Path, version: int) -> None:
        super().__init__(
            path=path,
            version=version,
            num_servers=options.num_servers,
            start_seconds=options.start_seconds,
            log_directory=options.log_directory,
        )
        self._options = options

    def prepare(self, path: Path) -> None:
        if self._options.num_gpus == 0:
            check_head_size(path)
        write_plugin(self.directory / "plugin")

    def launch(self, *, slot: int, address: str, identity: str, path: Path) -> Launch:
        plugin = self.directory / "plugin"
        return Launch(
            command=vllm_command(
                self._options, path=path, address=address, identity=identity, plugin=plugin
            ),
            environment=vllm_environment(self._options, slot=slot, plugin=plugin, base=os.environ),
            address=address,
            identity=identity,
        )

    async def connect(self, launch: Launch, version: int) -> VllmServer:
        """A server that is well, is the one that was started, and has answered once."""
        server = VllmServer(
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


def make_vllm(recipe: Recipe, *, path: Path, version: int) -> VllmEngine:
    """The engine of a recipe. Raises RecipeError for an interpreter that doesn't exist."""
    engine, rollout = recipe.rollout.engine, recipe.rollout
    check_interpreter(recipe, holds="vLLM")
    check_arguments(recipe, ours=OUR_FLAGS)
    logs = os.environ.get("PRORL_LOGS")
    options = VllmOptions(
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
        log_directory=Path(logs) / "vllm" if logs else None,
    )
    return VllmEngine(options, path=path.resolve(), version=version)


def vllm_command(
    options: VllmOptions, *, path: Path, address: str, identity: str, plugin: Path
) -> tuple[str, ...]:
    """The command line of one server; the recipe's own arguments come last."""
    command: tuple[str, ...] = (
        options.python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(path),
        "--served-model-name", identity,
        *_listen(address),
        "--max-model-len", str(options.context_tokens),
        "--max-num-seqs", str(options.max_batch),
        "--dtype", options.dtype,
        "--tensor-parallel-size", str(options.tensor_parallel),
        "--enable-scale-out",
        # Log-probabilities of the distribution that was drawn from, temperature included.
        "--logprobs-mode", "processed_logprobs",
        # The model's generation_config.json must not change how tokens are drawn.
        "--generation-config", "vllm",
        "--weight-transfer-config", json.dumps({"backend": vllm_plugin.BACKEND}),
        *(CPU_FLAGS if options.num_gpus == 0 else ()),
        *options.arguments,
    )  # fmt: skip
    return in_image(
        command,
        image=options.image,
        binds=(path.parent, plugin),
        address=address,
        has_gpus=options.num_gpus > 0,
    )


def vllm_environment(
    options: VllmOptions, *, slot: int, plugin: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """The job's environment with what a server needs; each server has GPUs of its own."""
    environment = serving_environment(base) | {
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(plugin),
    }
    if options.num_gpus == 0:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        return environment
    return environment | devices_of(
        slot,
        num_servers=options.num_servers,
        tensor_parallel=options.tensor_parallel,
        num_gpus=options.num_gpus,
        base=base,
    )


def write_plugin(directory: Path) -> None:
    """A directory for PYTHONPATH in which vLLM finds our weight transfer as an installed plugin."""
    info = directory / f"{PLUGIN_MODULE}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copy(vllm_plugin.__file__, directory / f"{PLUGIN_MODULE}.py")
    name = PLUGIN_MODULE.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{vllm_plugin.BACKEND} = {PLUGIN_MODULE}:register\n"
    )


def check_head_size(path: Path) -> None:
    """Raises EngineError for a model that vLLM's CPU build would crash on."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as err:
        raise EngineError(f"model {path} can't be read: {err}") from err
    heads = config.get("num_attention_heads") or 1
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if 0 < size < MIN_CPU_HEAD_SIZE:
        raise EngineError(
            f"model {path} has heads of size {size}; vLLM on CPU needs at least "
            f"{MIN_CPU_HEAD_SIZE}: use rollout.engine.kind=transformers or a wider model"
        )


def _listen(address: str) -> tuple[str, ...]:
    if address.startswith("unix:"):
        return ("--uds", address.removeprefix("unix:"))
    host, _, port = address.removeprefix("http://").rpartition(":")
    return ("--host", host, "--port", port)
