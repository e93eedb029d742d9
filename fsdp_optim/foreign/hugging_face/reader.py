"""Folders of Hugging Face, and plain safetensors files of any origin: weights, in one file or in several with an index."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

import msgspec
from xxhash import xxh3_128

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.dcp.sharding_info import (
    OpenFile,
    check_is_whole,
    check_scalars,
    is_consolidated,
    is_shard,
    joined_chunks,
    num_ranks_of,
    ranks_beside,
    shards_in,
)
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.header import length_of_header, parse_header
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.stored_columns import StoredColumns, StoredEntries
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.formats.own.small_files import MOST_INDEX_NBYTES
from fsdp_optim.storage.base import Opened, check_inside

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_WHOLE, _WHOLE_INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _MOST_CONFIG_NBYTES = "config.json", 4 << 20
_SPLIT = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")
_OF_OUR_SAVES = re.compile(r"optim(-\d{5}-of-\d{5})?\.safetensors|extra/.+|.+\.safetensors\.sums")


class HuggingFace(ForeignFormat):
    """Weights as `save_pretrained`, `save_file` and similar tools write them; without an optimizer."""

    name = "safetensors"

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return opened.selected.endswith((_SUFFIX, _INDEX))
        try:
            names = opened.names()
        except CheckpointError:
            return False
        if NAME in names or any(_OF_OUR_SAVES.fullmatch(name) for name in names):
            return False  # of a save of this library that did not end, or has lost its manifest
        return any((name.endswith(_SUFFIX) and "/" not in name) or is_consolidated(name) for name in names)

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        return self.open_files(opened, opened.selected)

    def open_files(self, opened: Opened, selected: str) -> ForeignReader:
        """Open the file or the index `selected`; "": the folder's own choice."""
        digest, notes = xxh3_128(), list[str]()
        shards = shards_in(opened, opened.names()) if not selected else []
        if not selected and not shards:
            selected = self._chosen(opened, notes)
        files: Sequence[str] = ()
        if shards:
            opens = [_open_file(opened, name, digest) for name in shards]
            model: Mapping[str, StoredTensor] = {tensor.key: tensor for tensor in joined_chunks(opened, opens)}
        elif selected.endswith(_INDEX):
            text = opened.read_whole(selected, most_nbytes=MOST_INDEX_NBYTES)
            digest.update(text)
            listed = weight_map_of(opened.named(selected), text)
            files = sorted(set(listed.values()))
            model = whole = _whole_tensors(opened, [_open_file(opened, name, digest) for name in files])
            check_index(opened.named(selected), listed, whole.file_of_each())
            ranks = ranks_beside(opened.names()) if selected == _WHOLE_INDEX else []
            if ranks and any(not tensor.shape for tensor in model.values()):
                sharded = joined_chunks(opened, [_open_file(opened, name, digest) for name in ranks])
                check_scalars(opened, model, {tensor.key: tensor for tensor in sharded})
        else:
            files = [selected] if selected else self._files(opened)
            model = _whole_tensors(opened, [_open_file(opened, name, digest) for name in files])
        return ForeignReader(
            opened,
            self.name,
            model,
            world_size=num_ranks_of(shards),
            metadata_digest=digest.hexdigest(),
            tells_all=True,
            files=shards or files,
            is_checked=not shards,
            notes=notes,
        )

    def _chosen(self, opened: Opened, notes: list[str]) -> str:
        """Return the file or the index of a folder, in the order of transformers; "" for files without an index.

        `notes`: gets a line for the user if there is another.
        """
        names = [name for name in opened.names() if "/" not in name]
        chosen = _named_by_config(opened, names)
        if chosen:
            return chosen
        indices = [name for name in names if name.endswith(_INDEX)]
        if _WHOLE in names:
            if _WHOLE_INDEX in indices and _is_whole(opened, _WHOLE_INDEX):
                notes.append(
                    f"{opened.where}: has {_WHOLE} and {_WHOLE_INDEX}, each with weights: {_WHOLE} is read, as by transformers; "
                    f"load {opened.named(_WHOLE_INDEX)} to read the others"
                )
            return _WHOLE
        if len(indices) > 1 and _WHOLE_INDEX not in indices:
            raise CheckpointError(
                f"{opened.where}: has several indices, {', '.join(indices)}: give the path of one of them"
            )
        return _WHOLE_INDEX if _WHOLE_INDEX in indices else indices[0] if indices else ""

    def _files(self, opened: Opened) -> Sequence[str]:
        """Return the files of a folder without an index."""
        names = [name for name in opened.names() if name.endswith(_SUFFIX) and "/" not in name]
        split = [matched for name in names if (matched := _SPLIT.fullmatch(name))]
        stems = {(match[1], match[3]) for match in split}
        if len(split) == len(names) and len(stems) == 1:
            total = int(split[0][3])
            missing = sorted(set(range(1, total + 1)) - {int(match[2]) for match in split})
            if missing or len(split) != total:
                raise CheckpointError(
                    f"{opened.where}: {len(split)} of {total} files are there; number {missing[0] if missing else 0} is missing"
                )
            return names
        if len(names) > 1:
            raise CheckpointError(
                f"{opened.where}: has {len(names)} safetensors files and no index that names those which belong together: give "
                f"the path of one of them: {shortened(names)}"
            )
        return names


HUGGING_FACE = HuggingFace()


def _open_file(opened: Opened, name: str, digest: xxh3_128) -> OpenFile:
    """Return a file whose header has been read. Raises CheckpointError that names it if it is damaged."""
    path, nbytes = opened.named(name), opened.size_of(name)
    prefix = opened.read(name, 0, min(8, nbytes))
    if prefix.startswith(b"PK") and is_shard(name):
        raise CheckpointError(
            f"{path}: begins with a value that is not a tensor, which HuggingFaceStorageWriter puts where no reader finds it: "
            "save only tensors with it, and optimizers with FileSystemWriter"
        )
    text = opened.read(name, 8, length_of_header(path, prefix, nbytes))
    digest.update(prefix + text)
    return OpenFile(name, parse_header(path, text, nbytes - 8 - len(text)), 8 + len(text))


def _whole_tensors(opened: Opened, files: Sequence[OpenFile]) -> StoredColumns:
    """Return the tensors of several files, each complete in one of them.

    Raises CheckpointError if two files have the same tensor.
    """
    columns = StoredColumns(opened.request_nbytes)
    for file in files:
        check_is_whole(opened, file)
        entries = file.header.entries
        twice = columns.add(StoredEntries(file.name, entries.keys, entries, file.start))
        if twice is not None:
            raise CheckpointError(f"{opened.named(file.name)}: {twice} is in {columns.file_of(twice)} too")
    return columns


def _named_by_config(opened: Opened, names: Sequence[str]) -> str:
    """Return the file of weights that a config.json of transformers names; "" if it names none that is in the folder."""
    if _CONFIG not in names or opened.size_of(_CONFIG) > _MOST_CONFIG_NBYTES:
        return ""
    with contextlib.suppress(CheckpointError):
        config = parse_json(opened.named(_CONFIG), opened.read_whole(_CONFIG, most_nbytes=_MOST_CONFIG_NBYTES))
        chosen = config.get("transformers_weights") if isinstance(config, dict) else None
        return chosen if isinstance(chosen, str) and chosen in names and chosen.endswith((_SUFFIX, _INDEX)) else ""
    return ""


def _is_whole(opened: Opened, index: str) -> bool:
    """Return whether all files that an index names are there."""
    with contextlib.suppress(CheckpointError):
        text = opened.read_whole(index, most_nbytes=MOST_INDEX_NBYTES)
        return set(weight_map_of(opened.named(index), text).values()) <= set(opened.names())
    return False


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_map_of(path: str, text: bytes) -> Mapping[str, str]:
    """Return the file of each tensor, as an index file says. Raises CheckpointError for a damaged index."""
    with as_checkpoint_error(path):
        listed = msgspec.convert(parse_json(path, text), _ShardIndex).weight_map
        for file in dict.fromkeys(listed.values()):
            check_inside(path, file)
        return listed


def check_index(path: str, listed: Mapping[str, str], file_of: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the index and the files name the same tensors. `found`: the file of each tensor."""
    for key in {**listed, **file_of}:
        is_in = file_of.get(key, "in no file")
        if listed.get(key) != is_in:
            raise CheckpointError(f"{path}: says that {key} is in {listed.get(key)}, but it is {is_in}")
