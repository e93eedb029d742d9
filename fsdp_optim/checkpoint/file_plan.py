"""The plan of the files of a save, and of the rank that writes each part of them. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fsdp_optim.checkpoint.contents import SavedHalf, SavedValue
from fsdp_optim.checkpoint.files import File, planned_files, written_cut
from fsdp_optim.checkpoint.parts import FramesOfParts, HeadOfParts, PartedFile, Stretch, cuts_of, stretches_on
from fsdp_optim.errors import CheckpointError, counted_noun
from fsdp_optim.formats.base import FormatWriter, Half
from fsdp_optim.layout import Placement
from fsdp_optim.memory import dtype_name
from fsdp_optim.move import End, Key, Slice, StateValue
from fsdp_optim.options import SaveOptions
from fsdp_optim.storage.base import Capabilities, Staging, StoreWriter

BY_MACHINES = "by machines"  # in place if all ranks are on one machine, else a file per rank
IN_PLACE, IN_PARTS, PER_RANK = "in_place", "in_parts", "per_rank_files"
_STRATEGIES = {"anywhere": IN_PLACE, "on one machine": BY_MACHINES, "parts": IN_PARTS, "no": PER_RANK}


def strategy_for(capabilities: Capabilities, requested: str) -> str:
    """The strategy for a store. If several machines cannot write to one file, it depends on the machines of the ranks."""
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
        is_alone: whether one rank saves by itself, so that no element moves to another rank.
    """

    files: tuple[File, ...]
    owners: Mapping[str, int] = field(default_factory=dict)
    parted: tuple[PartedFile, ...] = ()
    is_alone: bool = False

    @classmethod
    def of(
        cls,
        writer: FormatWriter,
        options: SaveOptions,
        weights: SavedHalf,
        state: SavedHalf | None,
        ranks: Sequence[int],
        strategy: str,
        shared: str,
        capabilities: Capabilities,
    ) -> FilePlan:
        """Plan the files of the weights, then those of the state. `shared`: the string from the leader's `Prepared`."""
        files: list[File] = []
        halves: tuple[tuple[Half, SavedHalf | None], ...] = (("model", weights), ("optim", state))
        for half, contents in halves:
            if contents is None or (half == "model" and options.weights == "none"):
                continue
            most = options.max_file_size
            if strategy == PER_RANK:
                total = sum(tensor.nbytes for tensor in contents.tensors)
                most = min(most, max(-(-total // len(ranks)), 1))
            files += planned_files(writer, half, contents.tensors, shared, most_nbytes=most, num_ranks=len(ranks))
        assigned, loads = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)  # bytes
        owners, parted = {}, []
        for file in files:
            if strategy == PER_RANK:
                owner = owners[file.name] = min(assigned, key=lambda rank: (assigned[rank], rank))
                assigned[owner] += file.plan.nbytes
            elif strategy == IN_PARTS:
                parted.append(PartedFile.of(file, capabilities.part_nbytes_of(file.plan.nbytes), loads))
        return cls(tuple(files), owners, tuple(parted), len(ranks) == 1)

    def own_files(self, rank: int) -> list[File]:
        """The files that a rank alone creates and writes."""
        return [file for file in self.files if self.owners.get(file.name) == rank]

    def heads_on(self, rank: int) -> Mapping[str, HeadOfParts]:
        """The parts of the heads of files that a rank uploads, by file."""
        return {parted.file.name: tuple(parted.head_on(rank)) for parted in self.parted}

    def frames_on(self, rank: int) -> Mapping[str, FramesOfParts]:
        """The parts of the frames of files that a rank uploads, by file."""
        return {parted.file.name: parted.frames_on(rank) for parted in self.parted if parted.file.plan.between}

    def stretches_on(self, rank: int) -> Mapping[Key, Sequence[Stretch]]:
        """The stretches of each value that a rank uploads, of the files in parts."""
        return {} if self.is_alone else stretches_on(self.parted, rank)

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

    def cut(self, value: StateValue, placement: Placement) -> Placement:
        """The cut in which the ranks write a value of `placement`."""
        cut = self._cuts.get(value.key)
        return cut if cut is not None else written_cut(value, placement, self._owner_of.get(value.key))


def make_files(maker: Staging | StoreWriter, files: Sequence[File]) -> None:
    """Create files in their full length, with their headers."""
    for file in files:
        maker.create(file.name, file.plan.nbytes, file.plan.head)


@dataclass(frozen=True)
class FilesEnd(End):
    """The target of a save. `take` gets this rank's elements. `cast`: the values that are cast as they are written."""

    plan: FilePlan
    take: Callable[[Sequence[Slice]], None]
    cast: Mapping[Key, SavedValue] = field(default_factory=dict)

    is_stored = True

    def takes_whole(self, value: StateValue) -> bool:
        return value.key not in self.cast

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        return self.plan.cut(value, other)

    def drain(self, parts: Sequence[Slice]) -> None:
        self.take([self._cast(part) for part in parts] if self.cast else parts)

    def _cast(self, part: Slice) -> Slice:
        """The elements in the dtype in which they are saved. Raises CheckpointError for a number that becomes infinite."""
        value = self.cast.get(part.value.key)
        if value is None or part.flat is None:
            return part if value is None else replace(part, value=value)
        cast = part.flat.detach().to(value.dtype)
        if torch.finfo(value.dtype).max < torch.finfo(part.flat.dtype).max:
            too_large = int((cast.isinf() & ~part.flat.isinf()).sum())
            if too_large:
                raise CheckpointError(
                    f"{value.fqn}: {counted_noun(too_large, 'element')} of its {dtype_name(part.flat.dtype)} elements would "
                    f"become infinite in {dtype_name(value.dtype)}: save with another weights_dtype, or without one"
                )
        return Slice(value, part.cut, cast, part.start, is_own=True)
