"""A version's weights from disk into a model of this process. Knows no request and no batch."""

from pathlib import Path
from typing import Any

from prorl_hpc.inference.engine import EngineError
from prorl_hpc.policy import PolicyError, verify_policy


def copy_weights(model: Any, weights: dict[str, Any]) -> None:
    """Replaces every parameter; raises ValueError with nothing changed if they don't fit."""
    import torch

    named = model.state_dict(keep_vars=True)
    foreign = [n for n in weights if n not in named or named[n].shape != weights[n].shape]
    filled: dict[int, str] = {}  # tied weights are one tensor under two names
    for name in weights:
        if name in named:
            first = filled.setdefault(id(named[name]), name)
            if first != name and not torch.equal(weights[first], weights[name]):
                foreign.append(name)
    missing = [n for n, tensor in model.named_parameters() if id(tensor) not in filled]
    if missing or foreign:
        raise ValueError(
            f"weights don't fit the model: {len(missing)} missing (e.g. {missing[:1]}), "
            f"{len(foreign)} unknown, untied or of another shape (e.g. {foreign[:1]})"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            named[name].copy_(tensor)


def read_weights(path: Path, version: int) -> dict[str, Any]:
    """Every tensor of a version whose hashes are right; raises EngineError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = verify_policy(path)
        files = sorted(name for name in manifest.files if name.endswith(".safetensors"))
        weights = {k: v for name in files for k, v in load_file(path / name).items()}
    except (PolicyError, OSError, SafetensorError) as err:
        raise EngineError(f"version {version} can't be read: {first_line(err)}") from err
    if manifest.version != version:
        raise EngineError(f"{path} holds version {manifest.version}, not {version}")
    if not weights:
        raise EngineError(f"version {version} in {path} has no safetensors file")
    return weights


def first_line(err: BaseException) -> str:
    """The first line of an error, for a message of one line."""
    lines = str(err).strip().splitlines()
    return lines[0] if lines else repr(err)
