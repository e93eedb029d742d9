"""The common part of formats with one file per rank: the files by their numbers, and values on which ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from msgspec import structs
from xxhash import xxh3_128

from fsdp_optim.errors import CheckpointError, LayoutError, counted_noun, shortened
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, read_archive
from fsdp_optim.foreign.reader import ForeignValues, Source, versioned
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.index import stored_in
from fsdp_optim.formats.base.protocols import Chunks, StoredTensor
from fsdp_optim.formats.base.unread import Unread, unread_in
from fsdp_optim.layout import FlatRuns, Placement, Shape
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import bytes_in_memory
from fsdp_optim.tensors.model_dict import is_extra_state, versions_beside

_MOST_NAMED = 8
_MOST_EXTRA_NBYTES = 16 << 20  # of tensors among the values of the trainer, in one value


class ShardStandIn:
    """The parent of stand-ins for a rank's part of a tensor."""


class UnreadableOptimError(CheckpointError):
    """The files do not say whose the optimizer's state is. The weights can be loaded without it."""


def unreadable(reason: UnreadableOptimError) -> Mapping[str, Any]:
    """Return a full dict that is refused with this reason when an optimizer is loaded from it, and not before."""
    return {"state": {}, "param_groups": [{"params": [0]}], "unknown_order": str(reason)}


def complete(where: str, file_of_rank: Mapping[int, str], world_size: int = 0) -> tuple[str, ...]:
    """Return the files of ranks 0, 1, ... in order. `world_size`: the number of ranks that saved, if known.

    Raises CheckpointError that names the ranks whose files are missing.
    """
    num = world_size or (max(file_of_rank) + 1 if file_of_rank else 0)
    missing = num - sum(rank < num for rank in file_of_rank)
    if missing or not file_of_rank:
        first = [rank for rank in range(min(num, len(file_of_rank) + _MOST_NAMED)) if rank not in file_of_rank][
            :_MOST_NAMED
        ]
        ranks = ", ".join(map(str, first)) + (", ..." if missing > len(first) else "")
        raise CheckpointError(
            f"{where}: the files of {counted_noun(missing, 'rank')} are missing, of {num}: {ranks}; "
            f"there are {shortened(sorted(file_of_rank.values())) or 'none'}"
        )
    beyond = sorted(rank for rank in file_of_rank if rank >= num)
    if beyond:
        raise CheckpointError(
            f"{where}: {file_of_rank[beyond[0]]} is the file of a rank that did not save: {counted_noun(num, 'rank')} saved"
        )
    return tuple(file_of_rank[rank] for rank in range(num))


def by_rank(where: str, numbered: Iterable[tuple[int, str]]) -> dict[int, str]:
    """File by rank. Raises CheckpointError if two files are of one rank."""
    file_of_rank: dict[int, str] = {}
    for rank, name in numbered:
        if file_of_rank.setdefault(rank, name) != name:
            raise CheckpointError(
                f"{where}: {file_of_rank[rank]} and {name} are both files of rank {rank}: remove one of them"
            )
    return file_of_rank


@dataclass(frozen=True)
class RankFiles:
    """One archive of each rank, in the order of the ranks."""

    opened: Opened
    names: tuple[str, ...]
    archives: tuple[TorchArchive, ...]

    @classmethod
    def read(
        cls, opened: Opened, names: Sequence[str], stand_ins: Mapping[str, Callable[..., Any]] | None = None
    ) -> RankFiles:
        """Return the archives in files. Reads their metadata only."""
        archives = [read_archive(opened, name, stand_ins=stand_ins or {}) for name in names]
        return cls(opened, tuple(names), tuple(archives))

    def some(self, ranks: Sequence[int]) -> RankFiles:
        """Return the files of some ranks, in this order."""
        return RankFiles(
            self.opened, tuple(self.names[rank] for rank in ranks), tuple(self.archives[rank] for rank in ranks)
        )

    @property
    def num(self) -> int:
        return len(self.names)

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        joined: dict[str, Source] = {}
        for archive in self.archives:
            joined.update(archive.sources)
        return joined

    @cached_property
    def digest(self) -> str:
        joined = xxh3_128()
        for archive in self.archives:
            joined.update(f"{archive.digest},".encode())
        return joined.hexdigest()

    def damaged(self, rank: int, what: str) -> CheckpointError:
        return CheckpointError(f"{self.opened.named(self.names[rank])}: {what}")

    def of_another_save(self, rank: int, other: int, what: str) -> CheckpointError:
        """Return the error for two whole files that do not belong together."""
        return self.damaged(rank, f"{what} than in {self.names[other]}: the files are not of one save")

    def dicts(self, values: Sequence[Any], what: str) -> list[Mapping[Any, Any]]:
        """Return the same values. Each value must be a dict."""
        for rank, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise self.damaged(rank, f"{what} is a {type(value).__name__}, not a dict")
        return list(values)

    def agreed(self, values: Mapping[int, Any], what: str) -> Any:
        """Return the value that is the same in the files of all these ranks. Raises CheckpointError that names two files."""
        (first, value), *others = values.items()
        for rank, other in others:
            if not same_plain(value, other):
                raise self.of_another_save(rank, first, f"{what} is {_shown(other)}, and not {_shown(value)},")
        return value

    def scalar(self, tensors: Mapping[int, StoredTensor], what: str, key: str) -> StoredTensor:
        """Return the tensor of few elements that is the same in the files of all these ranks. Reads it from each."""
        (first, stored), *others = tensors.items()
        if not others:
            return structs.replace(stored, key=key)
        value = self.archives[first].materialised(stored)
        for rank, other in others:
            actual = self.archives[rank].materialised(other)
            if actual.dtype != value.dtype or actual.shape != value.shape or bits_of(actual) != bits_of(value):
                shown = f"{what} is {actual.tolist()!r:.200}, and not {value.tolist()!r:.200},"
                raise self.of_another_save(rank, first, shown)
        return structs.replace(stored, key=key)

    def extras(self, but: frozenset[str]) -> list[Mapping[str, Any]]:
        """Return the values of the trainer of each rank: the entries of a file besides the keys `but`."""
        return [
            {key: _extra(archive, key, value) for key, value in archive.value.items() if key not in but}
            for archive in self.archives
        ]

    def module_values(self, model: Mapping[Any, Any]) -> dict[str, Any]:
        """By name, what modules add to the first rank's state dict besides parameters and buffers."""
        kept = {
            str(name): _extra(self.archives[0], name, value)
            for name, value in model.items()
            if not isinstance(value, (StoredTensor, ShardStandIn)) or is_extra_state(str(name))
        }
        return versioned(versions_beside(model), kept)

    def rank_extras(self, extras: Sequence[Mapping[str, Any]]) -> list[ForeignValues]:
        """Return the same values of each rank, which load their pickles when that is allowed."""
        return [ForeignValues(values, partial(self.pickled, values, rank)) for rank, values in enumerate(extras)]

    def pickled(self, values: Mapping[str, Any], rank: int = 0) -> Mapping[str, Any]:
        """Return the values of the trainer of a rank, with the withheld values decoded. Runs the code in pickles."""
        archive = self.archives[rank]
        real = archive.unpickled() if any(isinstance(value, Withheld) for value in values.values()) else {}
        return {
            key: archive.materialised(real[key]) if isinstance(value, Withheld) else value
            for key, value in values.items()
        }


def _extra(archive: TorchArchive, key: Any, value: Any) -> Any:
    """Return one value of the trainer with its tensors, or a `Withheld`."""
    unread = unread_in(value)
    if unread is not None:
        return Withheld(f"{key}: has an object of the class {unread.what}, which is loaded with allow_pickle=True only")
    if sum(stored.placement.numel * stored.itemsize for stored in stored_in(value)) > _MOST_EXTRA_NBYTES:
        why = f"{key}: has tensors of more than {_MOST_EXTRA_NBYTES >> 20} MiB, which are not read as extras"
        return Withheld(why, is_unsafe=False)
    return archive.materialised(value)


def same_plain(a: Any, b: Any) -> bool:
    """Return whether two plain values are equal, bit by bit; tensors are equal if their shapes and dtypes are."""
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    if isinstance(a, Unread) and isinstance(b, Unread):
        return a.what == b.what
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_plain(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_plain, a, b))
    return bool(a == b) or repr(a) == repr(b)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes."""
    return bytes_in_memory(tensor)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}..."


# ------------------------------------------------------------------------------------------- elements in several files


@dataclass(frozen=True)
class RankFile:
    """The row-major elements [start, stop) of a parameter, which begin `offset` elements into a tensor of one file."""

    start: int
    stop: int
    tensor: StoredTensor
    offset: int = 0


def in_runs(key: str, shape: Shape, parts: Sequence[RankFile], like: StoredTensor) -> StoredTensor:
    """Return a tensor whose elements are runs in several files. `like`: any of their tensors, for a tensor without elements.

    Raises LayoutError for elements that are in no part, in two parts, or outside of a part's tensor.
    """
    parts = sorted((part for part in parts if part.start < part.stop), key=lambda part: part.start)
    for part in parts:
        if part.offset < 0 or part.offset + part.stop - part.start > part.tensor.placement.numel:
            raise LayoutError(f"elements {part.start} to {part.stop} lie outside of the tensor that should have them")
    dtypes = {part.tensor.dtype for part in parts}
    if len(dtypes) > 1:
        raise LayoutError(f"the ranks have it in different dtypes, {' and '.join(sorted(dtypes))}")
    ranks = tuple(-1 - index for index in range(len(parts)))
    runs = FlatRuns(shape, tuple(part.start for part in parts), tuple(part.stop for part in parts), ranks)
    missing = runs.gap()
    if missing is not None:
        raise LayoutError(f"elements {missing[0]} to {missing[1]} of {runs.numel} are in no file")
    if runs.overlapping:
        raise LayoutError("elements are in two files")
    at = {rank: place_of(part.tensor, part.offset) for rank, part in zip(ranks, parts, strict=True)}
    return in_chunks(key, runs, at, parts[0].tensor if parts else like)


def in_chunks(key: str, placement: Placement, at: Mapping[int, tuple[str, int]], like: StoredTensor) -> StoredTensor:
    """Return a tensor with a placement on ranks of storage. `at`: by rank of storage, its file and first byte."""
    if len(at) == 1:
        ((file, start),) = at.values()
        return structs.replace(like, key=key, shape=placement.shape, file=file, start=start, chunks=None)
    return structs.replace(like, key=key, shape=placement.shape, file="", start=0, chunks=Chunks(placement, at))


def place_of(stored: StoredTensor, offset: int) -> tuple[str, int]:
    """Return the file and byte of an element of a tensor that lies in one place."""
    if stored.chunks is not None:
        raise LayoutError(f"{stored.key}: lies in several places of one file")
    return stored.file, stored.start + offset * stored.itemsize
