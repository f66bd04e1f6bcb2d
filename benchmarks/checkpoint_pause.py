"""How long a checkpoint stops training: written at once, or copied and written beside it.

Beside both stands the plain write and fsync of the same bytes, which is what a disk allows.

python benchmarks/checkpoint_pause.py [--hidden 512] [--layers 8] [--directory DIR]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.learner.background import Line
from prorl_hpc.learner.checkpoint import (
    LearnerState,
    save_checkpoint,
    snapshot,
    write_checkpoint,
)
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.model import build_policy
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.reference import Reference
from prorl_hpc.learner.warmup import build_from_scratch
from prorl_hpc.recipe import AlgorithmConfig, ModelConfig, Recipe, TaskConfig
from prorl_hpc.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        root = Path(place)
        model = build_policy(
            _model(root / "model", options.hidden, options.layers),
            ModelConfig(),
            ranks=ranks,
            chunk_tokens=64,
        )
        optimizer = build_optimizer(model.parameters(), config=AlgorithmConfig())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        reference = Reference.of(model, index=0, step=0, ranks=ranks)
        size = 4 * sum(p.numel() for p in model.parameters()) * FLOATS_PER_PARAMETER
        pauses, copies, plain = [], [], []
        line = Line(name="checkpoint", beside=True)
        for step in range(options.repeats):
            started = time.perf_counter()
            save_checkpoint(
                Run(root / "run"),
                _state(step, reference),
                model=model,
                optimizer=optimizer,
                reference=reference,
                ranks=ranks,
            )
            pauses.append(time.perf_counter() - started)
            started = time.perf_counter()
            tensors = snapshot(model, optimizer, reference, ranks=ranks)
            state = _state(step, reference)
            line.put(
                lambda state=state, tensors=tensors: write_checkpoint(  # type: ignore[misc]
                    Run(root / "run"), state, tensors, ranks=ranks
                )
            )
            copies.append(time.perf_counter() - started)
            line.wait()
            plain.append(_plain_write(root / "plain", size))
    pause, copy, limit = min(pauses), min(copies), min(plain)
    print(f"checkpoint of {size / 1e6:.0f} MB (model, moments, reference)")
    print(f"{'what':34} {'seconds':>8} {'MB/s':>8}")
    print(f"{'checkpoint with hashes and fsync':34} {pause:8.3f} {size / 1e6 / pause:8.0f}")
    print(f"{'pause of one beside training':34} {copy:8.3f} {size / 1e6 / copy:8.0f}")
    print(f"{'plain write + fsync (the limit)':34} {limit:8.3f} {size / 1e6 / limit:8.0f}")
    print(f"{'at once / limit':34} {pause / limit:8.2f}")
    print(f"{'at once / pause beside training':34} {pause / copy:8.2f}")


FLOATS_PER_PARAMETER = 4
"""Weight, two moments, reference."""


def _model(directory: Path, hidden: int, layers: int) -> Path:
    recipe = Recipe(name="benchmark", steps=1, tasks={"t": TaskConfig(kind="logic")})
    recipe.model.vocabulary = "abcdefgh"
    recipe.model.config = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    directory.mkdir()
    build_from_scratch(recipe, directory)
    return directory


def _state(step: int, reference: Reference) -> LearnerState:
    return LearnerState(
        step=step,
        version=step,
        consumed=GroupIds(),
        filtered=0,
        samples=EffectiveSamples(),
        reset={},
        reference=reference.identity,
        has_moments=True,
    )


def _plain_write(path: Path, size: int) -> float:
    data = os.urandom(min(size, 64 << 20))
    started = time.perf_counter()
    with path.open("wb") as stream:
        written = 0
        while written < size:
            written += stream.write(data[: size - written])
        stream.flush()
        os.fsync(stream.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
