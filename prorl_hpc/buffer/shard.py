"""One sealed shard, open for reading. Knows the layout (see `image`) and no group state.

Reads format 2, and format 1 of older runs: there mask and versions are flat like the tokens, and
every token has a log-probability.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpc.errors import HpcError
from prorl_hpc.buffer.digest import file_digest
from prorl_hpc.buffer.image import ARRAYS, FORMAT, Side
from prorl_hpc.buffer.messages import Row
from prorl_hpc.buffer.parcel import Parcel, pack
from prorl_hpc.records import Kind, Outcome, RecordError, Trajectory

FLAT_ARRAYS = (("tokens", "<i4"), ("logprobs", "<f4"), ("loss_mask", "u1"), ("versions", "<i4"))
"""Of format 1, all of one length."""

COUNTS = {
    "tokens_low": "num_tokens",
    "tokens_high": "num_tokens",
    "logprobs": "num_logprobs",
    "runs": "num_runs",
    "side": "num_side_bytes",
}
"""Which column of the table says how many elements of each a trajectory has."""


class ShardError(HpcError, ValueError):
    """A shard of a newer format."""


class ShardDamaged(ShardError):
    """A shard whose bytes aren't those that were sealed, or that is gone."""

    def __init__(self, message: str, *, shard: int) -> None:
        super().__init__(message)
        self.shard = shard


_side = msgspec.json.Decoder(Side)


class OpenShard:
    """A shard open for reading; its bytes were checked against the manifest's digest."""

    def __init__(self, path: Path, *, number: int, digest: str) -> None:
        self.number = number
        self._path = path
        try:
            self._stream = path.open("rb", buffering=0)
        except OSError as err:
            raise self._damaged(f"{err.strerror}") from err
        try:
            found = file_digest(self._stream, like=digest)
            if found != digest:
                raise self._damaged(f"digest {found[:20]}… where {digest[:20]}… was sealed")
            with h5py.File(path, "r", locking=False) as file:
                self._read_index(file)
        except (OSError, KeyError, RuntimeError) as err:
            self._stream.close()
            raise self._damaged(str(err)) from err
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        return len(self._table)

    def read(self, row: int) -> Trajectory:
        """One trajectory. Raises ShardDamaged."""
        if self._format == 1:
            return self._flat(row)
        return self.parcel(row).trajectory()

    def parcel(self, row: int) -> Parcel:
        """One trajectory as it lies there. Raises ShardDamaged."""
        if self._format == 1:
            try:
                return pack(self._flat(row).check())
            except RecordError as err:
                raise self._damaged(f"row {row}: {err}") from err
        bounds = self._bounds(row)
        low, high, logprobs = self._arrays(bounds, ARRAYS)
        first, last = bounds["runs"]
        fields = self._fields(row, bounds["side"])
        kind, outcome = fields.pop("kind"), fields.pop("outcome")
        return Parcel(
            row=Row(
                kind=kind.value,
                outcome=outcome.value,
                length=low.shape[0],
                num_logprobs=logprobs.shape[0],
                num_runs=last - first,
                **fields,
            ),
            kind=kind,
            outcome=outcome,
            low=low,
            high=high,
            logprobs=logprobs,
            runs=self._runs[first:last],
        )

    def close(self) -> None:
        self._stream.close()

    def _read_index(self, file: h5py.File) -> None:
        self._format = int(file.attrs["format"])
        if self._format > FORMAT:
            raise ShardError(
                f"format={self._format} of {self._path} is newer than {FORMAT}; upgrade prorl-hpc"
            )
        self._table: NDArray[np.void] = file["table"][:]
        self._sides: bytes = file["side"][:].tobytes()
        if self._format == 1:
            tokens = file["offsets"][:]
            self._offsets = dict.fromkeys((name for name, _ in FLAT_ARRAYS), tokens)
            self._offsets["side"] = file["side_offsets"][:]
        else:
            self._offsets = {
                name: np.concatenate(([0], np.cumsum(self._table[column])))
                for name, column in COUNTS.items()
            }
            self._runs: NDArray[np.void] = file["runs"][:]
        # Contiguous and little-endian by the format: read without HDF5 from here on.
        arrays = FLAT_ARRAYS if self._format == 1 else ARRAYS
        self._places = {name: file[name].id.get_offset() or 0 for name, _ in arrays}

    def _bounds(self, row: int) -> dict[str, tuple[int, int]]:
        if not 0 <= row < len(self._table):
            raise self._damaged(f"row {row} of {len(self._table)} is asked for")
        return {
            name: (int(offsets[row]), int(offsets[row + 1]))
            for name, offsets in self._offsets.items()
        }

    def _arrays(
        self, bounds: dict[str, tuple[int, int]], arrays: Sequence[tuple[str, str]]
    ) -> list[NDArray[Any]]:
        try:
            return [self._array(name, dtype, *bounds[name]) for name, dtype in arrays]
        except OSError as err:
            raise self._damaged(str(err)) from err

    def _array(self, name: str, dtype: str, start: int, stop: int) -> NDArray[Any]:
        values = np.empty(stop - start, dtype=dtype)
        place = self._places[name] + start * values.itemsize
        if os.preadv(self._stream.fileno(), [values.data], place) != values.nbytes:
            raise OSError(f"{name} ends early")
        return values

    def _flat(self, row: int) -> Trajectory:
        bounds = self._bounds(row)
        arrays = self._arrays(bounds, FLAT_ARRAYS)
        fields = self._fields(row, bounds["side"])
        fields |= {name: values for (name, _), values in zip(FLAT_ARRAYS, arrays, strict=True)}
        return Trajectory(**fields)

    def _fields(self, row: int, side_bounds: tuple[int, int]) -> dict[str, Any]:
        """All but the arrays."""
        record = self._table[row]
        try:
            side = _side.decode(self._sides[slice(*side_bounds)])
        except msgspec.MsgspecError as err:
            raise self._damaged(f"row {row}: {err}") from err
        reward = float(record["reward"])
        return {
            "group_id": int(record["group_id"]),
            "rollout_index": int(record["rollout_index"]),
            "kind": Kind(record["kind"].decode()),
            "outcome": Outcome(record["outcome"].decode()),
            "reward": None if math.isnan(reward) else reward,
            **msgspec.structs.asdict(side),
        }

    def _damaged(self, reason: str) -> ShardDamaged:
        return ShardDamaged(
            f"shard {self.number} ({self._path}) is damaged: {reason}", shard=self.number
        )
