"""Equally cut Placements on several groups of ranks, joined into one Placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from fsdp_optim.layout.ranks import Ranks


class _HasReplicas(Protocol):
    @property
    def replicas(self) -> tuple[Ranks, ...]: ...


_Replicated = TypeVar("_Replicated", bound=_HasReplicas)


def join_replicas(first: _Replicated, other: _Replicated) -> _Replicated | None:
    """Return a Placement with the replicas of both; None where a rank would be in two replicas."""
    groups = tuple(dict.fromkeys((*first.replicas, *other.replicas)))
    if len({rank for group in groups for rank in group}) != sum(map(len, groups)):
        return None
    joined: _Replicated = replace(first, replicas=tuple(sorted(groups, key=lambda group: group[0])))  # type: ignore[type-var]
    return joined
