"""A sharded dict: the description of one rank's part, and the merge of the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.state.merged.replicas import NAME_OF
from fsdp_optim.state.merged.reports import Pairs, first_difference

WHOLE_HERE: tuple[int, ...] = ()
"""The ranks in the placement of a complete value, until the parts of all ranks show which ranks have the value."""


@dataclass(frozen=True)
class ValuePart:
    """The part of one state value on one rank.

    Attributes:
        dtype: the dtype of a tensor with dimensions; "" for any other value.
        placement: where the elements live; None for a value that is not a tensor with dimensions.
        fingerprint: a digest of this rank's elements, or of the value; "" where a wrapper keeps replicas equal.
        value: the value itself, if it has no placement.
    """

    dtype: str = ""
    placement: Placement | None = None
    fingerprint: str = ""
    value: Any = field(default=None, compare=False, repr=False)


Values = tuple[tuple[str, ValuePart], ...]


class DictPart(Struct, frozen=True):
    """The description of one rank's part of a sharded dict. The order of parameters and values may differ between ranks."""

    state: tuple[tuple[str, Values], ...]
    groups: tuple[tuple[Pairs, tuple[str, ...]], ...]
    other_keys: Pairs


PartsByRanks = Sequence[tuple[DictPart, tuple[int, ...]]]
"""Distinct parts, each with the ranks that have the part."""


def join(parts: PartsByRanks) -> tuple[dict[str, dict[str, ValuePart]], tuple[tuple[str, ...], ...]]:
    """Merge all parts: each value by FQN and name, and the FQNs of each group. The result is equal on all ranks.

    Raises StateError, equal on all ranks, that names the parameter, the value and the ranks which differ.
    """
    _check_groups(parts)
    values_by_fqn: dict[str, dict[str, list[tuple[ValuePart, tuple[int, ...]]]]] = {}
    holders: dict[str, list[int]] = {}
    for part, ranks in parts:
        for fqn, values in part.state:
            holders.setdefault(fqn, []).extend(ranks)
            for name, value in values:
                values_by_fqn.setdefault(fqn, {}).setdefault(name, []).append((value, ranks))
    state = {
        fqn: {name: _join_value(f"{fqn}: {name}", pairs, holders[fqn]) for name, pairs in values.items()}
        for fqn, values in values_by_fqn.items()
    }
    first = parts[0][0].groups
    members = [dict.fromkeys(fqn for part, _ in parts for fqn in part.groups[index][1]) for index in range(len(first))]
    return state, tuple(tuple(fqns) for fqns in members)


def _check_groups(parts: PartsByRanks) -> None:
    (first, first_ranks), *others = parts
    for part, ranks in others:
        if len(part.groups) != len(first.groups):
            raise StateError(
                f"the ranks have different sharded dicts: {counted_noun(len(first.groups), 'param group')} "
                f"on rank {first_ranks[0]}, "
                f"{len(part.groups)} on rank {ranks[0]}"
            )
        groups = enumerate(zip(first.groups, part.groups, strict=True))
        sections = [(f"param group {index}", group[0], other[0]) for index, (group, other) in groups]
        difference = first_difference([*sections, ("the dict itself", first.other_keys, part.other_keys)])
        if difference is not None:
            section, key, first_text, text = difference
            raise StateError(
                f"the ranks have different sharded dicts: {section}: {key} is {first_text} on rank {first_ranks[0]} and {text} "
                f"on rank {ranks[0]}"
            )


def _join_value(where: str, parts: list[tuple[ValuePart, tuple[int, ...]]], holders: Sequence[int]) -> ValuePart:
    first, first_ranks = parts[0]
    ranks = tuple(sorted(rank for _, ranks_of_part in parts for rank in ranks_of_part))
    placements = dict.fromkeys(_placed(value, ranks) for value, _ in parts)
    joined, *others = placements
    for value, ranks_of_part in parts[1:]:
        if value.dtype != first.dtype or (value.placement is None) != (first.placement is None):
            raise StateError(
                f"{where}: {_shown(first)} on rank {first_ranks[0]}, {_shown(value)} on rank {ranks_of_part[0]}: the ranks have "
                f"parts of different sharded dicts{NAME_OF}"
            )
    for other in others:
        both = joined.join(other) if joined is not None and other is not None else None
        if both is None:
            raise StateError(f"{where}: {joined} on some ranks, and {other} on others{NAME_OF}")
        joined = both
    silent = [
        rank
        for rank in {*holders, *(joined.ranks if joined is not None else ())}
        if rank not in ranks and (joined is None or isinstance(joined, Whole) or joined.numel_on(rank))
    ]
    if silent:
        raise StateError(
            f"{where}: the sharded dict of rank {silent[0]} should have a part of this value and does not; the dict of rank "
            f"{ranks[0]} does: give every rank its part of one sharded dict"
        )
    _check_replicas(where, parts, joined)
    return replace(first, placement=joined, fingerprint="")


def _placed(value: ValuePart, ranks: tuple[int, ...]) -> Placement | None:
    if isinstance(value.placement, Whole) and not value.placement.on:
        return replace(value.placement, on=ranks)
    return value.placement


def _check_replicas(where: str, parts: list[tuple[ValuePart, tuple[int, ...]]], placement: Placement | None) -> None:
    """Raise StateError where two ranks have different elements of one shard, or different values without a cut."""
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
                    f"different sharded dicts{NAME_OF}"
                )
            if other.fingerprint != value.fingerprint:
                raise StateError(
                    f"{where}: {_shown(other)} on rank {other_rank}, and {_shown(value)} with other bits on rank {rank}, which "
                    f"hold the same part of this value{NAME_OF}"
                )


def _shown(value: ValuePart) -> str:
    if value.placement is None:
        return f"{value.value!r}"
    return f"a {value.dtype} tensor of shape {list(value.placement.shape)}"
