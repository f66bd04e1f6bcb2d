"""Reads a policy version from disk into a running vLLM. Runs inside vLLM's own interpreter.

Knows vLLM's weight-transfer interface and safetensors; nothing of prorl_hpc, which needn't be
installed there: the module is copied beside an entry point and found through PYTHONPATH. The
caller has checked the files against their manifest before an update starts, because a file that
turns out damaged halfway would end vLLM's engine process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "prorl_disk"


def register() -> None:
    """Entry point of group `vllm.general_plugins`: called once in each of vLLM's processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "DiskWeightTransfer")


def __getattr__(name: str) -> Any:
    """The engine's class, made when vLLM asks for it: importing this module imports no vLLM."""
    if name != "DiskWeightTransfer":
        raise AttributeError(name)
    return _engine_class()


def _engine_class() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    @dataclass
    class InitInfo:
        """Nothing to agree upon."""

    @dataclass
    class UpdateInfo:
        path: str
        """Directory of safetensors files that every worker can read."""

    class DiskWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
        """Loads a checkpoint in place, layer by layer, between two steps of the engine."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Nothing to open."""

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.model.load_weights(_tensors(Path(update_info.path)))

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied(self.model)

        def shutdown(self) -> None:
            """Nothing to close."""

    return DiskWeightTransfer


def repack_tied(model: Any) -> int:
    """Packs the embeddings again that also serve as output layer; returns how many.

    On CPUs vLLM keeps a packed copy of each matrix and drops the matrix itself, except where it
    is an embedding too; a reload fills the matrix and leaves that packed copy as it was.
    """
    stale = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear")
        and getattr(module, "weight", None) is not None
        and module.weight.numel() > 0
    ]
    if stale:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in stale:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    return len(stale)


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Name and tensor of everything in the directory's files, one at a time."""
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                yield name, opened.get_tensor(name)
