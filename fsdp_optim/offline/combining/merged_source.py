"""The elements of a base with an adapter: those of the base, those that the adapter replaces, and products that are added."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.move import Key
from fsdp_optim.offline.combining.lora import BlockMemory, LoraProduct, compute_dtype_of
from fsdp_optim.offline.conversion.unit_sources import CheckpointSource, Fill, UnitPart, UnitSource
from fsdp_optim.offline.conversion.workers import unit_nbytes_in
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import Budget, dtype_named

_WINDOW = 1 << 16  # elements that are added at a time: a sum of two dtypes has copies of both
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Factors:
    """The two factors of a layer in the adapter's file.

    `name`, `dtype`: of the weight. `is_embedding`: PEFT rounds the product of an embedding to the dtype of the weight before it
    adds it; that of another layer is rounded with the sum.
    """

    name: str
    a: StoredTensor
    b: StoredTensor
    scale: float
    is_transposed: bool
    dtype: torch.dtype
    is_embedding: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of both factors in the dtype of the product, and as they are read."""
        size = compute_dtype_of(self.dtype).itemsize
        return sum(math.prod(tensor.shape) * (size + tensor.itemsize) for tensor in (self.a, self.b))


def check_fits(budget: Budget, factors: Sequence[Factors]) -> None:
    """Raise StateError if the factors of a layer do not fit into the memory of a worker thread."""
    for pair in factors:
        if pair.nbytes > _part_of(budget).nbytes:
            least = 2 * _SHARES * pair.nbytes
            raise StateError(
                f"{pair.name}: its factors in the adapter take {pair.nbytes} bytes, and bucket_nbytes={budget.nbytes} leaves "
                f"{_part_of(budget).nbytes} bytes for them: give at least bucket_nbytes={least}"
            )


_SHARES = 4
"""Parts of a worker's memory: the factors of one layer; a block of their product; units, in the other two."""


def _worker_share(budget: Budget) -> Budget:
    return budget.share(2, "two worker threads")


def _part_of(budget: Budget) -> Budget:
    """Return the memory of a worker thread for the factors of a layer, and again for a block of their product."""
    return _worker_share(budget).share(_SHARES, "the factors of a layer, a block of their product, and units")


@dataclass(frozen=True)
class MergedSource(UnitSource):
    """A base with an adapter as a source of elements.

    Attributes:
        base: the base; its keys are those of the new checkpoint.
        adapter: the adapter, with a stored tensor for each key of the base that it replaces.
        factors: the factors of each weight to which a product is added.
        budget: the memory of all worker threads.
    """

    base: CheckpointSource
    adapter: CheckpointSource
    factors: Mapping[Key, Factors]
    budget: Budget

    @property
    def is_remote(self) -> bool:
        return self.base.is_remote or self.adapter.is_remote

    @property
    def num_extra_units(self) -> int:
        """Those of replaced elements in the adapter's own dtype, and as many as the factors and a block take."""
        ratio, block_nbytes = self._most_ratio, _part_of(self.budget).nbytes
        unit_nbytes = unit_nbytes_in(self.budget.share(2, "units, beside factors and their product"), ratio)
        most = max((pair.nbytes for pair in self.factors.values()), default=0)
        return ratio + (-(-(most + block_nbytes) // unit_nbytes) if most else 0)

    @property
    def _most_ratio(self) -> int:
        stored = self.base.stored
        pairs = ((tensor.itemsize, stored[key].itemsize) for key, tensor in self.adapter.stored.items())
        return max((-(-size // of_base) for size, of_base in pairs), default=0)

    def check_unchanged(self) -> None:
        self.base.check_unchanged()
        self.adapter.check_unchanged()

    def filler(self, unit_nbytes: int) -> Fill:
        fill_base, fill_adapter = self.base.filler(unit_nbytes), self.adapter.filler(unit_nbytes * 8)
        added = _Added(self)

        def fill(parts: Sequence[UnitPart]) -> None:
            replaced = [part for part in parts if part.value.key in self.adapter.stored]
            fill_base([part for part in parts if part.value.key not in self.adapter.stored])
            if replaced:
                read = [UnitPart(part.value, part.first, self._memory_for(part)) for part in replaced]
                fill_adapter(read)
                for part, own in zip(replaced, read, strict=True):
                    part.flat.copy_(own.flat)
            for part in parts:
                if part.value.key in self.factors:
                    added.add_to(part)

        return fill

    def _memory_for(self, part: UnitPart) -> torch.Tensor:
        return empty((part.flat.numel(),), dtype_named(self.adapter.stored[part.value.key].dtype), _CPU)


class _Added:
    """The factors of the layer that one worker thread is at, and one block of their product."""

    def __init__(self, source: MergedSource) -> None:
        self._source = source
        self._most_nbytes = _part_of(source.budget).share(2, "a block and its transposed copy").nbytes
        self._key: Key | None = None
        self._product: LoraProduct | None = None
        self._first, self._block, self._memory = 0, torch.empty(0), BlockMemory()

    def add_to(self, part: UnitPart) -> None:
        """Add the elements of the product to those of a part of a weight."""
        product = self._product_of(part.value.key)
        num_columns, rows = product.shape[1], product.rows_in(self._most_nbytes)
        at, end = part.first, part.first + part.flat.numel()
        while at < end:
            first = at // num_columns // rows * rows
            stop = min(first + rows, product.shape[0])
            if self._first != first or not self._block.numel():
                self._first, self._block = first, product.block(first, stop, self._memory)
            until = min(end, stop * num_columns, at + _WINDOW)
            begin = first * num_columns
            added = self._block[at - begin : until - begin]
            if self._source.factors[part.value.key].is_embedding:
                added = added.to(part.flat.dtype)
            part.flat[at - part.first : until - part.first] += added
            at = until

    def _product_of(self, key: Key) -> LoraProduct:
        if key != self._key or self._product is None:
            self._product, self._block = None, torch.empty(0)
            pair = self._source.factors[key]
            dtype = compute_dtype_of(pair.dtype)
            a, b = (factor.to(dtype) for factor in read_constants(self._source.adapter.reader, [pair.a, pair.b]))
            self._key, self._product = key, LoraProduct(a, b, pair.scale, pair.is_transposed)
        return self._product
