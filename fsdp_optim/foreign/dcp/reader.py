"""Folders of torch.distributed.checkpoint (DCP), as torch, torchtitan, Accelerate, Lightning and OLMo-core write them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_optim.errors import CheckpointError, shortened, wrong_use
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.foreign.dcp.full_dict import full_dict, with_optimizer_keys
from fsdp_optim.foreign.dcp.items import Items, archives_in, read_values, unread_class_in
from fsdp_optim.foreign.dcp.keys import GROUPS, Meaning, as_trees, meaning_of, recorded_meaning
from fsdp_optim.foreign.dcp.metadata import Metadata, Path, read_metadata
from fsdp_optim.foreign.dcp.probe import NAME as METADATA
from fsdp_optim.foreign.dcp.probe import summary_of
from fsdp_optim.foreign.dcp.stored_table import StoredTable
from fsdp_optim.foreign.dcp.tensor_table import ItemPlace, Tensor, TensorTable, as_table
from fsdp_optim.foreign.dcp.trainer_values import (
    WholeReading,
    classes_of,
    keys_in_parts,
    trees_of_ranks,
    with_keys_of,
    withheld,
)
from fsdp_optim.foreign.dcp.values import KEYS, OF_RANKS, OPTIM, VERSIONS
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader, versioned
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import COMMON, MODULES, SavedWeights
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.formats.base.tree_values import keys_in as tensors_in
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import plain_version

_NAME = re.compile(r"(?:([^/]+)/)?(__(\d+))?\.metadata")
_DATA = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
_OF_LIGHTNING = "meta.pt"


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
            saved, summary = _DcpContents.read(opened), own_summary(opened)
            return _reader(opened, saved, _meaning_of(opened.where, saved, summary), summary)


DCP = Dcp()


class DcpTrees(Dcp):
    """The same, with all values as trees of the trainer, whatever their names."""

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        with as_checkpoint_error(opened.where):
            saved, summary = _DcpContents.read(opened), own_summary(opened)
            return _reader(opened, saved, as_trees(opened.where, saved.paths), summary)


DCP_TREES = DcpTrees()


@dataclass(frozen=True)
class _DcpContents:
    """The metadata of all folders of a checkpoint together: as `Metadata`, and every key has a path."""

    tensors: TensorTable
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
        if len(each) > 1 and any(map(_has_both, each.values())):
            named = shortened(folder.rstrip("/") for folder in each)
            raise wrong_use(f"{opened.where}: has several checkpoints, {named}: give the path of one of them")
        files = tuple(name for names in folders.values() for name in names)
        if len(each) == 1:
            only = next(iter(each.values()))
            return cls(as_table(only.tensors), only.values, only.paths, only.digest, files)
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
            as_table(tensors),
            values,
            paths,
            hex_of("".join(metadata.digest for metadata in each.values()).encode()),
            files,
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
        if len(only.paths) == len(only.tensors) + len(only.values):
            return only  # nearly always, and there may be very many keys
        missing = {key: (key,) for keys in (only.tensors, only.values) for key in keys if key not in only.paths}
        return replace(only, paths={**only.paths, **missing})
    tensors: dict[str, Tensor] = {}
    values: dict[str, ItemPlace] = {}
    paths: dict[str, Path] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            other = tensors.setdefault(key, tensor)
            if other is not tensor:
                chunks = dict(zip((*tensor.boxes, *other.boxes), (*tensor.items, *other.items), strict=True))
                tensors[key] = Tensor(other.dtype, other.shape, tuple(chunks), tuple(chunks.values()))
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


def _meaning_of(where: str, saved: _DcpContents, summary: ManifestSummary | None) -> Meaning:
    """Return the meaning of the keys: that which the writer has recorded, or else that of their structure."""
    if summary is not None and summary.roles is not None:
        return recorded_meaning(where, saved.paths, saved.tensors, summary.roles)
    return meaning_of(where, saved.paths, saved.tensors.dimensions())


def _versions(where: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recorded versions of the code of modules, by path."""
    versions = keys.get(VERSIONS, {})
    if not isinstance(versions, Mapping):
        raise CheckpointError(f"{where}: {KEYS}: {VERSIONS} is not a dict")
    return {path: plain_version(version) for path, version in versions.items()}


def _reader(opened: Opened, saved: _DcpContents, meaning: Meaning, summary: ManifestSummary | None) -> ForeignReader:
    files = _checked_files(opened, saved)
    items = Items(opened, saved.tensors)
    stored = StoredTable(opened, saved.tensors, items)
    whole = WholeReading(opened, saved, stored, items)
    of_ranks = trees_of_ranks(meaning.extra) if summary is not None else None
    keys = whole.values(keys_in_parts(opened.where, meaning.extra) if summary is not None else {})
    apart = {*([KEYS] if summary is not None else []), *([OF_RANKS] if of_ranks is not None else [])}
    extra = whole.values({name: tree for name, tree in meaning.extra.items() if name not in apart})
    of_modules = whole.values(meaning.module_values, sys.maxsize)  # a part of the model, as large as it is
    values = read_values(opened, {key: saved.values[key] for key in meaning.optimizer_keys if key in saved.values})
    for key, value in values.items():
        if what := unread_class_in(value):
            raise CheckpointError(
                f"{opened.where}: {key}: has an object of the class {what}, which is not loaded into an optimizer: load the "
                "checkpoint as it was saved, and save the optimizer without it"
            )
    with_own_keys = partial(with_keys_of, opened.where)
    of_lightning = _of_lightning(opened)
    in_trees = with_own_keys(extra.as_trees(stored), keys.values, COMMON)
    is_withheld = any(isinstance(value, Withheld) for value in (*extra.values.values(), keys.values.get(COMMON)))
    full = full_dict(opened.where, meaning.optimizers, lambda key: values[key] if key in values else stored.get(key))
    return ForeignReader(
        opened,
        DCP.name,
        stored.named(meaning.model),
        with_optimizer_keys(opened.where, full, keys.values.get(OPTIM), classes_of(keys.values, OPTIM)),
        items.sources,
        extra_values={**with_own_keys(extra.values, keys.values, COMMON), **of_lightning},
        extra_trees={**in_trees, **of_lightning},
        trees={key: stored[key] for key in tensors_in(in_trees)},
        rank_extras=[whole.of_rank(rank, tree, keys) for rank, tree in enumerate(of_ranks or ())],
        module_values=versioned(
            _versions(opened.where, keys.values),
            with_own_keys(of_modules.values, keys.values, MODULES),
        ),
        pickled=(lambda: with_own_keys(extra.pickled(), keys.pickled(), COMMON)) if is_withheld else None,
        world_size=summary.world_size if summary is not None else _world_size(opened),
        step=summary.step if summary is not None else None,
        weights=SavedWeights(summary.weights, summary.weights_dtype) if summary is not None else SavedWeights(),
        optim_tensors=stored.named({key: key for key in meaning.optimizer_keys if key not in saved.values}),
        is_checked=True,
        metadata_digest=saved.digest,
        tells_all=True,
        files=(*saved.files, *files),
        archives=partial(archives_in, opened, saved.tensors, saved.values, _OF_LIGHTNING),
    )


def own_summary(opened: Opened) -> ManifestSummary | None:
    """Return the summary of a checkpoint that this library has saved."""
    if opened.selected not in ("", METADATA) or not opened.has(METADATA):
        return None
    with contextlib.suppress(CheckpointError):
        return summary_of(opened)
    return None


def _checked_files(opened: Opened, saved: _DcpContents) -> list[str]:
    """Return the files that have items.

    Raises CheckpointError that names a file which is missing or too short, and one of its keys.
    """
    tensors = saved.tensors
    for key in tensors.keys_of_chunks([*tensors.transforms]):
        raise _transformed(opened, next(item for item in tensors[key].items if item.transforms))
    ends = tensors.ends_of_files()
    for key, item in saved.values.items():
        if item.transforms:
            raise _transformed(opened, item)
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


def _transformed(opened: Opened, item: ItemPlace) -> CheckpointError:
    return CheckpointError(
        f"{opened.named(item.file)}: {item.key} was written through {', '.join(item.transforms)}, which cannot be read in parts: "
        "load it with torch.distributed.checkpoint, and save it without extensions"
    )


def _of_lightning(opened: Opened) -> Mapping[str, Any]:
    """Return the values of the trainer that Lightning keeps in a file of its own."""
    if _OF_LIGHTNING not in opened.names():
        return {}
    archive = read_archive(opened, _OF_LIGHTNING)
    values = archive.value if isinstance(archive.value, dict) else {_OF_LIGHTNING: archive.value}
    return {
        str(name): withheld(opened, name, what) if (what := unread_class_in(value)) else archive.materialised(value)
        for name, value in values.items()
    }


def _world_size(opened: Opened) -> int:
    """Return the number of ranks that wrote files."""
    return max((int(matched[1]) + 1 for name in opened.names() if (matched := _DATA.fullmatch(name))), default=0)
