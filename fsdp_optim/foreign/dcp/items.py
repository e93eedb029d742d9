"""The items of DCP files: each is an archive of torch.save with one tensor, or with one value that is no tensor.

The place of a tensor's elements is looked up when the tensor is first needed, because a checkpoint may have a million items.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.part_in_memory import PartInMemory, close_together, read_together
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, read_archive
from fsdp_optim.foreign.dcp.safetensors_items import SafetensorsInside
from fsdp_optim.foreign.dcp.tensor_table import ItemPlace, Tensor, TensorTable
from fsdp_optim.foreign.lazy import LazyPlaces
from fsdp_optim.foreign.reader import Archive, Source
from fsdp_optim.formats.base.bools import check_bytes
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import unread_in
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_named

_MOST_HEAD_NBYTES = 64 << 10
_AHEAD = 4  # heads for each request that is best under way


@dataclass(frozen=True)
class _ItemHead:
    """The bytes of an item before its elements. Items of equal length with equal heads have their elements at the same place."""

    data: bytes


class Items:
    """The places of the elements of tensors, looked up on demand. `sources`: the bytes of tensors that had to be read whole."""

    def __init__(self, opened: Opened, tensors: Mapping[str, Tensor]) -> None:
        self._opened = opened
        self._tensors = tensors
        self._heads: dict[tuple[int, str, Shape], _ItemHead] = {}
        self._places: dict[tuple[ItemPlace, Shape], tuple[str, int]] = {}
        self._ahead: dict[ItemPlace, bytes] = {}
        self._order: dict[str, list[tuple[ItemPlace, Shape]]] | None = None
        self._safetensors = SafetensorsInside(opened)
        self.sources: dict[str, Source] = {}

    def place(self, name: str, item: ItemPlace, dtype: str, offsets: Shape, sizes: Shape) -> tuple[str, int]:
        """Return the file, or the name in `sources`, and the byte at which the elements of a chunk begin. `name`: for errors."""
        place = self._places.get((item, sizes))
        if place is None:
            place = self._places[item, sizes] = self._place(name, item, dtype, offsets, sizes)
        return place

    def read_apart(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the tensors that have one chunk each and are no archives of torch.save, by key."""
        tensors = {}
        for key in keys:
            tensor = self._tensors.get(key)
            if tensor is None or len(tensor.items) != 1:
                continue
            item, (offsets, sizes) = tensor.items[0], tensor.boxes[0]
            place = self._safetensors.place(key, item, tensor.dtype, offsets, sizes)
            if place is not None:
                dtype, made = dtype_named(tensor.dtype), torch.empty(sizes, dtype=dtype_named(tensor.dtype))
                data = bytearray(self._opened.read(*place, made.numel() * dtype.itemsize))
                if dtype is torch.bool:
                    check_bytes(self._opened.named(place[0]), key, data)
                tensors[key] = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(sizes)
        return tensors

    def _place(self, name: str, item: ItemPlace, dtype: str, offsets: Shape, sizes: Shape) -> tuple[str, int]:
        kind = (item.nbytes, dtype, sizes)
        head = self._heads.get(kind)
        if head is not None and self._head_of(item, len(head.data)) == head.data:
            return item.file, item.start + len(head.data)
        inside = self._safetensors.place(name, item, dtype, offsets, sizes)
        if inside is not None:
            return inside
        where = f"{self._opened.named(item.file)}: {name}"
        archive = _archive(name, self._opened, item)
        stored = archive.value
        if not isinstance(stored, StoredTensor) or stored.dtype != dtype or stored.shape != sizes:
            raise CheckpointError(
                f"{where}: holds {_in_words(stored)}, and the metadata says a {dtype} tensor of {list(sizes)}"
            )
        source = archive.sources.get(stored.file)
        if source is not None and source.memory is not None:
            self.sources[source_name(item)] = source
            return source_name(item), stored.start
        start = stored.start + (source.first_byte if source is not None else 0)
        if 0 < start - item.start <= _MOST_HEAD_NBYTES:
            self._heads[kind] = _ItemHead(self._opened.read(item.file, item.start, start - item.start))
        return item.file, start

    def _head_of(self, item: ItemPlace, nbytes: int) -> bytes:
        if self._opened.num_requests == 1:
            return self._opened.read(item.file, item.start, nbytes)
        if item not in self._ahead or len(self._ahead[item]) < nbytes:
            self._read_ahead(item, nbytes)
        return self._ahead.pop(item)[:nbytes]

    def _read_ahead(self, item: ItemPlace, nbytes: int) -> None:
        """Read the heads of the next items of a file at the same time, where each request takes long."""
        order = self._items_of(item.file)
        at = bisect.bisect_left(order, item.start, key=lambda other: other[0].start)
        some = [other for other, sizes in order[at:] if (other, sizes) not in self._places][
            : _AHEAD * self._opened.num_requests
        ]

        def read(other: ItemPlace) -> bytes:
            return self._opened.read(other.file, other.start, min(nbytes, other.nbytes))

        with ThreadPoolExecutor(self._opened.num_requests, thread_name_prefix="fsdp_optim: read") as pool:
            self._ahead.update(zip(some, pool.map(read, some), strict=True))

    def _items_of(self, file: str) -> list[tuple[ItemPlace, Shape]]:
        """Return the items of tensors in one file with the sizes of their chunks, in the order of their bytes."""
        if self._order is None:
            self._order = {}
            for tensor in self._tensors.values():
                for item, (_, sizes) in zip(tensor.items, tensor.boxes, strict=True):
                    self._order.setdefault(item.file, []).append((item, sizes))
            for items in self._order.values():
                items.sort(key=lambda pair: pair[0].start)
        return self._order[file]


def source_name(item: ItemPlace) -> str:
    """Return the name in `Items.sources` of an item whose elements have to be made."""
    return f"{item.file} from {item.start}"


class LazyChunkPlaces(LazyPlaces):
    """By rank of storage, the file of a chunk and the byte at which its elements begin, looked up on demand."""

    def __init__(self, items: Items, name: str, tensor: Tensor) -> None:
        self._items, self._name, self._tensor = items, name, tensor

    def __getitem__(self, rank: int) -> tuple[str, int]:
        number = -1 - rank
        if not 0 <= number < len(self._tensor.items):
            raise KeyError(rank)
        return self._items.place(
            self._name, self._tensor.items[number], self._tensor.dtype, *self._tensor.boxes[number]
        )

    def __iter__(self) -> Iterator[int]:
        return iter(range(-1, -1 - len(self._tensor.items), -1))

    def __len__(self) -> int:
        return len(self._tensor.items)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        itemsize = dtype_named(self._tensor.dtype).itemsize
        for item, (_, sizes) in zip(self._tensor.items, self._tensor.boxes, strict=True):
            is_archive = item.nbytes > prod(sizes) * itemsize  # else one of several tensors behind `start`
            yield item.file, item.start, item.nbytes if is_archive else sys.maxsize
            yield source_name(item), 0, sys.maxsize


def read_values(opened: Opened, items: Mapping[str, ItemPlace], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the values of items by key, tensors included. Several items are read at once.

    `allow_pickle`: make objects of all classes; else objects of unknown classes are inert.
    """
    values: dict[str, Any] = {}
    known: dict[bytes, TorchArchive] = {}  # thousands of parameters have the same learning rate
    keys_at: dict[Archive, list[str]] = {}  # which may be stored once
    for key, item in items.items():
        keys_at.setdefault(Archive(item.file, item.start, item.nbytes), []).append(key)
    for batch in close_together(sorted(keys_at)):
        data = read_together(opened, batch)
        for place in batch:
            start = place.start - batch[0].start
            part, keys = data[start : start + place.nbytes], keys_at[place]
            if part not in known:
                known[part] = _archive(keys[0], PartInMemory(opened, place.start, part), items[keys[0]])
            archive = known[part]
            for key in keys:
                try:
                    values[key] = archive.materialised(archive.unpickled() if allow_pickle else archive.value)
                except CheckpointError as error:
                    raise _with_place(error, key, items[key]) from error
    return values


def archives_in(opened: Opened, tensors: TensorTable, values: Mapping[str, ItemPlace], beside: str) -> list[Archive]:
    """Return all items, in the order of their bytes, as archives that may have checksums.

    `beside`: a file that is one too, if there.
    """
    names = dict(tensors.places())
    names.update({(item.file, item.start, item.nbytes): key for key, item in values.items()})
    return [
        *sorted([Archive(*place, name) for place, name in names.items()]),
        *([Archive(beside, 0, opened.size_of(beside))] if beside in opened.names() else []),
    ]


def _archive(name: str, opened: Opened, item: ItemPlace) -> TorchArchive:
    """Return the archive of an item. Raises CheckpointError that names `name`, which is in the item."""
    try:
        return read_archive(opened, item.file, start=item.start, nbytes=item.nbytes)
    except CheckpointError as error:
        raise _with_place(error, name, item) from error


def _with_place(error: CheckpointError, name: str, item: ItemPlace) -> CheckpointError:
    return CheckpointError(f"{error} ({name} is in {item.file}, at byte {item.start})")


def unread_class_in(value: Any) -> str:
    """Return the name of the class of an inert object in a value; "" if it has none."""
    unread = unread_in(value)
    return unread.what if unread is not None else ""


def _in_words(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return f"a {value.dtype} tensor of {list(value.shape)}"
    return f"a value of the type {type(value).__name__}"
