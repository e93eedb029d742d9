"""Which files a save writes, and which rank writes what of them: the same plan on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_optim.checkpoint.contents import Half
from fsdp_optim.checkpoint.files import File, planned_files, written_cut
from fsdp_optim.checkpoint.parts import PartedFile, Stretch, cuts_of, stretches_on
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import Half as HalfName
from fsdp_optim.formats.base import Writer as FormatWriter
from fsdp_optim.layout import Placement
from fsdp_optim.move import End, Key, Slice, StateValue
from fsdp_optim.options import SaveOptions
from fsdp_optim.storage.base import Capabilities, Staging, StoreWriter

BY_MACHINES = "by machines"  # in place on one machine, a file per rank on several
IN_PLACE, IN_PARTS, PER_RANK = "in_place", "in_parts", "per_rank_files"
_STRATEGIES = {"anywhere": IN_PLACE, "on one machine": BY_MACHINES, "parts": IN_PARTS, "no": PER_RANK}


def strategy_for(capabilities: Capabilities, asked: str) -> str:
    """How the ranks write to a store. Where several machines cannot write to one file, that depends on where the ranks are."""
    if asked == "in_place" and capabilities.writes_ranges == "parts":
        return IN_PARTS
    if asked == "in_place" and capabilities.part_nbytes:
        raise CheckpointError('strategy="in_place" needs a store in which several ranks can write to one file')
    return asked if asked != "auto" else _STRATEGIES[capabilities.writes_ranges]


@dataclass(frozen=True)
class FilePlan:
    """The files of a save.

    Attributes:
        owners: by file, the rank that makes and writes all of it, where one does.
        parted: the files that are put in parts, each part by one rank.
        is_alone: whether one rank saves by itself, so that nothing has to be moved to another one.
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
        weights: Half,
        state: Half | None,
        ranks: Sequence[int],
        strategy: str,
        shared: str,
        capabilities: Capabilities,
    ) -> FilePlan:
        """Plan the files of the weights, then of the state. `shared`: what the format's leader gave to all ranks."""
        files: list[File] = []
        halves: tuple[tuple[HalfName, Half | None], ...] = (("model", weights), ("optim", state))
        for half, one in halves:
            if one is None:
                continue
            most = options.max_file_size
            if strategy == PER_RANK:
                total = sum(tensor.nbytes for tensor in one.tensors)
                most = min(most, max(-(-total // len(ranks)), 1))
            files += planned_files(writer, half, one.tensors, shared, most_nbytes=most, num_ranks=len(ranks))
        loads = dict.fromkeys(ranks, 0)
        owners, parted = {}, []
        for file in files:
            if strategy == PER_RANK:
                owner = owners[file.name] = min(loads, key=lambda rank: (loads[rank], rank))
                loads[owner] += file.plan.nbytes
            elif strategy == IN_PARTS:
                parted.append(PartedFile.of(file, capabilities.part_nbytes_of(file.plan.nbytes), loads))
        return cls(tuple(files), owners, tuple(parted), len(ranks) == 1)

    def own_files(self, rank: int) -> list[File]:
        """The files that a rank makes and writes alone."""
        return [file for file in self.files if self.owners.get(file.name) == rank]

    def write_heads(self, hand: StoreWriter, rank: int) -> None:
        """Write the heads of files in parts, as far as they lie in parts of this rank."""
        for one in self.parted:
            head = memoryview(one.file.plan.head)
            for start, stop in one.heads_on(rank):
                hand.write(one.file.name, [head[start:stop]], start)

    def stretches_on(self, rank: int) -> Mapping[Key, Stretch]:
        """What a rank puts of each value of the files in parts."""
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
        """The cut in which the ranks write a value that they have as `placement`."""
        found = self._cuts.get(value.key)
        return found if found is not None else written_cut(value, placement, self._owner_of.get(value.key))


def make_files(maker: Staging | StoreWriter, files: Sequence[File]) -> None:
    """Files with their headers, in their full length."""
    for file in files:
        maker.create(file.name, file.plan.nbytes, file.plan.head)


@dataclass(frozen=True)
class FilesEnd(End):
    """The target of a save. `take` gets this rank's elements."""

    plan: FilePlan
    take: Callable[[Sequence[Slice]], None]

    is_stored = True

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        return self.plan.cut(value, other)

    def drain(self, parts: Sequence[Slice]) -> None:
        self.take(parts)
