"""The plan of the files of a save, and of the rank that writes each part of them. Every rank computes the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.casting import cast_part, nbytes_to_cast
from fsdp_optim.checkpoint.common.contents import SavedHalf, SavedValue
from fsdp_optim.checkpoint.common.files import WRITTEN_TOGETHER, File, is_scattered, planned_files, written_cut
from fsdp_optim.checkpoint.save.part_ranges import (
    FramesOfParts,
    HeadOfParts,
    PartedFile,
    PartRange,
    cuts_of,
    ranges_on,
)
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Half, Writer
from fsdp_optim.layout import Placement
from fsdp_optim.move import (
    CompleteValues,
    End,
    Key,
    Parts,
    Slice,
    StateValue,
    Taken,
    has_room_for_short,
    is_short,
)
from fsdp_optim.storage.base import Capabilities, Staging, StoreWriter
from fsdp_optim.tensors.memory import Budget, in_batches

BY_MACHINES = "by machines"  # in place if all ranks are on one machine, else a file per rank
IN_PLACE, IN_PARTS, PER_RANK = "in_place", "in_parts", "per_rank_files"
_LEAST_SCATTERED, _PER_RANK = 64, 4  # values: fewer are written by themselves, which takes less time than messages
_STRATEGIES = {"anywhere": IN_PLACE, "on one machine": BY_MACHINES, "parts": IN_PARTS, "no": PER_RANK}


def strategy_for(capabilities: Capabilities, requested: str) -> str:
    """Return the strategy for a store. If several machines cannot write to one file, it depends on the ranks' machines."""
    if requested == "in_place" and capabilities.writes_ranges == "parts":
        return IN_PARTS
    if requested == "in_place" and capabilities.part_nbytes:
        raise CheckpointError(
            'strategy="in_place" needs a store in which several ranks can write to one file: give strategy="auto"'
        )
    return requested if requested != "auto" else _STRATEGIES[capabilities.writes_ranges]


@dataclass(frozen=True)
class FilePlan:
    """The files of a save.

    Attributes:
        owners: by file, the rank that alone creates and writes it, if there is one.
        parted: the files that are uploaded in parts, each part by one rank.
        ranks: those that save.
        in_any_order: whether the store writes any range. Else it holds each part of a file until all its bytes have come.
        gathers: whether one rank may write values of which all have little: where there is room for messages of many values.
    """

    files: tuple[File, ...]
    owners: Mapping[str, int] = field(default_factory=dict)
    parted: tuple[PartedFile, ...] = ()
    ranks: Sequence[int] = (0,)
    in_any_order: bool = True
    gathers: bool = False
    _written: dict[tuple[int, torch.dtype, int | None], tuple[Placement, Placement]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        writer: Writer,
        options: SaveArguments,
        weights: SavedHalf,
        state: SavedHalf | None,
        ranks: Sequence[int],
        *,
        trees: SavedHalf | None,
        strategy: str,
        shared: str,
        capabilities: Capabilities,
    ) -> FilePlan:
        """Plan the files of the weights, of the state, and of the trees. `shared`: the string from the leader's `Prepared`."""
        halves: dict[Half, Sequence[SavedValue]] = {}
        if options.weights != "none":
            halves["model"] = weights.tensors
        if state is not None:
            halves["optim"] = state.tensors
        if trees is not None:
            listed: dict[Half, Sequence[SavedValue]] = {half: trees.of(half).tensors for half in ("optim", "state")}
            halves |= {half: tensors for half, tensors in listed.items() if tensors}
        most, num = options.max_file_size, len(ranks)
        if strategy == PER_RANK:
            shares = {half: min(most, _share(writer, half, values, shared, num)) for half, values in halves.items()}
            files = [
                file
                for half, values in halves.items()
                for file in planned_files(writer, {half: values}, shared, most_nbytes=shares[half], num_ranks=num)
            ]
        else:
            files = planned_files(writer, halves, shared, most_nbytes=most, num_ranks=num)
        assigned, loads = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)  # bytes
        owners, parted = {}, []
        for file in files:
            if strategy == PER_RANK:
                owner = owners[file.name] = min(assigned, key=lambda rank: (assigned[rank], rank))
                assigned[owner] += file.plan.nbytes
            elif strategy == IN_PARTS:
                parted.append(PartedFile.of(file, capabilities.part_nbytes_of(file.plan.nbytes), loads))
        any_order = not capabilities.part_nbytes
        room = Budget(options.call.bucket_nbytes).share(2, "elements that are not cast at the same time")
        gathers = any_order and has_room_for_short(room)
        return cls(tuple(files), owners, tuple(parted), tuple(ranks), in_any_order=any_order, gathers=gathers)

    @property
    def is_alone(self) -> bool:
        """Whether one rank saves by itself, so that no element moves to another rank."""
        return len(self.ranks) == 1

    @cached_property
    def starts(self) -> Mapping[int, tuple[str, int]]:
        """By the id of a value: its file, and the byte of the file's data at which it begins. The files keep the ids unique."""
        return {
            id(value): (file.name, start)
            for file in self.files
            for value, start in zip(file.values, file.plan.starts, strict=True)
        }

    def start_of(self, value: StateValue) -> tuple[str, int]:
        """Return the file of a value, and the byte of the file's data at which the value begins.

        A value that is cast is here as it is in the live model: another object of the same key.
        """
        return self.starts.get(id(value)) or self._starts_by_key[value.key]

    def forget_starts(self) -> None:
        """Free the tables of `starts`, which are as large as the names of all values. They are made again if needed."""
        self.__dict__.pop("starts", None)
        self.__dict__.pop("_starts_by_key", None)

    @cached_property
    def _starts_by_key(self) -> Mapping[Key, tuple[str, int]]:
        return {value.key: self.starts[id(value)] for file in self.files for value in file.values}

    def own_files(self, rank: int) -> list[File]:
        """Return the files that a rank alone creates and writes."""
        return [file for file in self.files if self.owners.get(file.name) == rank]

    def heads_on(self, rank: int) -> Mapping[str, HeadOfParts]:
        """Return the parts of the heads of files that a rank uploads, by file."""
        return {parted.file.name: tuple(parted.head_on(rank)) for parted in self.parted}

    def frames_on(self, rank: int) -> Mapping[str, FramesOfParts]:
        """Return the parts of the frames of files that a rank uploads, by file."""
        return {parted.file.name: parted.frames_on(rank) for parted in self.parted if parted.file.plan.between}

    def ranges_on(self, rank: int) -> Mapping[Key, Sequence[PartRange]]:
        """Return the byte ranges of each value that a rank uploads, of the files in parts."""
        return {} if self.is_alone else ranges_on(self.parted, rank)

    @cached_property
    def _cuts(self) -> Mapping[Key, Placement]:
        return {} if self.is_alone else cuts_of(self.parted)

    @cached_property
    def _owner_of(self) -> Mapping[Key, int]:
        return {
            value.key: self.owners[file.name]
            for file in self.files
            if file.name in self.owners
            for value in file.values
        }

    def cuts(self, values: Sequence[StateValue], placements: Sequence[Placement]) -> Sequence[Placement]:
        """Return the cut in which the ranks write each of some values, of these placements."""
        cuts = []
        for value, placement, owner in zip(values, placements, self._owners_of(values, placements), strict=True):
            key = id(placement), value.dtype, owner  # layers share their placements
            known = self._written.get(key)
            if known is None:
                known = self._written[key] = placement, written_cut(value, placement, owner)  # keeps the id unique
            cuts.append(known[1])
        if self.parted:
            return [self._cuts.get(value.key, cut) for value, cut in zip(values, cuts, strict=True)]
        return cuts

    def _owners_of(self, values: Sequence[StateValue], placements: Sequence[Placement]) -> Sequence[int | None]:
        """Return, of each value, the rank that alone writes it, if there is one: the same for adjacent values of a file."""
        if self.owners:
            return [self._owner_of.get(value.key) for value in values]
        gathered = self._gathered
        if not gathered:
            return [None] * len(values)
        starts, owners = self.starts, list[int | None]()
        for value, placement in zip(values, placements, strict=True):
            ranks = gathered.get((id(placement), value.dtype))
            if ranks is None:
                owners.append(None)
                continue
            name, start = starts.get(id(value)) or self.start_of(value)
            owners.append(ranks[(self._number_of[name] + start // WRITTEN_TOGETHER) % len(ranks)])
        return owners

    @cached_property
    def _gathered(self) -> Mapping[tuple[int, torch.dtype], Sequence[int]]:
        """The ranks that take turns at writing small values, by (id of the placement, dtype). Empty if direct writes cost less.

        Each value is sent to one of these ranks. They are scattered values, and the replicated values between them.
        """
        if self.is_alone or not self.gathers:
            return {}
        values = [value for file in self.files for value in file.values]
        keys = [(id(value.placement), value.cast_from or value.dtype) for value in values]
        small = {
            key: value.placement
            for key, value in dict(zip(keys, values, strict=True)).items()
            if is_short(value.placement, key[1].itemsize)
        }
        scattered = {key for key, placement in small.items() if is_scattered(placement, key[1].itemsize)}
        num = sum(number for key, number in Counter(keys).items() if key in scattered)
        if num < _LEAST_SCATTERED + _PER_RANK * len(self.ranks):
            return {}
        return {key: place.ranks for key, place in small.items() if key in scattered or place.num_shards == 1}

    @cached_property
    def _number_of(self) -> Mapping[str, int]:
        return {file.name: number for number, file in enumerate(self.files)}


def _share(writer: Writer, half: Half, values: Sequence[SavedValue], shared: str, num_ranks: int) -> int:
    """Return the length of a file if each rank writes a file of its own."""
    whole, empty = (
        sum(
            file.plan.nbytes
            for file in planned_files(writer, {half: tensors}, shared, most_nbytes=1 << 62, num_ranks=num_ranks)
        )
        for tensors in (values, ())
    )
    return empty - (-whole // num_ranks)


def make_files(maker: Staging | StoreWriter, files: Sequence[File]) -> None:
    """Create files in their full length, with their headers."""
    for file in files:
        maker.create(file.name, file.plan.nbytes, file.plan.head)


@dataclass(frozen=True)
class FilesEnd(End):
    """The target of a save.

    Attributes:
        take: gets this rank's elements, of one value in several calls.
        cast: the values that are cast as they are written.
        cast_budget: the budget for cast elements, which `take` gets in batches of this size.
        keeps: whether `take` may keep the memory that it gets.
    """

    plan: FilePlan
    take: Callable[[Taken], None]
    cast: Mapping[Key, SavedValue]
    cast_budget: Budget
    keeps: bool = True

    is_stored = True

    @property
    def keeps_memory(self) -> bool:
        return self.keeps

    @property
    def in_any_order(self) -> bool:
        return self.plan.in_any_order

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        return self.plan.cuts([value], [other])[0]

    def io_placements(self, values: Sequence[StateValue], others: Sequence[Placement]) -> Sequence[Placement]:
        return self.plan.cuts(values, others)

    def drain_parts(self, parts: Parts) -> None:
        if self.cast:
            super().drain_parts(parts)
        else:
            self.take(parts)

    def drain_complete(self, complete: CompleteValues) -> None:
        if self.cast:
            super().drain_complete(complete)
        else:
            self.take(complete)

    def drain(self, parts: Sequence[Slice]) -> None:
        if not self.cast:
            self.take(parts)
            return
        pieces = (piece for part in parts for piece in self._pieces(part))
        for batch in in_batches(pieces, self._nbytes_for, self.cast_budget.nbytes):
            self.take([cast_part(self.cast.get(part.value.key), part) for part in batch])

    def _pieces(self, part: Slice) -> Iterator[Slice]:
        """Yield a part in pieces that can be cast within the budget."""
        value = self.cast.get(part.value.key)
        if value is None or part.flat is None:
            yield part
            return
        width = max(self.cast_budget.num_fitting(nbytes_to_cast(part.flat.dtype, value.dtype)), 1)
        for first in range(0, len(part.flat), width):
            yield part._replace(flat=part.flat[first : first + width], start=part.start + first)

    def _nbytes_for(self, part: Slice) -> int:
        """Return the bytes of memory that a cast of a piece takes."""
        value = self.cast.get(part.value.key)
        return len(part.flat) * nbytes_to_cast(part.flat.dtype, value.dtype) if value and part.flat is not None else 0
