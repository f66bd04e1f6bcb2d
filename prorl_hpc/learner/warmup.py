"""The policy that training starts from: loaded, or built and taught the format by demonstrations.

Rank 0 alone runs this, once per run; the result at `run.model_start` is what every rank, every
engine and every later attempt starts from. Knows tasks and tokenizers; no buffer.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.render import load_tokenizer
from prorl_hpc.learner.demonstrations import Demonstrations
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import ModelError, PolicyModel, build_policy, gather_weights
from prorl_hpc.learner.publish import copy_companions
from prorl_hpc.learner.record import Recorder, log
from prorl_hpc.learner.space import SpaceWait, full_disk
from prorl_hpc.learner.teach import Teacher
from prorl_hpc.learner.weights import save_weights
from prorl_hpc.policy import PolicyError, publish_directory, verify_policy
from prorl_hpc.recipe import LoraConfig, Recipe
from prorl_hpc.run import Run


def prepare_start(
    recipe: Recipe,
    run: Run,
    *,
    device: torch.device,
    stop_reason: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Makes `run.model_start` unless it is there already, whole.

    None, or why it was stopped in the middle of the warm-up: the next call goes on there.
    """
    try:
        verify_policy(run.model_start)
    except PolicyError:
        pass
    else:
        return None
    run.root.mkdir(parents=True, exist_ok=True)
    bare = run.model_start.with_name(".start.bare")
    shutil.rmtree(bare, ignore_errors=True)
    bare.mkdir()
    space = SpaceWait(
        limit_seconds=recipe.learner.batch_seconds,
        stopping=lambda: stop_reason() is not None,
        report=log,
    )

    def make() -> None:
        if recipe.model.path is None:
            build_from_scratch(recipe, bare)
        else:
            fetch_pretrained(recipe.model.path, bare)

    try:
        space.write("the model to start from", make)
        return _publish_taught(
            recipe, run, bare, device=device, space=space, stop_reason=stop_reason
        )
    finally:
        shutil.rmtree(bare, ignore_errors=True)


def build_from_scratch(recipe: Recipe, directory: Path) -> None:
    """A model with random weights from `model.config`, and its character tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not recipe.model.vocabulary:
        raise ModelError(
            "model.path and model.vocabulary are both empty; name a model, or give the characters "
            "of one from scratch"
        )
    tokenizer = build_character_tokenizer(recipe.model.vocabulary)
    settings = dict(recipe.model.config)
    kind = str(settings.pop("model_type", "qwen2"))
    settings |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    settings.setdefault("max_position_embeddings", recipe.model.context_tokens)
    try:
        config = AutoConfig.for_model(kind, **settings)  # type: ignore[no-untyped-call]
        torch.manual_seed(recipe.seed)
        network: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
    except (ValueError, TypeError, KeyError) as err:
        raise ModelError(f"model.config={recipe.model.config} can't be built: {err}") from err
    _save(network, directory)
    tokenizer.save_pretrained(directory)


def fetch_pretrained(path: str, directory: Path) -> None:
    """Copies a model by directory or hub name into `directory`, as safetensors.

    Raises ModelError, and OSError when the disk is full.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if Path(path, "tokenizer.json").is_file():
            copy_companions(Path(path), directory)
        else:
            AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    except (OSError, ValueError, KeyError) as err:
        if full_disk(err) is not None:
            raise
        reason = str(err).strip().splitlines()[0] if str(err).strip() else repr(err)
        raise ModelError(f"model.path={path!r} can't be loaded: {reason}") from err
    _save(network, directory)


def _save(network: Any, directory: Path) -> None:
    network.config.save_pretrained(directory)
    if getattr(network, "generation_config", None) is not None:
        network.generation_config.save_pretrained(directory)
    save_weights({name: p.detach().cpu() for name, p in network.named_parameters()}, directory)


def _publish_taught(
    recipe: Recipe,
    run: Run,
    bare: Path,
    *,
    device: torch.device,
    space: SpaceWait,
    stop_reason: Callable[[], str | None],
) -> str | None:
    ranks = Ranks(rank=0, world=1, device=device)
    # Demonstrations teach all weights: what they make is the base that adapters begin from.
    whole = replace(recipe.model, lora=LoraConfig())
    model = build_policy(bare, whole, ranks=ranks, chunk_tokens=4096)
    if recipe.warmup.steps > 0:
        stopped = _teach(recipe, run, bare, model, space=space, stop_reason=stop_reason)
        if stopped is not None:
            return stopped
    weights_now = gather_weights(model, dtype=model.dtype, ranks=ranks)

    def write(directory: Path) -> None:
        copy_companions(bare, directory)
        save_weights(weights_now, directory)

    space.write(
        "the starting policy",
        lambda: publish_directory(run.model_start, version=0, step=0, write=write),
    )
    run.warmup.unlink(missing_ok=True)
    return None


def _teach(
    recipe: Recipe,
    run: Run,
    bare: Path,
    model: PolicyModel,
    *,
    space: SpaceWait,
    stop_reason: Callable[[], str | None],
) -> str | None:
    """The warm-up, from where an earlier attempt has left it; None, or why it was stopped."""
    from prorl_hpc.tasks.registry import make_tasks

    tasks: dict[str, Any] = make_tasks(recipe)
    weights = {name: recipe.tasks[name].weight for name in tasks}
    examples = Demonstrations(
        tasks, weights, load_tokenizer(bare), seed=recipe.seed, longest=recipe.warmup.max_tokens
    )
    recorder = Recorder(run, space=space, tensorboard=False)
    try:
        teacher = Teacher(
            model=model,
            examples=examples,
            config=recipe.warmup,
            device=next(model.parameters()).device,
            path=run.warmup,
            fingerprint=_fingerprint(recipe),
            report=recorder.warmup,
        )
        teacher.go_on()
        return teacher.run(stop_reason=stop_reason)
    finally:
        recorder.close()


def _fingerprint(recipe: Recipe) -> str:
    """Of what the warm-up depends on."""
    parts = (recipe.warmup, recipe.model, recipe.tasks, recipe.seed)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
