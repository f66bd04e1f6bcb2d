"""Low-rank adapters: put into a network, begun, merged, written. Knows peft; no ranks, no run.

    W' = W + (alpha / rank) B A      A: [rank, in], B: [out, rank]    (LoRA, arXiv 2106.09685)

A is drawn uniformly within +-1/sqrt(in), B is zero: the policy starts as its base, bit for bit.
There is no dropout: the ratio of new to old log-probabilities has to be 1 before an update.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc.errors import UserError
from prorl_hpc.learner.weights import write_tensors
from prorl_hpc.recipe import LoraConfig

ADAPTER = "default"
"""peft's name of the only adapter."""

DIRECTORY = "adapter"
"""Below a policy version: the adapter alone, as peft, vLLM and Unsloth load it."""

_BASE = ".base_layer."
_A, _B = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."


class LoraError(UserError, ValueError):
    """Adapters that can't be put into this network; the message names the key."""


def attach(network: nn.Module, config: LoraConfig, *, base_dtype: torch.dtype) -> None:
    """Puts adapters beside the targeted linear layers; everything else is frozen in `base_dtype`.

    Raises LoraError without peft, or for a target that no layer of the network has.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as err:
        raise LoraError(
            f"model.lora.rank={config.rank} needs peft; install prorl-hpc[lora], or set it to 0"
        ) from err
    network.requires_grad_(False)
    network.to(base_dtype)
    chosen = _targets(network, config)
    settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=chosen)  # type: ignore[arg-type]
    inject_adapter_in_model(settings, network, ADAPTER)
    for name, module in network.named_modules():
        if hasattr(module, "lora_A"):
            # Autocast and FSDP choose the compute type; peft's own cast would keep a copy more.
            module.cast_input_dtype_enabled = False
            if getattr(module, "bias", None) is not None and module.bias.requires_grad:
                raise LoraError(f"peft trains the bias of {name}; use another version of peft")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(stored_name(name) is None)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def _targets(network: nn.Module, config: LoraConfig) -> list[str]:
    """Last names of the layers to adapt: those asked for, or all linear ones but the head."""
    head = network.get_output_embeddings()  # type: ignore[operator]
    there = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
    )
    unknown = [name for name in config.targets if name not in there]
    if unknown:
        raise LoraError(
            f"model.lora.targets: {unknown[0]!r} is no linear layer of this model; it has "
            f"{', '.join(there)}"
        )
    return list(config.targets) or there


def stored_name(name: str) -> str | None:
    """A parameter's name in the model's own files; None for a part of an adapter."""
    if _A in name or _B in name:
        return None
    return name.replace(_BASE, ".")


def factor_names(name: str) -> tuple[str, str] | None:
    """Names of A and B beside an adapted weight; None for one that isn't adapted (a bias, say)."""
    if not name.endswith(f"{_BASE}weight"):
        return None
    return name.replace(_BASE, _A), name.replace(_BASE, _B)


def start_value(name: str, shape: torch.Size) -> Tensor:
    """Where a factor begins: the same for every number of ranks and every start of a run."""
    if _B in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merge(weight: Tensor, a_RI: Tensor, b_OR: Tensor, *, config: LoraConfig) -> Tensor:
    """The weight with its adapter added, in float32."""
    return torch.addmm(weight.float(), b_OR.float(), a_RI.float(), alpha=scale(config))


def scale(config: LoraConfig) -> float:
    """What the product of the factors is multiplied by."""
    return config.alpha / config.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter of a policy, gathered: what is needed to write it down."""

    factors: dict[str, Tensor]
    """By the network's names."""
    config: LoraConfig

    def write(self, directory: Path, *, base: Path) -> None:
        """`adapter_config.json` and `adapter_model.safetensors`; `base`: the model it adapts."""
        from peft import LoraConfig as PeftConfig

        directory.mkdir()
        targets = sorted(
            {name.split(_A)[0].rsplit(".", 1)[-1] for name in self.factors if _A in name}
        )
        settings: Any = PeftConfig(
            r=self.config.rank,
            lora_alpha=self.config.alpha,  # type: ignore[arg-type]
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(base),
            inference_mode=True,
        )
        settings.save_pretrained(directory)
        tensors = {
            f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous()
            for name, value in self.factors.items()
        }
        write_tensors(tensors, directory / "adapter_model.safetensors")
