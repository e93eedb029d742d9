"""Placements of one cut on several groups of ranks, joined into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from fsdp_optim.layout.ranks import Ranks


class _HasReplicas(Protocol):
    @property
    def replicas(self) -> tuple[Ranks, ...]: ...


_Replicated = TypeVar("_Replicated", bound=_HasReplicas)


def join_replicas(one: _Replicated, other: _Replicated) -> _Replicated | None:
    """Both groups of replicas, where no rank is in two of them."""
    groups = tuple(dict.fromkeys((*one.replicas, *other.replicas)))
    if len({rank for group in groups for rank in group}) != sum(map(len, groups)):
        return None
    joined: _Replicated = replace(one, replicas=tuple(sorted(groups, key=lambda group: group[0])))  # type: ignore[type-var]
    return joined
