"""The policy network: built, sharded, loaded, gathered. Knows transformers and FSDP2; no data.

Shapes: T packed tokens of a micro-batch, M of them predicted, D hidden size.

    directory (safetensors) --load--> network (+ adapters) --wrap--> PolicyModel --shard--> ranks
                                                                          |
                               gather (and merge), one tensor at a time, on rank 0 (publish, export)

Master weights, gradients and optimizer state are float32; `bfloat16` only changes what the layers
compute in, and what a base that only its adapters change is kept in. The LM head runs inside the
root module's forward, where its weight is whole.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc.errors import UserError
from prorl_hpc.learner import attention, lora
from prorl_hpc.learner.attention import DocumentLayout
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.lm_head import TokenLogprobs, token_logprobs
from prorl_hpc.learner.weights import open_weights
from prorl_hpc.recipe import LoraConfig, ModelConfig

PREFIX = "network."
"""What `PolicyModel` puts before the names of the network's parameters."""


class ModelError(UserError, ValueError):
    """A model that can't be built or loaded; the message names the path and the remedy."""


class PolicyModel(nn.Module):
    """Log-probabilities of chosen tokens of a packed micro-batch."""

    def __init__(
        self,
        network: nn.Module,
        *,
        dtype: torch.dtype,
        chunk_tokens: int,
        adapters: LoraConfig | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.adapters = adapters
        """How the network is adapted; None when all weights are trained."""
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens
        self.autocasts = dtype != torch.float32
        """Off once FSDP's own mixed precision is used."""

    def forward(
        self,
        tokens_T: Tensor,
        layout: DocumentLayout,
        predictors_M: Tensor,
        targets_M: Tensor,
        temperatures_M: Tensor,
        with_entropy: bool = False,
    ) -> TokenLogprobs:
        """Log-probability of `targets_M` after the tokens at `predictors_M`, and the entropy."""
        network: Any = self.network
        with self._precision(tokens_T.device):
            output = network.base_model(
                input_ids=tokens_T[None],
                position_ids=layout.position_ids,
                use_cache=False,
            )
        hidden_MD = output.last_hidden_state[0][predictors_M].to(self.dtype)
        return token_logprobs(
            hidden_MD,
            network.get_output_embeddings().weight,
            targets_M,
            temperature=temperatures_M,
            with_entropy=with_entropy,
            chunk_tokens=self.chunk_tokens,
        )

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if not self.autocasts:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by the network's own names; a tied head appears once."""
        for name, parameter in self._parameters_by_name():
            if parameter.requires_grad:
                yield name, parameter

    def named_stored(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """What model files hold: their name, the network's name, the parameter."""
        for name, parameter in self._parameters_by_name():
            stored = lora.stored_name(name)
            if stored is not None:
                yield stored, name, parameter

    def _parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield name.removeprefix(PREFIX), parameter


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """`model.dtype` as torch's type; raises ModelError for another."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.dtype not in known:
        raise ModelError(f"model.dtype={config.dtype!r} is unknown; choose float32 or bfloat16")
    return known[config.dtype]


def build_policy(
    directory: Path, config: ModelConfig, *, ranks: Ranks, chunk_tokens: int
) -> PolicyModel:
    """The policy of `directory` on this rank's device, sharded when there are several ranks."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    attention.register()
    try:
        settings = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as err:
        raise ModelError(f"model {directory} has no usable config.json: {err}") from err
    # Dropout would make the ratio of new to old log-probabilities differ from 1 at no update.
    settings.attention_dropout = 0.0
    # Shapes alone: a node's ranks together would fill its memory with whole models.
    with init_empty_weights(include_buffers=False), no_init_weights():
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings,
            dtype=torch.float32,
            attn_implementation=attention.choose(config.attention, device=ranks.device.type),
        )
    network.tie_weights()
    # Where padding and the end of a turn are one token, its embedding must learn like any other.
    network.get_input_embeddings().padding_idx = None
    if config.activation_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    dtype = compute_dtype(config)
    adapters = config.lora if config.lora.rank > 0 else None
    if adapters is not None:
        lora.attach(network, adapters, base_dtype=dtype)
    model = PolicyModel(network, dtype=dtype, chunk_tokens=chunk_tokens, adapters=adapters)
    model.train()
    if ranks.world > 1:
        _shard(model, ranks=ranks)
    else:
        _give_memory(model, ranks.device)
    model.to(ranks.device)
    load_weights(model, directory)
    return model


def decoder_layers(network: Any) -> list[nn.Module]:
    """The repeated blocks of a decoder; raises ModelError for another architecture."""
    layers = getattr(network.base_model, "layers", None)
    if layers is None:
        raise ModelError(
            f"model type {network.config.model_type!r} has no decoder layers that can be sharded; "
            "use a Qwen2, Qwen3 or Llama type of model"
        )
    return list(layers)


def _shard(model: PolicyModel, *, ranks: Ranks) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = ranks.mesh()
    low = model.dtype if model.dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(model.network):
        # One layer is whole at a time: what others hold are shards, or shapes.
        _give_memory(layer, ranks.device)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    _give_memory(model, ranks.device)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.autocasts = False


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that are shapes alone; one that two layers share stays one."""
    given: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in given:
                    empty = torch.empty_like(parameter, device=device)
                    given[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                part.register_parameter(name, given[parameter])


def load_weights(model: PolicyModel, directory: Path) -> None:
    """Copies a directory's weights into the (sharded) parameters, one tensor at a time.

    Adapters start anew: the policy is the directory's.
    """
    stored = open_weights(directory)
    with torch.no_grad():
        for name, _, parameter in model.named_stored():
            if name not in stored:
                raise ModelError(f"model {directory} lacks {name!r}; its config doesn't match it")
            full = stored.get(name)
            if full.shape != parameter.shape:
                raise ModelError(
                    f"model {directory}: {name!r} has shape {tuple(full.shape)}, its config says "
                    f"{tuple(parameter.shape)}"
                )
            copy_full(parameter, full)
        if model.adapters is not None:
            for name, parameter in model.named_weights():
                copy_full(parameter, lora.start_value(name, parameter.shape))
    reshard(model)


def copy_full(parameter: Tensor, full: Tensor) -> None:
    """Fills a plain or sharded tensor from a full one that every rank has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = full.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter (the parameter itself with one rank)."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: PolicyModel) -> None:
    """Drops gathered copies of the root's parameters, so that changed shards are seen."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def copy_to_memory(tensor: Tensor, *, ranks: Ranks) -> Tensor:
    """A copy in main memory, sharded as the tensor is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return DTensor.from_local(
        tensor.to_local().detach().to("cpu", copy=True),
        ranks.memory,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def gather_weights(model: PolicyModel, *, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """All weights on the CPU of rank 0, by name; other ranks take part and get nothing.

    Adapters are merged: these are the weights of a model without any.
    """
    weights: dict[str, Tensor] = {}
    trained = dict(model.named_weights())
    for stored, name, parameter in model.named_stored():
        value = _whole(parameter)
        factors = lora.factor_names(name)
        if model.adapters is not None and factors is not None and factors[0] in trained:
            a, b = (_whole(trained[factor]) for factor in factors)
            if ranks.is_first:
                value = lora.merge(value, a, b, config=model.adapters)
        if ranks.is_first:
            weights[stored] = value.to("cpu", dtype, copy=True)
    return weights


def gather_adapter(model: PolicyModel, *, ranks: Ranks) -> lora.Adapter | None:
    """The adapter alone, on the CPU of rank 0; None without one, and on other ranks."""
    if model.adapters is None:
        return None
    factors = {}
    for name, parameter in model.named_weights():
        value = _whole(parameter)
        if ranks.is_first:
            factors[name] = value.to("cpu", copy=True)
    return lora.Adapter(factors=factors, config=model.adapters) if ranks.is_first else None


def _whole(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
