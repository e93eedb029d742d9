"""Folders of torch.distributed.checkpoint (DCP), as torch, torchtitan, Accelerate, Lightning and OLMo-core write them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError, shortened, wrong_use
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.foreign.dcp.boxes import Cuts
from fsdp_optim.foreign.dcp.full_dict import filled, full_dict, keys_in
from fsdp_optim.foreign.dcp.items import Items, LazyChunkPlaces, archives_in, read_values, unread_class_in
from fsdp_optim.foreign.dcp.keys import GROUPS, meaning_of
from fsdp_optim.foreign.dcp.metadata import Metadata, Path, Tensor, read_metadata
from fsdp_optim.foreign.dcp.metadata_pickle import ItemPlace
from fsdp_optim.foreign.dcp.probe import NAME as METADATA
from fsdp_optim.foreign.dcp.probe import summary_of
from fsdp_optim.foreign.dcp.values import KEYS, OF_RANKS, with_keys
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import COMMON, Chunks, SavedWeights, StoredTensor, rank_extra_name
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.memory import dtype_named
from fsdp_optim.storage.base import Opened

_NAME = re.compile(r"(?:([^/]+)/)?(__(\d+))?\.metadata")
_DATA = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
_OF_LIGHTNING = "meta.pt"
_MOST_EXTRA_NBYTES = 64 << 20  # in one value of the trainer, which every rank reads whole


class Dcp(ForeignFormat):
    """Sharded checkpoints with a `.metadata` file, in one folder, or in one for the model and one for each optimizer."""

    name = "dcp"

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return _NAME.fullmatch(opened.selected) is not None
        try:
            return any(_NAME.fullmatch(name) for name in opened.names())
        except CheckpointError:
            return False

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        with as_checkpoint_error(opened.where):
            return _reader(opened, _DcpContents.read(opened))


DCP = Dcp()


@dataclass(frozen=True)
class _DcpContents:
    """The metadata of all folders of a checkpoint together: as `Metadata`, and every key has a path."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, ItemPlace]
    paths: Mapping[str, Path]
    digest: str
    files: tuple[str, ...]

    @classmethod
    def read(cls, opened: Opened) -> _DcpContents:
        """Read the metadata of a place. Raises CheckpointError where it has several checkpoints."""
        folders = _folders(opened)
        each = {
            folder: _joined([read_metadata(opened, name, folder) for name in names])
            for folder, names in folders.items()
        }
        whole = [folder for folder, metadata in each.items() if _has_both(metadata)]
        if len(each) > 1 and whole:
            named = shortened(folder.rstrip("/") for folder in each)
            raise wrong_use(f"{opened.where}: has several checkpoints, {named}: give the path of one of them")
        files = tuple(name for names in folders.values() for name in names)
        if len(each) == 1:
            only = next(iter(each.values()))
            return cls(only.tensors, only.values, only.paths, only.digest, files)
        tensors = {
            f"{folder}{key}": entry for folder, metadata in each.items() for key, entry in metadata.tensors.items()
        }
        values = {
            f"{folder}{key}": entry for folder, metadata in each.items() for key, entry in metadata.values.items()
        }
        paths = {
            f"{folder}{key}": (folder.rstrip("/"), *path)
            for folder, metadata in each.items()
            for key, path in metadata.paths.items()
        }
        return cls(
            tensors, values, paths, hex_of("".join(metadata.digest for metadata in each.values()).encode()), files
        )


def _folders(opened: Opened) -> dict[str, list[str]]:
    """Return the names of the metadata files, by folder: one file, or one of each rank where each saved by itself."""
    by_folder: dict[str, dict[int, str]] = {}
    for name in [opened.selected] if opened.selected else opened.names():
        matched = _NAME.fullmatch(name)
        if matched is not None:
            folder = f"{matched[1]}/" if matched[1] else ""
            by_folder.setdefault(folder, {})[int(matched[3]) if matched[3] else -1] = name
    if "" in by_folder:
        by_folder = {"": by_folder[""]}
    folders = {}
    for folder, by_rank in by_folder.items():
        ranks = sorted(by_rank)
        if ranks[0] >= 0 and ranks != list(range(len(ranks))):
            missing = next(rank for rank in range(len(ranks)) if rank not in by_rank)
            raise CheckpointError(
                f"{opened.named(f'{folder}__{missing}.metadata')}: is missing; the checkpoint is incomplete"
            )
        folders[folder] = [by_rank[-1]] if ranks[0] < 0 else [by_rank[rank] for rank in ranks]
    return folders


def _joined(parts: Sequence[Metadata]) -> Metadata:
    """Join the metadata of ranks that saved without each other. Of a value that several ranks have, the first rank's counts."""
    if len(parts) == 1:
        only = parts[0]
        return replace(only, paths={key: only.paths.get(key, (key,)) for key in (*only.tensors, *only.values)})
    tensors: dict[str, Tensor] = {}
    values: dict[str, ItemPlace] = {}
    paths: dict[str, Path] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            other = tensors.setdefault(key, tensor)
            if other is not tensor:
                chunks = dict(zip((*tensor.boxes, *other.boxes), (*tensor.items, *other.items), strict=True))
                tensors[key] = replace(other, boxes=tuple(chunks), items=tuple(chunks.values()))
        for key, item in part.values.items():
            values.setdefault(key, item)
        for key in (*part.tensors, *part.values):
            paths.setdefault(key, part.paths.get(key, (key,)))
    return Metadata(tensors, values, paths, hex_of("".join(part.digest for part in parts).encode()))


def _has_both(metadata: Metadata) -> bool:
    """Return whether a folder has an optimizer and tensors beside it."""
    roots = {
        ".".join(map(str, path)).partition(GROUPS)[0]
        for path in metadata.paths.values()
        if GROUPS in ".".join(map(str, path))
    }
    return bool(roots) and any(not key.startswith(tuple(roots)) for key in metadata.tensors)


# ------------------------------------------------------------------------------------------- the reader


def _reader(opened: Opened, saved: _DcpContents) -> ForeignReader:
    meaning = meaning_of(opened.where, saved.paths, {key: len(tensor.shape) for key, tensor in saved.tensors.items()})
    files = _checked_files(opened, saved)
    items = Items(opened, saved.tensors)
    stored = dict(_stored(opened, saved, items))
    extra = _WholeValues.of(opened, saved, stored, items, meaning.extra)
    of_modules = _WholeValues.of(opened, saved, stored, items, meaning.module_values)
    of_optimizers = [key for tree in meaning.optimizers for key in keys_in(tree)]
    values = read_values(opened, {key: saved.values[key] for key in of_optimizers if key in saved.values})
    for key, value in values.items():
        if what := unread_class_in(value):
            raise CheckpointError(
                f"{opened.where}: {key}: has an object of the class {what}, which is not loaded into an optimizer: load the "
                "checkpoint as it was saved, and save the optimizer without it"
            )
    summary = _own_summary(opened)

    def pickled() -> Mapping[str, Any]:
        return extra.pickled() if summary is None else _of_ranks(opened.where, extra.pickled())[0]

    given, rank_extras = _of_ranks(opened.where, extra.values if summary is not None else {})
    in_trees = extra.as_trees(stored)
    of_lightning = _of_lightning(opened)
    return ForeignReader(
        opened,
        DCP.name,
        {name: replace(stored[key], key=name) for name, key in meaning.model.items()},
        full_dict(
            opened.where, [filled(tree, lambda key: values.get(key, stored.get(key))) for tree in meaning.optimizers]
        ),
        items.sources,
        extra_values={**(extra.values if summary is None else given), **of_lightning},
        extra_trees={**(in_trees if summary is None else _of_ranks(opened.where, in_trees)[0]), **of_lightning},
        trees={key: stored[key] for tree in meaning.extra.values() for key in keys_in(tree) if key in stored},
        rank_extras=rank_extras,
        module_values={
            name: value if isinstance(value, Withheld) else [None, value] for name, value in of_modules.values.items()
        },
        pickled=pickled if any(isinstance(value, Withheld) for value in extra.values.values()) else None,
        world_size=summary.world_size if summary is not None else _world_size(opened),
        step=summary.step if summary is not None else None,
        weights=SavedWeights(summary.weights, summary.weights_dtype) if summary is not None else SavedWeights(),
        metadata_digest=saved.digest,
        files=(*saved.files, *files),
        archives=partial(archives_in, opened, saved.tensors, saved.values, _OF_LIGHTNING),
    )


def _own_summary(opened: Opened) -> ManifestSummary | None:
    """Return the summary of a checkpoint that this library has saved."""
    if opened.selected or not opened.has(METADATA):
        return None
    with contextlib.suppress(CheckpointError):
        return summary_of(opened)
    return None


def _of_ranks(where: str, extra: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Split the trainer's values that this library has saved into the common ones and each rank's own."""
    keys, of_ranks = extra.get(KEYS, {}), extra.get(OF_RANKS)
    if not isinstance(keys, Mapping):
        raise CheckpointError(f"{where}: {KEYS}: is not a dict")
    rest = {name: value for name, value in extra.items() if name not in (OF_RANKS, KEYS)}
    common = with_keys(where, rest, keys[COMMON]) if COMMON in keys else rest
    if of_ranks is None:
        return common, []
    if not isinstance(of_ranks, Mapping) or set(of_ranks) != {str(rank) for rank in range(len(of_ranks))}:
        return {**common, OF_RANKS: of_ranks}, []
    by_rank = []
    for rank in range(len(of_ranks)):
        listed = keys.get(rank_extra_name(rank))
        value = of_ranks[str(rank)]
        by_rank.append(value if listed is None else with_keys(where, value, listed))
    return common, by_rank


@dataclass(frozen=True)
class _WholeValues:
    """Values that every rank reads whole: trees of them by name, and the items of their keys.

    `apart`: the tensors, already read, that are in no archive of torch.save.
    """

    opened: Opened
    trees: Mapping[str, Any]
    items: Mapping[str, ItemPlace]
    apart: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    loaded: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        opened: Opened,
        saved: _DcpContents,
        stored: Mapping[str, StoredTensor],
        places: Items,
        trees: Mapping[str, Any],
    ) -> _WholeValues:
        """Read the values. Values that are too large, or have objects of unknown classes, are withheld."""
        nbytes = {name: sum(_nbytes(stored, key) for key in keys_in(tree)) for name, tree in trees.items()}
        read = [key for name, tree in trees.items() if nbytes[name] <= _MOST_EXTRA_NBYTES for key in keys_in(tree)]
        apart = {key: made for key in read if (made := _empty(saved, key)) is not None}
        apart.update(places.read_apart(read))
        read += [key for tree in trees.values() for key in keys_in(tree) if key in saved.values]
        items = {
            key: item for key in dict.fromkeys(read) if key not in apart and (item := _item(saved, key)) is not None
        }
        loaded = {**read_values(opened, items), **apart}
        values: dict[str, Any] = {}
        for name, tree in trees.items():
            there = [key for key in keys_in(tree) if key in loaded]
            if there != [*keys_in(tree)]:
                values[str(name)] = Withheld(
                    f"{opened.where}: {name}: has tensors of {nbytes[name]} bytes that are neither the model's nor the "
                    "optimizer's, and that are large or cut: they are not read",
                    is_unsafe=False,
                )
                continue
            value = filled(tree, loaded.__getitem__)
            what = unread_class_in(value)
            values[str(name)] = value if not what else _withheld(opened, name, what)
        return cls(opened, trees, items, apart, values, loaded)

    def as_trees(self, stored: Mapping[str, StoredTensor]) -> Mapping[str, Any]:
        """Return the values with an `InFile` in the place of each tensor that is an item of its own."""
        made: dict[str, Any] = {}
        for name, tree in self.trees.items():
            value = filled(tree, lambda key: InFile(key) if key in stored else self.loaded[key])
            what = unread_class_in(value)
            made[str(name)] = value if not what else _withheld(self.opened, name, what)
        return made

    def pickled(self) -> Mapping[str, Any]:
        """Return the values with objects of all classes, which can run any code."""
        withheld = [name for name, value in self.values.items() if isinstance(value, Withheld)]
        loaded = read_values(
            self.opened,
            {key: self.items[key] for name in withheld for key in keys_in(self.trees[name]) if key in self.items},
            allow_pickle=True,
        )
        loaded.update(self.apart)
        there = {name for name in withheld if all(key in loaded for key in keys_in(self.trees[name]))}
        made = {name: filled(self.trees[name], loaded.__getitem__) for name in there}
        return {**self.values, **made}


def _withheld(opened: Opened, name: object, what: str) -> Withheld:
    return Withheld(
        f"{opened.where}: {name}: has an object of the class {what}: allow_pickle=True makes it, and can run any "
        "code of its author"
    )


def _checked_files(opened: Opened, saved: _DcpContents) -> list[str]:
    """Return the files that have items.

    Raises CheckpointError that names a file which is missing or too short, and one of its keys.
    """
    ends: dict[str, tuple[int, str]] = {}
    items = ((item, key) for key, tensor in saved.tensors.items() for item in tensor.items)
    for item, key in (*items, *((item, key) for key, item in saved.values.items())):
        if item.transforms:
            raise CheckpointError(
                f"{opened.named(item.file)}: {key} was written through {', '.join(item.transforms)}, which "
                "cannot be read in parts: load it with torch.distributed.checkpoint, and save it without extensions"
            )
        end = item.start + item.nbytes
        if item.file not in ends or end > ends[item.file][0]:
            ends[item.file] = (end, key)
    there = set(opened.names())
    for file, (end, key) in ends.items():
        nbytes = opened.nbytes_of(file) if file in there else -1
        if nbytes < 0:
            raise CheckpointError(f"{opened.named(file)}: is missing; the checkpoint is incomplete: {key} is in it")
        if nbytes < end:
            raise CheckpointError(
                f"{opened.named(file)}: has {nbytes} bytes, and {key} ends at byte {end}: it was cut short"
            )
    return list(ends)


def _stored(opened: Opened, saved: _DcpContents, items: Items) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every tensor by key, without its elements. Raises CheckpointError where its chunks are not the whole tensor."""
    cuts = Cuts()
    for key, tensor in saved.tensors.items():
        name = f"{opened.where}: {key}"
        placement = cuts.placement(name, tensor.shape, tensor.boxes)
        itemsize = dtype_named(tensor.dtype).itemsize
        for (_, sizes), item in zip(tensor.boxes, tensor.items, strict=True):
            if prod(sizes) * itemsize > item.nbytes:
                raise CheckpointError(
                    f"{name}: a chunk of the sizes {list(sizes)} has {prod(sizes) * itemsize} bytes, but {item.nbytes} in its "
                    "file"
                )
        yield (
            key,
            StoredTensor(
                key,
                tensor.dtype,
                tensor.shape,
                "",
                tensor.items[0].start if tensor.items else 0,
                request_nbytes=opened.request_nbytes,
                chunks=Chunks(placement, LazyChunkPlaces(items, key, tensor), is_checked=True),
            ),
        )


def _item(saved: _DcpContents, key: str) -> ItemPlace | None:
    """Return the item with the whole value; None for a tensor in several chunks or without elements."""
    if key in saved.values:
        return saved.values[key]
    items = saved.tensors[key].items
    return items[0] if len(items) == 1 else None


def _empty(saved: _DcpContents, key: str) -> torch.Tensor | None:
    """Return a tensor without elements, which is in no file; None for all other values."""
    tensor = saved.tensors.get(key)
    if tensor is None or tensor.items or 0 not in tensor.shape:
        return None
    return torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))


def _nbytes(stored: Mapping[str, StoredTensor], key: str) -> int:
    return stored[key].placement.numel * stored[key].itemsize if key in stored else 0


def _of_lightning(opened: Opened) -> Mapping[str, Any]:
    """Return the values of the trainer that Lightning keeps in a file of its own."""
    if _OF_LIGHTNING not in opened.names():
        return {}
    archive = read_archive(opened, _OF_LIGHTNING)
    values = archive.value if isinstance(archive.value, dict) else {_OF_LIGHTNING: archive.value}
    return {
        str(name): _withheld(opened, name, what) if (what := unread_class_in(value)) else archive.materialised(value)
        for name, value in values.items()
    }


def _world_size(opened: Opened) -> int:
    """Return the number of ranks that wrote files."""
    return max((int(matched[1]) + 1 for name in opened.names() if (matched := _DATA.fullmatch(name))), default=0)
