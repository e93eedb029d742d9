"""Opaque values of sharded parameters in a full dict: one value per shard, which fits the same layout only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import FlatChunks, OnMesh, Placement
from fsdp_optim.state.values.kinds import is_scalar
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import is_plain
from fsdp_optim.view import Handle, has_local_part


def depends_on_cut(value: Any) -> bool:
    """Return whether a value may differ if the parameter is cut in another way; single numbers and words do not."""
    if isinstance(value, torch.Tensor):
        return not is_plain(value) or value.numel() > 1
    if type(value) is dict:
        return any(map(depends_on_cut, value.values()))
    if type(value) in (list, tuple):
        return any(map(depends_on_cut, value))
    return not is_scalar(value)


def holds_all(handle: Handle) -> bool:
    """Return whether this rank's tensor is one complete original parameter in its own shape, and no other rank has a part."""
    if len(handle.originals) != 1:
        return False
    placement = handle.originals[0].placement
    if handle.local_shape != placement.shape:
        return False
    return placement.num_shards == 1 or (isinstance(placement, FlatChunks) and placement.own_tensor)


@dataclass(frozen=True, eq=False)
class OpaqueShards:
    """The opaque values of one name of all shards of a live parameter, in a full dict.

    An OpaqueShards is in the state of the first original of the live parameter.

    Attributes:
        cuts: the placements of the live parameter's originals, without their ranks.
        by_shard: shard number -> value.
    """

    cuts: tuple[Placement, ...]
    by_shard: Mapping[int, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueShards) and self.cuts == other.cuts and same(self.by_shard, other.by_shard)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_one_for_all(self) -> bool:
        """Whether all shards have the same value, and the value does not depend on the cut of the parameter."""
        first, *others = self.by_shard.values()
        is_all = len(self.cuts) == 1 and len(self.by_shard) == _num_shards(self.cuts[0])
        return is_all and not depends_on_cut(first) and all(same(first, other) for other in others)

    def of_rank(self, fqn: str, name: str, placements: tuple[Placement, ...], rank: int, *, alone: bool) -> Any:
        """Return the value for one rank of a model whose live parameter has these placements.

        `alone`: the rank has the complete parameter in its own shape.

        Raises StateError when the live parameter is cut in another way than the saved parameter.
        """
        if alone and placements[0].num_shards == 1 and self._is_mesh_of_one:
            return self.by_shard[0]
        shard = placements[0].shard_of(rank)
        if shard is None or cuts_of(placements) != self.cuts:
            raise StateError(
                f"{fqn}: {name} is not shaped like the parameter, so it was saved unchanged for each of "
                f"{counted_noun(self.cuts[0].num_shards, 'shard')} and fits the same layout only; this model has "
                f"{counted_noun(placements[0].num_shards, 'shard')} of the parameter, cut in another way: load into a model that "
                "is wrapped as when saved, on as many ranks"
            )
        if shard not in self.by_shard:
            raise StateError(
                f"{fqn}: {name} was saved for the shards {sorted(self.by_shard)} only, and rank {rank} holds shard {shard}"
            )
        return self.by_shard[shard]

    def has(self, placements: tuple[Placement, ...], rank: int) -> bool:
        """Return whether a rank gets a value. A shard without elements of the parameter may have been saved without a value."""
        shard = placements[0].shard_of(rank)
        return shard in self.by_shard or any(placement.numel_on(rank) for placement in placements)

    @property
    def _is_mesh_of_one(self) -> bool:
        """Whether there was a single shard in the parameter's own shape, and the value has no part of a DTensor."""
        cut = self.cuts[0]
        return isinstance(cut, OnMesh) and _num_shards(cut) == 1 and not has_local_part(self.by_shard[0])


def _num_shards(cut: Placement) -> int:
    """Return `cut.num_shards` without cached properties, which would be pickled with the dict."""
    return len(cut.replicas[0]) if isinstance(cut, (FlatChunks, OnMesh)) else cut.num_shards


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return the placements with ranks 0, 1, 2, ...: equal for models with the same cut, on any ranks."""
    return tuple(placement.without_ranks() for placement in placements)
