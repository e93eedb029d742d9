"""Files of `torch.save`: their values, with the places of their tensors in the place of the elements.

Only the pickle and the directory of the archive are read. What the pickle names is looked up in a table; nothing of a file is
executed. Each tensor becomes a StoredTensor: a range of bytes of the file, or memory for a tensor whose elements do not lie in
row-major order, or which is compressed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.inert_pickle import MOST_NBYTES, Unpickler
from fsdp_optim.foreign.archive.legacy_archive import HEAD_NBYTES, LegacyStorages, is_legacy
from fsdp_optim.foreign.archive.pickle_table import Global, Table
from fsdp_optim.foreign.archive.torch_globals import Storage, TensorMaker, TensorView, storage_of, table_of
from fsdp_optim.foreign.archive.tree import check_tree, mapped
from fsdp_optim.foreign.archive.zip_records import ZIP, FilePart, Records
from fsdp_optim.foreign.reader import Source
from fsdp_optim.formats.base.bools import check_bytes
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.allocation import in_pages
from fsdp_optim.tensors.memory import dtype_named

__all__ = ["TorchArchive", "Unread", "is_torch_archive", "read_archive"]

_MOST_SMALL = 1 << 10  # bytes of a record with one word
_MOST_COPY = 256 << 20  # bytes of a tensor whose elements share memory (expand), unless its storage is as large


@dataclass(frozen=True)
class TorchArchive:
    """The content of a file of `torch.save`.

    Attributes:
        where: the name of the file, for errors.
        value: the value, with a StoredTensor (key "") in the place of each tensor, and an Unread in the place of each object of
            a class that is not allowed. Tensors that share memory have StoredTensors with the same file and start.
        sources: the objects that `StoredTensor.file` names, where these are not simply files of the place.
        digest: a hash of the pickle.
    """

    where: str
    value: Any
    sources: Mapping[str, Source]
    digest: str
    _opened: Opened = field(repr=False)
    _again: Callable[[], Any] = field(repr=False)

    def unpickled(self) -> Any:
        """Return the same value with real objects in the place of each Unread: runs whatever code the file names.

        Tensors inside these objects are real tensors; those in dicts and lists are StoredTensors.
        """
        return self._again()

    def materialised(self, value: Any) -> Any:
        """Return a part of the value with real tensors, which are read whole."""
        return materialised(self._opened, self.sources, value)


def is_torch_archive(opened: Opened, name: str) -> bool:
    """Return whether a file begins like one of `torch.save`. Raises nothing."""
    try:
        head = opened.read(name, 0, min(HEAD_NBYTES, opened.size_of(name)))
    except CheckpointError:
        return False
    return head.startswith(ZIP) or is_legacy(head)


def read_archive(
    opened: Opened,
    name: str,
    *,
    start: int = 0,
    nbytes: int | None = None,
    stand_ins: Mapping[str, Callable[..., Any]] | None = None,
) -> TorchArchive:
    """Read the pickle of a file of `torch.save`, or of `nbytes` bytes of a file from byte `start` on.

    `stand_ins`: by `module.Class`, the callable in the place of a class or a function that the pickle names. An object of a
    class here gets its state by `__setstate__`, if the class has it. For a tensor subclass without a storage, such as a DTensor,
    the stand-in is called with dtype, shape and the rest of the description, then `__setstate__` with the state.

    Raises CheckpointError that names the file, and the tensor where one is damaged.
    """
    where, size = opened.named(name), opened.size_of(name)
    nbytes = size - start if nbytes is None else nbytes
    if not (start >= 0 and nbytes >= 0 and start + nbytes <= size):
        raise CheckpointError(
            f"{where}: bytes [{start}, {start + nbytes}) are needed of {size}: it was cut short or changed"
        )
    part = FilePart(opened, name, start, nbytes)
    prefix = name if not start else f"{name}@{start}"
    head = part.at(0, min(nbytes, HEAD_NBYTES))
    if head.startswith(ZIP):
        return _read_zip(opened, name, start, part, prefix, stand_ins or {})
    if is_legacy(head):
        return _read_legacy(opened, name, start, part, prefix, stand_ins or {})
    raise CheckpointError(
        f"{where}: is no file of torch.save: it begins with {head[:8]!r}, so it was cut short or changed, or another program "
        "wrote it"
    )


def _read_zip(
    opened: Opened, name: str, start: int, part: FilePart, prefix: str, stand_ins: Mapping[str, Callable[..., Any]]
) -> TorchArchive:
    where = opened.named(name)
    records = Records(opened, name, start, part)
    folder = next(iter(records.infos), "").partition("/")[0]
    data = records.read(f"{folder}/data.pkl", MOST_NBYTES)
    if f"{folder}/byteorder" in records.infos:
        order = records.read(f"{folder}/byteorder", _MOST_SMALL)
        if order != b"little":
            raise CheckpointError(
                f"{where}: its byte order is {order.decode('latin-1')!r}; only little-endian files are read: load it with "
                "torch.load and save it again on a little-endian machine"
            )

    def source(storage: Storage) -> Source:
        record = f"{folder}/data/{storage.key}"
        if records.size_of(record) < storage.nbytes:
            raise ValueError(
                f"its storage {storage.key} has {records.size_of(record)} bytes in the file, not {storage.nbytes}"
            )
        return records.source(record)

    def load(prepared: Callable[[Any], Any] | None = None) -> tuple[Any, _Places]:
        places = _Places(opened, name, prefix, source)
        table = table_of(places).with_stand_ins(stand_ins if prepared is None else {})
        value = Unpickler(where, table, storage_of, prepared).load(io.BytesIO(data))
        for key, nbytes in places.nbytes_used.items():
            records.check_used(f"{folder}/data/{key}", nbytes)
        return value, places

    return _archive(opened, where, sha256(data).hexdigest(), load, 4 * len(data))


def _read_legacy(
    opened: Opened, name: str, start: int, part: FilePart, prefix: str, stand_ins: Mapping[str, Callable[..., Any]]
) -> TorchArchive:
    """Read a file of torch before 1.6: pickles, and after them the bytes of all storages."""
    where = opened.named(name)
    digest = ""

    def load(prepared: Callable[[Any], Any] | None = None) -> tuple[Any, _Places]:
        nonlocal digest
        storages = LegacyStorages(opened, name, start, part)
        places = _Places(opened, name, prefix, storages.source)

        def unpickler(real: Callable[[Any], Any] | None) -> Unpickler:
            table: Table = table_of(places).with_stand_ins(stand_ins if real is None else {})
            return Unpickler(where, table, storages.storage, real)

        value = storages.load(unpickler(None), unpickler(prepared))
        digest = storages.digest
        return value, places

    return _archive(opened, where, lambda: digest, load)


def _archive(
    opened: Opened,
    where: str,
    digest: str | Callable[[], str],
    load: Callable[..., tuple[Any, _Places]],
    most_nodes: int = 0,
) -> TorchArchive:
    value, places = load()
    check_tree(where, value, most_nodes)

    def made(item: StoredTensor | Global) -> Any:
        return item.imported() if isinstance(item, Global) else read_tensor(opened, places.sources, item)

    def again() -> Any:
        return load(partial(mapped, cls=(StoredTensor, Global), function=made))[0]

    return TorchArchive(where, value, places.sources, digest if isinstance(digest, str) else digest(), opened, again)


class _Places(TensorMaker):
    """Makes StoredTensors, and the sources that these name.

    `source_of`: the place of the bytes of a storage. `prefix`: the beginning of the names of sources.
    """

    def __init__(self, opened: Opened, name: str, prefix: str, source_of: Callable[[Storage], Source]) -> None:
        self._opened, self._name, self._prefix, self._source_of = opened, name, prefix, source_of
        self._of_storages: dict[tuple[str, int], Source] = {}  # by key and number of bytes: each size is checked
        self.sources: dict[str, Source] = {}
        self.nbytes_used: dict[str, int] = {}  # of each storage, by its tensors

    def tensor(self, view: TensorView) -> StoredTensor:
        key = view.storage.key
        if not view.numel:
            return StoredTensor("", view.dtype, view.shape, self._name, 0)
        sized = key, view.storage.nbytes
        if sized not in self._of_storages:
            self._of_storages[sized] = self._source_of(view.storage)
        source = self._of_storages[sized]
        self.nbytes_used[key] = self.nbytes_used.get(key, 0) + view.num_spanned * view.itemsize
        if not view.is_contiguous:
            if view.numel * view.itemsize > max(_MOST_COPY, 2 * view.num_spanned * view.itemsize):
                raise ValueError(
                    f"its shape {list(view.shape)} has {view.numel} elements, and only {view.num_spanned} are in the file, "
                    "because they share memory (expand): save a copy of it"
                )
            name = f"{self._prefix}!{key}[{view.dtype},{view.offset},{view.shape},{view.stride},{view.is_conj},{view.is_neg}]"
            self.sources[name] = Source(memory=partial(_in_row_major_order, self._opened, name, source, view))
            return StoredTensor("", view.dtype, view.shape, name, 0)
        start = view.offset * view.itemsize
        if source.memory is None and not callable(source.start):
            return StoredTensor("", view.dtype, view.shape, self._name, source.start + start)
        name = f"{self._prefix}!{key}"
        self.sources[name] = source
        return StoredTensor("", view.dtype, view.shape, name, start)


def _in_row_major_order(opened: Opened, name: str, source: Source, view: TensorView) -> memoryview:
    """Return the elements of a tensor in row-major order, from the elements of its storage that it spans."""
    nbytes = view.num_spanned * view.itemsize
    first = view.offset * view.itemsize
    made = source.made()
    if made is None:
        read = in_pages((nbytes,), torch.uint8)
        made = read.numpy().data
        opened.read_into(source.file, [made], source.first_byte + first)
        first = 0
    with as_checkpoint_error(opened.named(name)):
        dtype = dtype_named(view.dtype)
        # A copy of bools would make 1 of every other byte, which the check of what was read must see.
        dtype = torch.uint8 if dtype is torch.bool else dtype
        flat = torch.frombuffer(made[first:][:nbytes], dtype=dtype)
        tensor = torch.as_strided(flat, view.shape, view.stride)
        if view.is_conj:
            tensor = tensor.conj()
        if view.is_neg:
            tensor = torch.neg(tensor)
        in_order = in_pages(view.shape, tensor.dtype).copy_(tensor)
        return in_order.view(-1).view(torch.uint8).numpy().data


def materialised(opened: Opened, sources: Mapping[str, Source], value: Any) -> Any:
    """Return a value of an archive with real tensors in the place of StoredTensors; objects that occur twice stay one object."""
    return mapped(value, StoredTensor, partial(read_tensor, opened, sources))


def read_tensor(opened: Opened, sources: Mapping[str, Source], stored: StoredTensor) -> torch.Tensor:
    """Return the elements of a StoredTensor in one place."""
    dtype, nbytes = dtype_named(stored.dtype), prod(stored.shape) * stored.itemsize
    if not nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    source = sources.get(stored.file, Source(stored.file))
    data = source.made()
    if data is None:
        data = memoryview(opened.read(source.file, source.first_byte + stored.start, nbytes))
    else:
        data = data[stored.start : stored.start + nbytes]
    where = opened.named(source.file or stored.file)
    if dtype is torch.bool:
        check_bytes(where, stored.key or "a tensor in it", data)
    with as_checkpoint_error(where):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(stored.shape)
