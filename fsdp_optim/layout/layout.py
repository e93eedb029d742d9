"""Where all parameters of a model live: one Placement per parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.boxes import Piece
from fsdp_optim.layout.placement import Placement, Whole
from fsdp_optim.layout.ranks import ranks_in_order


@dataclass(frozen=True)
class Layout:
    """One Placement per parameter, by FQN, in the order of the unwrapped model's `parameters()`.

    Raises LayoutError when an element of a parameter is held by no rank.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fqn, placement in self.placements.items():
            gap = placement.gap()
            if gap is not None:
                raise LayoutError(
                    f"{fqn}: elements [{gap[0]}, {gap[1]}) are held by no rank (world size {len(placement.ranks)})"
                )

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(self.placements)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for placement in self.placements.values() for rank in placement.ranks}))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield the Pieces that one rank holds, parameter by parameter."""
        for fqn, placement in self.placements.items():
            shard = placement.shard_of(rank)
            for block in placement.blocks(shard) if shard is not None else ():
                yield Piece(fqn, block.box, rank, block.offset, block.strides)

    def only(self, fqns: Sequence[str]) -> Layout:
        """Return the Layout of some of the parameters, in the order of `fqns`."""
        return Layout({fqn: self.placements[fqn] for fqn in fqns})

    def whole_on(self, ranks: Sequence[int]) -> Layout:
        """Return the Layout in which every parameter is complete on each of `ranks`, in separate tensors."""
        on = ranks_in_order(ranks)
        return Layout({fqn: Whole(p.shape, on) for fqn, p in self.placements.items()})
