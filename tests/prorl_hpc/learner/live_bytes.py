"""The bytes of all tensors that live at once, as the allocator of a device would see them.

Knows storages, no model: every tensor that an operation returns is followed until it is freed.
Buffers inside an operation aren't seen, nor is what was made before the meter began and isn't
given to it.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block, `peak` is the largest sum of live storages since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, Any] = {}
        self.now = self.peak = 0

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        meter = self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            done = meter._resize(storage, size)
            meter._follow(storage)
            return done

        # FSDP frees and fills its gathered layers this way.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that were there before."""
        for tensor in tensors:
            self._follow(_plain(tensor).untyped_storage())

    def restart(self) -> None:
        """The peak begins at what lives now."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._follow(_plain(value).untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        key, size = id(storage), storage.nbytes()
        if key not in self._finalizers:
            self._finalizers[key] = weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self._finalizers.pop(key, None)
        self.now -= self._sizes.pop(key, 0)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
