"""The places of the tensors of a DCP folder: those of all tensors are checked at once, and each is made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.boxes import Cuts
from fsdp_optim.foreign.dcp.items import Items, LazyChunkPlaces
from fsdp_optim.foreign.dcp.tensor_table import TensorTable
from fsdp_optim.foreign.lazy import LazyTensors
from fsdp_optim.formats.base.protocols import Chunks, StoredTensor
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_named


class StoredTable(LazyTensors):
    """The tensors of a table, without their elements.

    `keys`: for names that are not the keys of the table, the key of each; None: the keys are the names.
    """

    def __init__(self, opened: Opened, table: TensorTable, items: Items, keys: Mapping[str, str] | None = None) -> None:
        """Make a table. Raises CheckpointError where chunks are not the whole tensor, or have more bytes than their items."""
        self._opened, self._table, self._items, self._keys = opened, table, items, keys
        rows, self._kinds = table.kinds()
        cuts, columns = Cuts(), table.columns
        self._placements = [
            cuts.placement(f"{opened.where}: {key}", table.shapes[columns.shapes[row]], table.cuts[columns.cuts[row]])
            for row, key in zip(rows.tolist(), table.keys_of(rows.tolist()), strict=True)
        ]
        self._check_lengths()

    def _check_lengths(self) -> None:
        bad = self._table.too_long()
        if bad is None:
            return
        (key,), number = self._table.keys_of([bad[0]]), bad[1]
        tensor = self._table[key]
        sizes, nbytes = tensor.boxes[number][1], tensor.items[number].nbytes
        raise CheckpointError(
            f"{self._opened.where}: {key}: a chunk of the sizes {list(sizes)} has "
            f"{prod(sizes) * dtype_named(tensor.dtype).itemsize} bytes, but {nbytes} in its file"
        )

    def named(self, keys: Mapping[str, str]) -> StoredTable:
        """Return some of the tensors under other names, each with its key."""
        made = StoredTable.__new__(StoredTable)
        made.__dict__.update(self.__dict__, _keys=keys)
        return made

    def __getitem__(self, name: str) -> StoredTensor:
        key = self._keys[name] if self._keys is not None else name
        tensor = self._table[key]
        return StoredTensor(
            name,
            tensor.dtype,
            tensor.shape,
            "",
            tensor.items[0].start if tensor.items else 0,
            request_nbytes=self._opened.request_nbytes,
            chunks=Chunks(
                self._placements[self._kinds[self._table.row_of(key)]],
                LazyChunkPlaces(self._items, key, tensor),
                is_checked=True,
            ),
        )

    def of_dtype(self, dtype: str) -> list[StoredTensor]:
        listed = self._table.keys_of_dtype(dtype)
        if self._keys is None or not listed:
            return [self[key] for key in listed]
        keys = {*listed}
        return [self[name] for name, key in self._keys.items() if key in keys]

    def __contains__(self, name: object) -> bool:
        return name in (self._table if self._keys is None else self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table if self._keys is None else self._keys)

    def __len__(self) -> int:
        return len(self._table if self._keys is None else self._keys)
