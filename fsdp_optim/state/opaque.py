"""Values that are not shaped like their parameter, of a sharded one: kept per shard, given back on the same layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Shape, Whole
from fsdp_optim.state.values import own


@dataclass(frozen=True)
class LocalPart:
    """One rank's part of a DTensor that is in an opaque value: its elements, how it is cut (`cut_of`), and its whole shape."""

    local: Any
    cut: str
    shape: Shape

    def __deepcopy__(self, memo: object) -> LocalPart:
        return replace(self, local=own(self.local))


def within(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with something done to what is in it, where it is a dict, a list or a tuple; else the value."""
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value


@dataclass(frozen=True)
class OpaqueShards:
    """One opaque value of one live parameter in a full dict: what each shard has of it.

    It stands in the state of the first original of the live parameter.

    Attributes:
        cuts: how the originals of the live parameter are cut, without their ranks.
        by_shard: shard number -> value.
    """

    cuts: tuple[Placement, ...]
    by_shard: Mapping[int, Any]

    def of_rank(self, fqn: str, name: str, placements: tuple[Placement, ...], rank: int) -> Any:
        """The value of one rank of a model whose live parameter has these placements.

        Raises StateError when it is cut in another way than when it was saved.
        """
        shard = placements[0].shard_of(rank)
        if shard is None or cuts_of(placements) != self.cuts:
            raise StateError(
                f"{fqn}: {name} is not shaped like the parameter, so it was saved as it was on each of "
                f"{counted_noun(self.cuts[0].num_shards, 'shard')} and fits the same layout only; this model has "
                f"{counted_noun(placements[0].num_shards, 'shard')} of it, cut in another way"
            )
        if shard not in self.by_shard:
            raise StateError(
                f"{fqn}: {name} was saved for shards {sorted(self.by_shard)} only, rank {rank} holds shard {shard}"
            )
        return self.by_shard[shard]

    def has(self, placements: tuple[Placement, ...], rank: int) -> bool:
        """Whether a rank gets a value: one that holds no element of the parameter may have had none."""
        shard = placements[0].shard_of(rank)
        return shard in self.by_shard or any(placement.numel_on(rank) for placement in placements)


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements with ranks 0, 1, 2, ...: equal for models that are cut alike on whatever ranks."""
    return tuple(_without_ranks(placement) for placement in placements)


def _without_ranks(placement: Placement) -> Placement:
    match placement:
        case FlatChunks():
            return replace(placement, replicas=(range(placement.num_shards),))
        case MeshBoxes():
            used = {dim for dim, _ in placement.splits}
            sizes = tuple(n if dim in used else 1 for dim, n in enumerate(placement.mesh_shape))
            return replace(placement, mesh_shape=sizes, replicas=(range(placement.num_shards),))
        case Whole():
            return replace(placement, on=(0,))
        case _:
            return placement
