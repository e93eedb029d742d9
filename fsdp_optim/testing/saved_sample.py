"""A checkpoint of any format for its conformance suite, written as one rank in the order of the calls of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.extents import Extent, write_extents
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra, StoredOptim
from fsdp_optim.formats.base.protocols import (
    COMMON,
    Format,
    Half,
    PlannedFile,
    PlannedTensor,
    Stamp,
    StoredTensor,
    WrittenFiles,
    rank_extra_name,
    written,
)
from fsdp_optim.formats.base.saved_optim import saved_optim
from fsdp_optim.storage.base import Store
from fsdp_optim.tensors.memory import dtype_name

Tensors: TypeAlias = Mapping[str, torch.Tensor]

NUM_RANKS = 2
"""The world size of the checkpoints that the tests write."""


@dataclass(frozen=True)
class SavedSample:
    """A checkpoint in a store. `files`: the bytes of each file, by name. `manifest`: the name of the file that was put last."""

    store: Store
    files: Mapping[str, bytes]
    manifest: str


EXTRAS: Mapping[str, Any] = {
    COMMON: {"step": 7, "t": torch.ones(2)},
    rank_extra_name(0): [0],
    rank_extra_name(1): [1],
}


def save_as(
    format: Format,
    store: Store,
    halves: Mapping[Half, Tensors],
    description: OptimDescription | None,
    extras: Mapping[str, Any],
    *,
    most_nbytes: int = 1 << 40,
) -> SavedSample:
    """Write a checkpoint as one rank, in the order of the calls of a conversion."""
    writer = written(format).writer()
    prepared = writer.prepare(_index_of(halves, description, extras), allow_pickle=False, records={})
    small = dict(prepared.files)
    planned = {
        half: _planned(half, tensors) for half, tensors in halves.items() if half == "model" or description is not None
    }
    files = writer.files(planned, prepared.shared, most_nbytes=most_nbytes, num_ranks=NUM_RANKS)
    staging = store.begin(overwrite=False, durable=False)
    store_writer = store.join(staging.address, durable=False, who="rank 0")
    rows = {}
    for file in files:
        store_writer.create(file.name, file.nbytes, file.head)
        section = file.section(partial(store_writer.write, file.name))
        extents = [Extent(start, _bytes_in(file, index, halves)) for index, start in enumerate(file.starts)]
        rows[file.name] = [write_extents(section, extents, file.segment_nbytes)]
    for name, data in small.items():
        store_writer.put(name, data)
    staging.seal([file.name for file in files], [store_writer.finish()], durable=False)
    results = WrittenFiles(rows, {name: writer.info_of(data) for name, data in small.items()})
    names = [*small, *(file.name for file in files)]
    last = list(writer.last(prepared, files, results, Stamp(staging.token, 5, step=70)))
    for name, data in last[:-1]:
        staging.put(name, data, durable=False)
        names.append(name)
    manifest, data = last[-1]
    staging.commit(manifest, data, durable=False)
    with store.open() as opened:
        content = {name: opened.read(name, 0, opened.size_of(name)) for name in names}
    return SavedSample(store, content | {manifest: data}, manifest)


def _index_of(
    halves: Mapping[Half, Tensors], description: OptimDescription | None, extras: Mapping[str, Any]
) -> CheckpointIndex:
    """Return the index of the checkpoint that is written."""

    def stored(half: Half) -> dict[str, StoredTensor]:
        items = halves.get(half, {}).items()
        return {key: StoredTensor(key, dtype_name(tensor.dtype), tuple(tensor.shape), "", 0) for key, tensor in items}

    def read(tensors: Sequence[StoredTensor]) -> list[torch.Tensor]:
        return [halves["optim"][entry.key] for entry in tensors]

    weights, state = stored("model"), stored("optim")
    aliases = {"other": "large"} if "large" in weights else {}
    optim = None
    if description is not None:
        saved = saved_optim("the sample", description, state)
        optim = StoredOptim(state, lambda *_: saved, read=read)
    facts = Facts("a sample", NUM_RANKS)
    return CheckpointIndex(
        "a sample", weights, facts, aliases, optim, {name: KnownExtra(value) for name, value in extras.items()}
    )


def _planned(half: Half, tensors: Tensors) -> list[PlannedTensor]:
    """Return the tensors with the widest elements first, as the library orders them."""
    ordered = sorted(tensors, key=lambda key: -tensors[key].itemsize)
    return [PlannedTensor(key, dtype_name(tensors[key].dtype), tuple(tensors[key].shape), half) for key in ordered]


def _bytes_in(file: PlannedFile, index: int, halves: Mapping[Half, Tensors]) -> memoryview:
    """Return the bytes of one of a file's tensors, or of the slice of it that the file has."""
    planned = file.tensors[index]
    tensor = halves[planned.half][planned.key]
    if not file.slices:
        return bytes_of(tensor)
    first, stop = file.slices[index]
    return bytes_of(tensor)[first * tensor.itemsize : stop * tensor.itemsize]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(bytearray())
