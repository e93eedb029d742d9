"""The chunks in safetensors files of torch.distributed.checkpoint: each file has one chunk of each of its tensors.

The metadata of such a file say where its chunks begin in their tensors. The shape of a tensor is in no file: it ends where its
last chunk ends, as torch's own reader takes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.dcp.boxes import Cuts
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.header import Header, ReadHeader
from fsdp_optim.formats.base.header_entries import HeaderEntry
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.protocols import Chunks, StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_SHARDED = "sharded"  # the folder in which the files of ranks are where they are consolidated too
_INDEX = "model.safetensors.index.json"
_KEY = "DCP_SHARDING_INFO"


def is_shard(name: str) -> bool:
    """Return whether a file has the name that HuggingFaceStorageWriter(save_distributed=True) gives to the file of one rank."""
    return _SHARD.fullmatch(name.rpartition("/")[2]) is not None


def is_consolidated(name: str) -> bool:
    """Return whether a file is one rank's, in the folder whose files torch consolidates into one checkpoint."""
    return name.startswith(f"{_SHARDED}/") and is_shard(name)


class _Chunk(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


def offsets_in(path: str, header: Header) -> Mapping[str, Shape] | None:
    """Return the first element of each chunk of a file, by key; None for a file without chunks.

    Raises CheckpointError where the metadata do not describe the tensors of the file.
    """
    if _KEY not in header.metadata:
        return None
    where = f"{path}: {_KEY} in its metadata"
    with as_checkpoint_error(where):
        listed = msgspec.convert(parse_json(where, header.metadata[_KEY].encode()), dict[str, _Chunk])
    by_key = {}
    for entry in header.entries:
        offsets = listed[entry.key].saved_offsets if entry.key in listed else None
        if offsets is None or len(offsets) != len(entry.shape) or min(offsets, default=0) < 0:
            begins = "does not say where" if offsets is None else f"says at {list(offsets)}"
            raise CheckpointError(
                f"{where}: {begins} {entry.key}, of shape {list(entry.shape)}, begins: it was changed"
            )
        by_key[entry.key] = offsets
    return by_key


@dataclass(frozen=True)
class OpenFile:
    """A safetensors file whose header has been read. `start`: the byte at which its data begins."""

    name: str
    header: ReadHeader
    start: int


def check_is_whole(opened: Opened, file: OpenFile) -> None:
    """Raise CheckpointError for the file of one rank, which has parts of tensors, in the place of a whole one."""
    path = opened.named(file.name)
    cut = {key: list(first) for key, first in (offsets_in(path, file.header) or {}).items() if any(first)}
    if cut or is_shard(file.name):
        key = next(iter(cut), "")
        what = f": {key} begins at {cut[key]} here" if cut else ""
        folder = path.rpartition("/")[0] or "."
        raise CheckpointError(
            f"{path}: is the part of one rank of a checkpoint of torch.distributed.checkpoint, not a checkpoint{what}: give the "
            f"path of the folder with the files of all ranks, as in fsdp_optim.load({folder!r}, ...); if there are no others, "
            "save again with HuggingFaceStorageWriter(..., save_distributed=True)"
        )


def shards_in(opened: Opened, names: Sequence[str]) -> list[str]:
    """Return the files of all ranks in a folder, if it has such files.

    `names`: all files of the folder. Raises CheckpointError where they are not of one checkpoint.
    """
    here = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    shards = [matched for name in here if (matched := _SHARD.fullmatch(name))]
    if not shards:
        if not any(name in ("model.safetensors", _INDEX) for name in names) and any(map(is_consolidated, names)):
            raise CheckpointError(
                f"{opened.where}: has no index, and the files of ranks in its folder {_SHARDED}: torch was killed while it made "
                f"one checkpoint of them (enable_consolidation=True), so the files here may be unfinished: give the path of "
                f"{opened.named(_SHARDED)}, which has all tensors"
            )
        return []
    others = [name for name in names if name == _INDEX or (name in here and not is_shard(name))]
    if others:
        raise CheckpointError(
            f"{opened.where}: has files of ranks, such as {shards[0][0]}, and {shortened(others)}: keep the files of one "
            f"checkpoint in the folder, or give the path of {opened.named(_INDEX if _INDEX in others else others[0])}"
        )
    totals = sorted({int(shard[3]) for shard in shards})
    if len(totals) > 1:
        raise CheckpointError(
            f"{opened.where}: has files of two checkpoints, with {totals[0]} and with {totals[1]} files for each rank: remove "
            "those that are not of the last save"
        )
    return [shard[0] for shard in shards]


def check_scalars(opened: Opened, made: Mapping[str, StoredTensor], sharded: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError where torch has consolidated the files of ranks, and a tensor without dimensions differs.

    torch 2.13 copies no such tensor: it leaves zeros. `made`: the consolidated tensors; `sharded`: the tensors of the ranks.
    """
    for key, stored in made.items():
        other = sharded.get(key)
        if stored.shape or other is None or (other.dtype, other.shape) != (stored.dtype, stored.shape):
            continue
        bytes_of = [opened.read(*each.place_on(each.placement.ranks[0]), each.itemsize) for each in (stored, other)]
        if bytes_of[0] != bytes_of[1]:
            raise CheckpointError(
                f"{opened.named(stored.file)}: {key} has other bytes ({bytes_of[0].hex()}) than in the files of the ranks "
                f"({bytes_of[1].hex()}), of which torch has made this file (enable_consolidation=True): torch leaves zeros for "
                "tensors without dimensions, so give the path of a folder with the files of the ranks alone "
                f"({opened.named(other.file)})"
            )


def ranks_beside(names: Sequence[str]) -> list[str]:
    """Return the files of ranks that torch may have consolidated into the checkpoint of a folder. `names`: all its files."""
    return [name for name in names if is_consolidated(name)] or [
        name for name in names if "/" not in name and is_shard(name)
    ]


def num_ranks_of(names: Sequence[str]) -> int:
    """Return the number of ranks that wrote files with these names, as far as the names say."""
    return max((int(matched[1]) for name in names if (matched := _SHARD.fullmatch(name))), default=0)


@dataclass(frozen=True)
class _FileChunk:
    """One chunk of a tensor: where it begins in the tensor, and in its file."""

    file: str
    entry: HeaderEntry
    first: Shape
    start: int


def joined_chunks(opened: Opened, files: Sequence[OpenFile]) -> Iterator[StoredTensor]:
    """Yield the tensors in the files of all ranks. Raises CheckpointError where chunks overlap, or elements are in no file."""
    by_key: dict[str, list[_FileChunk]] = {}
    for file in files:
        path = opened.named(file.name)
        offsets = offsets_in(path, file.header)
        if offsets is None:
            raise CheckpointError(
                f"{path}: has no {_KEY} in its metadata, so its tensors have no place: it was changed"
            )
        for entry in file.header.entries:
            part = _FileChunk(file.name, entry, offsets[entry.key], file.start + entry.start)
            by_key.setdefault(entry.key, []).append(part)
    cuts, doubts = Cuts(), _doubts([file.name for file in files])
    for key, parts in by_key.items():
        yield _joined(opened, key, parts, cuts, doubts)


def _joined(opened: Opened, key: str, parts: Sequence[_FileChunk], cuts: Cuts, doubts: str) -> StoredTensor:
    name, entry = f"{opened.where}: {key}", parts[0].entry
    for other in parts:
        if (other.entry.dtype, len(other.first)) != (entry.dtype, len(entry.shape)):
            raise CheckpointError(
                f"{name}: is {entry.dtype} of shape {list(entry.shape)} in {parts[0].file}, and {other.entry.dtype} of shape "
                f"{list(other.entry.shape)} in {other.file}: the files are of different saves"
            )
    ends = [tuple(map(sum, zip(part.first, part.entry.shape, strict=True))) for part in parts]
    shape = tuple(map(max, zip(*ends, strict=True)))
    filled = [part for part in parts if 0 not in part.entry.shape]
    try:
        placement = cuts.placement(name, shape, tuple((part.first, part.entry.shape) for part in filled))
    except CheckpointError as error:
        raise CheckpointError(f"{error} ({doubts})") from error
    places = {-1 - number: (part.file, part.start) for number, part in enumerate(filled)}
    file, start = places.get(-1, (parts[0].file, parts[0].start))
    chunks = Chunks(placement, places)
    return StoredTensor(key, entry.dtype, shape, file, start, request_nbytes=opened.request_nbytes, chunks=chunks)


def _doubts(names: Sequence[str]) -> str:
    """Return the possible reasons why the chunks of files do not fit together."""
    num = num_ranks_of(names)
    there = {int(matched[1]) for name in names if (matched := _SHARD.fullmatch(name))}
    missing = [f"shard-{number:05}" for number in range(1, num + 1) if number not in there]
    if missing:
        return f"there are no files of {shortened(missing)}: copy them here too"
    return f"its files are of {num} ranks: if another number of ranks saved last, remove the files of the save before"
