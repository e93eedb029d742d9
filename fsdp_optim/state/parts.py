"""A sharded dict, of which every rank has its part: what each rank tells of its part, and all parts as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Placement, Whole

WHOLE_HERE: tuple[int, ...] = ()
"""The ranks of a Whole value that its rank has all of: which others have it too is known when all have told."""


@dataclass(frozen=True)
class ValuePart:
    """What one rank has of one state value.

    Attributes:
        dtype: of a tensor with dimensions; "" for any other value.
        placement: where its elements live; None for a value that is no tensor with dimensions.
        fingerprint: stands for this rank's elements, or for the value; "" where a wrapper keeps replicas equal.
        value: the value itself where it has no placement.
    """

    dtype: str = ""
    placement: Placement | None = None
    fingerprint: str = ""
    value: Any = field(default=None, compare=False, repr=False)


Values = tuple[tuple[str, ValuePart], ...]


@dataclass(frozen=True)
class DictPart:
    """What one rank tells of its part of a sharded dict. Ranks may list parameters and values in orders of their own."""

    state: tuple[tuple[str, Values], ...]
    groups: tuple[tuple[tuple[tuple[str, str], ...], tuple[str, ...]], ...]
    extra: tuple[tuple[str, str], ...]


Told = Sequence[tuple[DictPart, tuple[int, ...]]]


def join(told: Told) -> tuple[dict[str, dict[str, ValuePart]], tuple[tuple[str, ...], ...]]:
    """All parts as one: each value by FQN and name, and the FQNs of each group. The same on all ranks, errors too.

    Raises StateError that names the parameter, the value and the ranks which differ.
    """
    _check_groups(told)
    found: dict[str, dict[str, list[tuple[ValuePart, tuple[int, ...]]]]] = {}
    holders: dict[str, list[int]] = {}
    for part, ranks in told:
        for fqn, values in part.state:
            holders.setdefault(fqn, []).extend(ranks)
            for name, value in values:
                found.setdefault(fqn, {}).setdefault(name, []).append((value, ranks))
    state = {
        fqn: {name: _join_value(f"{fqn}: {name}", parts, holders[fqn]) for name, parts in values.items()}
        for fqn, values in found.items()
    }
    first = told[0][0].groups
    members = [dict.fromkeys(fqn for part, _ in told for fqn in part.groups[index][1]) for index in range(len(first))]
    return state, tuple(tuple(fqns) for fqns in members)


def _check_groups(told: Told) -> None:
    (first, first_ranks), *others = told
    for part, ranks in others:
        if len(part.groups) != len(first.groups):
            raise StateError(
                f"the ranks have different sharded dicts: {counted_noun(len(first.groups), 'param group')} "
                f"on rank {first_ranks[0]}, "
                f"{len(part.groups)} on rank {ranks[0]}"
            )
        here = [
            (f"param group {i}", a[0], b[0]) for i, (a, b) in enumerate(zip(first.groups, part.groups, strict=True))
        ]
        for where, mine, theirs in (*here, ("the dict itself", first.extra, part.extra)):
            a, b = dict(mine), dict(theirs)
            for key in {**a, **b}:
                if a.get(key) != b.get(key):
                    raise StateError(
                        f"the ranks have different sharded dicts: {where}: {key} is {a.get(key, 'absent')} on rank "
                        f"{first_ranks[0]} and {b.get(key, 'absent')} on rank {ranks[0]}"
                    )


def _join_value(where: str, parts: list[tuple[ValuePart, tuple[int, ...]]], holders: Sequence[int]) -> ValuePart:
    first, first_ranks = parts[0]
    ranks = tuple(sorted(rank for _, its in parts for rank in its))
    placements = dict.fromkeys(_placed(value, ranks) for value, _ in parts)
    joined, *others = placements
    for value, its in parts[1:]:
        if value.dtype != first.dtype or (value.placement is None) != (first.placement is None):
            raise StateError(
                f"{where}: {_shown(first)} on rank {first_ranks[0]}, {_shown(value)} on rank {its[0]}: the ranks have parts of "
                f"different sharded dicts{_NAME_OF}"
            )
    for other in others:
        both = joined.join(other) if joined is not None and other is not None else None
        if both is None:
            raise StateError(f"{where}: {joined} on some ranks, and {other} on others{_NAME_OF}")
        joined = both
    silent = [
        rank
        for rank in {*holders, *(joined.ranks if joined is not None else ())}
        if rank not in ranks and (joined is None or isinstance(joined, Whole) or joined.numel_on(rank))
    ]
    if silent:
        raise StateError(
            f"{where}: rank {silent[0]} should have a part of it, and its dict does not; rank {ranks[0]}'s does"
        )
    _check_replicas(where, parts, joined)
    return replace(first, placement=joined, fingerprint="")


_NAME_OF = (
    ". If these are different parameters under one name (experts, say), give name_of=, a function (fqn, rank) -> name "
    "that tells them apart"
)


def _placed(value: ValuePart, ranks: tuple[int, ...]) -> Placement | None:
    if isinstance(value.placement, Whole) and not value.placement.on:
        return replace(value.placement, on=ranks)
    return value.placement


def _check_replicas(where: str, parts: list[tuple[ValuePart, tuple[int, ...]]], placement: Placement | None) -> None:
    """What ranks have of one shard, or of a value that is not cut, has to be equal."""
    known: dict[int, tuple[ValuePart, int]] = {}
    for value, ranks in parts:
        for rank in ranks if value.fingerprint else ():
            shard = placement.shard_of(rank) if placement is not None else 0
            if shard is None:
                continue
            other, other_rank = known.setdefault(shard, (value, rank))
            if other.fingerprint != value.fingerprint and placement is None:
                raise StateError(
                    f"{where}: {_shown(other)} on rank {other_rank} and {_shown(value)} on rank {rank}: the ranks have parts of "
                    f"different sharded dicts{_NAME_OF}"
                )
            if other.fingerprint != value.fingerprint:
                raise StateError(
                    f"{where}: {_shown(other)} on rank {other_rank}, and {_shown(value)} with other bits on rank {rank}, which "
                    f"hold the same part of it{_NAME_OF}"
                )


def _shown(value: ValuePart) -> str:
    if value.placement is None:
        return f"{value.value!r}"
    return f"a {value.dtype} tensor of shape {list(value.placement.shape)}"
