"""Layouts: where all parameters of a model live, and the plans between them. The library plans one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from fsdp_optim.layout import Box, Placement, Shape, Whole, ranks_in_order
from fsdp_optim.plan import Copy, copies_of, replica_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A Block with its owner: one Box of parameter `fqn` held by global rank `rank`."""

    fqn: str
    box: Box
    rank: int
    offset: int
    strides: Shape | None = None


@dataclass(frozen=True)
class Layout:
    """One Placement per parameter, by FQN."""

    placements: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(self.placements)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for placement in self.placements.values() for rank in placement.ranks}))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The Pieces that one rank holds, parameter by parameter."""
        for fqn, placement in self.placements.items():
            shard = placement.shard_of(rank)
            for block in placement.blocks(shard) if shard is not None else ():
                yield Piece(fqn, block.box, rank, block.offset, block.strides)

    def only(self, fqns: Sequence[str]) -> Layout:
        """The Layout of some of the parameters, in the order of `fqns`."""
        return Layout({fqn: self.placements[fqn] for fqn in fqns})

    def whole_on(self, ranks: Sequence[int]) -> Layout:
        """The same parameters, each of them whole on each of `ranks`, in separate tensors."""
        on = ranks_in_order(ranks)
        return Layout({fqn: Whole(p.shape, on) for fqn, p in self.placements.items()})


@dataclass(frozen=True)
class NamedCopy(Copy):
    """A Copy of elements of `fqn`."""

    fqn: str = ""

    @property
    def unnamed(self) -> Copy:
        return Copy(*astuple(self)[:-1])


def named(fqn: str, copies: Iterable[Copy]) -> tuple[NamedCopy, ...]:
    """The copies of one parameter, with its name."""
    return tuple(NamedCopy(*astuple(copy), fqn=fqn) for copy in copies)


def plan(source: Layout, target: Layout, *, rank: int | None = None) -> tuple[NamedCopy, ...]:
    """The copies that fill every Piece of `target`; with `rank`, those that this rank sends or receives."""
    return tuple(
        copy
        for fqn, to in target.placements.items()
        for copy in named(fqn, copies_of(source.placements[fqn], to, rank=rank, replica=replica_of(fqn)))
    )
