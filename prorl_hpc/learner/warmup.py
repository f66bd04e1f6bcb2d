"""The policy that training starts from: loaded, or built and taught the format by demonstrations.

Rank 0 alone runs this, once per run; the result at `run.model_start` is what every rank, every
engine and every later attempt starts from. Knows tasks and tokenizers; no buffer.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.render import load_tokenizer, render_prompt, stop_ids
from prorl_hpc.learner.attention import document_layout
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import ModelError, PolicyModel, build_policy, gather_weights
from prorl_hpc.learner.publish import copy_companions
from prorl_hpc.learner.record import log
from prorl_hpc.learner.weights import save_weights
from prorl_hpc.policy import PolicyError, publish_directory, verify_policy
from prorl_hpc.recipe import Recipe, WarmupConfig
from prorl_hpc.records import Instance, Kind
from prorl_hpc.run import Run


class DemonstratingTask(Protocol):
    """A task that can show what a good answer looks like."""

    def size(self, kind: Kind) -> int: ...

    def instance(self, index: int, *, kind: Kind) -> Instance: ...

    def demonstration(self, instance: Instance) -> str | None: ...


def prepare_start(recipe: Recipe, run: Run, *, device: torch.device) -> None:
    """Makes `run.model_start` unless it is there already, whole."""
    try:
        verify_policy(run.model_start)
    except PolicyError:
        pass
    else:
        return
    run.root.mkdir(parents=True, exist_ok=True)
    bare = run.model_start.with_name(".start.bare")
    shutil.rmtree(bare, ignore_errors=True)
    bare.mkdir()
    try:
        if recipe.model.path is None:
            build_from_scratch(recipe, bare)
        else:
            fetch_pretrained(recipe.model.path, bare)
        _publish_taught(recipe, bare, run.model_start, device=device)
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
    """Copies a model by directory or hub name into `directory`, as safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if Path(path, "tokenizer.json").is_file():
            copy_companions(Path(path), directory)
        else:
            AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    except (OSError, ValueError, KeyError) as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else repr(err)
        raise ModelError(f"model.path={path!r} can't be loaded: {reason}") from err
    _save(network, directory)


def _save(network: Any, directory: Path) -> None:
    network.config.save_pretrained(directory)
    if getattr(network, "generation_config", None) is not None:
        network.generation_config.save_pretrained(directory)
    save_weights({name: p.detach().cpu() for name, p in network.named_parameters()}, directory)


def _publish_taught(recipe: Recipe, bare: Path, target: Path, *, device: torch.device) -> None:
    ranks = Ranks(rank=0, world=1, device=device)
    model = build_policy(bare, recipe.model, ranks=ranks, chunk_tokens=4096)
    if recipe.warmup.steps > 0:
        from prorl_hpc.tasks.registry import make_tasks

        tasks: dict[str, Any] = make_tasks(recipe)
        weights = {name: recipe.tasks[name].weight for name in tasks}
        examples = demonstrations(
            tasks, weights, load_tokenizer(bare), seed=recipe.seed, longest=recipe.warmup.max_tokens
        )
        teach(model, examples, config=recipe.warmup, device=device)
    weights_now = gather_weights(model, dtype=model.dtype, ranks=ranks)

    def write(directory: Path) -> None:
        copy_companions(bare, directory)
        save_weights(weights_now, directory)

    publish_directory(target, version=0, step=0, write=write)


Example = tuple[NDArray[np.int64], int]
"""Token ids of a prompt with its answer, and where the answer begins."""


def demonstrations(
    tasks: dict[str, DemonstratingTask],
    weights: dict[str, float],
    tokenizer: Any,
    *,
    seed: int,
    longest: int,
) -> Iterator[Example]:
    """Endless examples of the training split, the tasks mixed by weight; equal seeds, equal ones.

    Raises ModelError when no task gives a demonstration that fits.
    """
    rng = np.random.default_rng([seed, 0x5F7])
    names = sorted(name for name in tasks if weights[name] > 0)
    share = np.array([weights[name] for name in names])
    end = stop_ids(tokenizer)[0]
    misses = 0
    while True:
        task = tasks[names[int(rng.choice(len(names), p=share / share.sum()))]]
        index = int(rng.integers(task.size(Kind.train)))
        instance = task.instance(index, kind=Kind.train)
        answer = task.demonstration(instance)
        if answer is not None:
            prompt = render_prompt(tokenizer, instance.messages)
            ids = [*prompt, *tokenizer.encode(answer, add_special_tokens=False), end]
            if len(ids) <= longest:
                misses = 0
                yield np.array(ids, dtype=np.int64), len(prompt)
                continue
        misses += 1
        if misses >= 1000:
            raise ModelError(
                f"warmup.steps: none of 1000 instances of {', '.join(names)} has a demonstration "
                f"of at most warmup.max_tokens={longest}; set warmup.steps=0 or raise it"
            )


def teach(
    model: PolicyModel, examples: Iterator[Example], *, config: WarmupConfig, device: torch.device
) -> float:
    """Supervised steps on the answers; returns the last loss (nats per token)."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=0.0, foreach=False
    )
    loss = torch.zeros(())
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _rate(step, config.steps)
        batch = [next(examples) for _ in range(config.batch)]
        loss = -_answer_logprobs(model, batch, device=device).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        if step % 20 == 0 or step == config.steps - 1:
            log(f"warm-up step {step + 1} of {config.steps}: loss {float(loss):.3f}")
    optimizer.zero_grad(set_to_none=True)
    return float(loss)


def _rate(step: int, steps: int) -> float:
    """Warm up over a tenth, then fall linearly to a tenth."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, 1.0 - 0.9 * step / max(steps, 1))


def _answer_logprobs(
    model: PolicyModel, batch: Sequence[Example], *, device: torch.device
) -> torch.Tensor:
    starts = np.cumsum([0, *(ids.shape[0] for ids, _ in batch)])
    flat = torch.from_numpy(np.concatenate([ids for ids, _ in batch])).to(device)
    answers = torch.from_numpy(
        np.concatenate(
            [
                np.arange(start + begin, start + ids.shape[0])
                for start, (ids, begin) in zip(starts, batch, strict=False)
            ]
        )
    ).to(device)
    logprobs: torch.Tensor = model(
        flat,
        document_layout([ids.shape[0] for ids, _ in batch], device=device),
        answers - 1,
        flat[answers],
        torch.ones(answers.shape[0], device=device),
    ).logprobs
    return logprobs
