"""Model weights as safetensors files in Hugging Face's layout. Knows tensors and files; no model.

One file `model.safetensors`, or several with `model.safetensors.index.json` once the weights
exceed the size of one file.
"""

import json
import os
import re
from pathlib import Path

from torch import Tensor

from hpc.errors import UserError
from hpc.files import sync_file

FILE_BYTES = 5 << 30
"""Largest weight file, unless one tensor alone is larger."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class WeightsError(UserError, ValueError):
    """A directory whose weights can't be read."""


class StoredWeights:
    """The tensors of a model directory; each is read when it is asked for."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._files)

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU, in the type it is stored in."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(name)
        return tensor


def open_weights(directory: Path) -> StoredWeights:
    """The weights of a model directory; raises WeightsError when there are none."""
    from safetensors import SafetensorError, safe_open

    index = directory / INDEX
    try:
        if index.exists():
            placed = json.loads(index.read_text())["weight_map"]
            return StoredWeights({name: directory / file for name, file in placed.items()})
        with safe_open(directory / SINGLE, framework="pt") as stream:
            return StoredWeights(dict.fromkeys(stream.keys(), directory / SINGLE))
    except (OSError, ValueError, KeyError, SafetensorError) as err:
        raise WeightsError(f"model {directory} has no readable safetensors weights: {err}") from err


def save_weights(
    weights: dict[str, Tensor], directory: Path, *, file_bytes: int = FILE_BYTES
) -> None:
    """Writes the weights below `directory`; durability is the caller's (see `prorl_hpc.policy`)."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if parts[-1] and size + tensor.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(parts) == 1:
        write_tensors(parts[0], directory / SINGLE)
        return
    placed: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_tensors(part, directory / file)
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def write_tensors(
    tensors: dict[str, Tensor],
    path: Path,
    *,
    facts: dict[str, str] | None = None,
    durable: bool = False,
) -> None:
    """One file, with `facts` in its header.

    What the system refuses is an OSError with its number, as everywhere else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"} if facts is None else facts)
    except SafetensorError as err:
        found = re.search(r"os error (\d+)", str(err))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from err
    if durable:
        sync_file(path)
