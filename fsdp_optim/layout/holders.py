"""Questions about the holders of many parameters, answered once for all parameters with the same groups of ranks."""

from __future__ import annotations

from fsdp_optim.layout.placement import Placement
from fsdp_optim.layout.ranks import Ranks


class RankSet:
    """A set of ranks, compared with the holders of parameters. Parameters share the groups of ranks that hold them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks, self._set = ranks, frozenset(ranks)
        self._equal: dict[tuple[Ranks, ...], bool] = {}
        self._include: dict[tuple[Ranks, ...], bool] = {}

    def is_all_holders_of(self, placement: Placement) -> bool:
        """Return whether exactly these ranks hold a parameter."""
        groups = placement.rank_groups
        known = self._equal.get(groups)
        if known is None:
            known = self._equal[groups] = placement.ranks == self._ranks
        return known

    def includes_holders_of(self, placement: Placement) -> bool:
        """Return whether only ranks of this set hold a parameter."""
        groups = placement.rank_groups
        known = self._include.get(groups)
        if known is None:
            known = self._include[groups] = all(self._set.issuperset(group) for group in groups)
        return known
