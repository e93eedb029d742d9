"""The metadata of torch.distributed.checkpoint: the keys, the boxes of each tensor, and the item of a file that has each box.

`metadata_pickle.py` reads the file; here its content is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.metadata_pickle import (
    SavedBytes,
    SavedIndex,
    SavedMetadata,
    SavedPlace,
    SavedProperties,
    SavedTensor,
    in_words,
    is_size,
    load,
)
from fsdp_optim.foreign.dcp.metadata_tables import read_tables
from fsdp_optim.foreign.dcp.tensor_table import ItemPlace, Tensor, table_of
from fsdp_optim.foreign.dcp.values import with_apart
from fsdp_optim.formats.base.checksums import Digest
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_name

Path = tuple[str | int, ...]
"""The place of a value in the nested dicts and lists that were saved."""

_MOST_NBYTES = 1 << 31  # some 14 million chunks: a chunk takes about 150 bytes
_PIECE_NBYTES = 8 << 20  # of the file, which are read and checked at once


@dataclass(frozen=True)
class Metadata:
    """One metadata file: its tensors and its other values by key, and the place of each key in the saved tree.

    `paths`: has no entry for a key where the writer recorded none.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, ItemPlace]
    paths: Mapping[str, Path]
    digest: str = ""


def read_metadata(opened: Opened, name: str, folder: str = "") -> Metadata:
    """Read the file `name`. `folder`: the beginning of the names of files that it lists, such as "optimizer_0/".

    Raises CheckpointError if it is damaged, or was not written by torch.distributed.checkpoint.
    """
    where, nbytes = opened.named(name), opened.size_of(name)
    if nbytes > _MOST_NBYTES:
        raise CheckpointError(f"{where}: has {nbytes} bytes, and at most {_MOST_NBYTES} are allowed")

    def pieces(digest: Digest) -> Iterator[bytes]:
        for start in range(0, nbytes, _PIECE_NBYTES):
            piece = opened.read(name, start, min(_PIECE_NBYTES, nbytes - start))
            digest.add(piece)
            yield piece

    digest = Digest()
    tables = read_tables(where, pieces(digest))
    made = table_of(tables, folder) if tables is not None else None
    if tables is not None and made is not None and len(tables.paths.paths) == tables.paths.num:
        listed, paths = {*tables.tensors.keys}, tables.paths.paths
        if () in paths.values() or not paths.keys() <= listed:
            paths = {key: path for key, path in paths.items() if path and key in listed}
        return Metadata(*made, with_apart(where, paths), digest.hex)
    digest = Digest()
    saved = load(where, pieces(digest))
    with as_checkpoint_error(where):
        if not isinstance(saved, SavedMetadata):
            raise CheckpointError(
                f"{where}: has {in_words(saved)} instead of the metadata of torch.distributed.checkpoint"
            )
        return _read(where, saved, folder, digest.hex)


def _read(where: str, saved: SavedMetadata, folder: str, digest: str) -> Metadata:
    listed, stored = saved.state_dict_metadata, saved.storage_data
    if not isinstance(listed, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{where}: does not list {'keys' if not isinstance(listed, dict) else 'files'}")
    items: dict[tuple[str, Shape | None], ItemPlace] = {}
    for index, item in stored.items():
        if not isinstance(index, SavedIndex) or not isinstance(item, SavedPlace):
            raise CheckpointError(
                f"{where}: lists {in_words(index)} in {in_words(item)}; only the writers of torch.distributed.checkpoint and of "
                "OLMo-core are known"
            )
        place = ItemPlace(folder + item.file, item.start, item.nbytes, item.transforms, index.fqn)
        items[index.fqn, index.offset] = place
    tensors: dict[str, Tensor] = {}
    values: dict[str, ItemPlace] = {}
    for key, value in listed.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{where}: has the key {key!r}, which is no str")
        if isinstance(value, SavedTensor):
            tensors[key] = _tensor(where, key, value, items)
        elif isinstance(value, SavedBytes):
            if (key, None) not in items:
                raise CheckpointError(f"{where}: {key}: is in no file")
            values[key] = items[key, None]
        else:
            raise CheckpointError(f"{where}: {key}: is {in_words(value)}, neither a tensor nor bytes")
    return Metadata(tensors, values, with_apart(where, _paths(where, saved.planner_data, listed)), digest)


def _tensor(where: str, key: str, value: SavedTensor, items: Mapping[tuple[str, Shape | None], ItemPlace]) -> Tensor:
    dtype = value.properties.dtype if isinstance(value.properties, SavedProperties) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: {key}: has {in_words(dtype)} instead of a dtype")
    for size in (value.size, *(size for chunk in value.chunks for size in (chunk.offsets, chunk.sizes))):
        if not is_size(size):
            raise CheckpointError(f"{where}: {key}: has {size!r:.100} instead of a size of numbers from 0 on")
    boxes = tuple([(chunk.offsets, chunk.sizes) for chunk in value.chunks if 0 not in chunk.sizes])
    try:
        places = tuple([items[key, offsets] for offsets, _ in boxes])
    except KeyError as error:
        raise CheckpointError(f"{where}: {key}: the chunk at {list(error.args[0][1])} is in no file") from None
    return Tensor(dtype_name(dtype), value.size, boxes, places)


def _paths(where: str, planner_data: Any, keys: Mapping[str, Any]) -> dict[str, Path]:
    """Return the places of keys, where the writer flattened nested dicts and lists. Other planners keep other things there."""
    if not isinstance(planner_data, dict):
        return {}
    paths = {}
    for key, path in planner_data.items():
        if key in keys and isinstance(path, (tuple, list)) and path:
            if not all(type(part) in (str, int) for part in path):
                raise CheckpointError(f"{where}: {key}: has the place {path!r}, which is no list of keys")
            paths[key] = tuple(path)
    return paths
