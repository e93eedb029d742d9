"""The order in which integer ids count parameters: the optimizer's order, with the originals of flat parameters in place.

An optimizer is built from parameters() of a model or of parts of a model (`[*head.parameters(), *body.parameters()]`), and the
user's plain optimizer from the same parts of the unwrapped model. So every ascending sequence of live parameters (in the order
of the wrapped model's parameters()) is counted in the order of the unwrapped model's parameters(), one sequence after the other.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from msgspec import Struct

from fsdp_optim.errors import StateError


class Counted(Struct, frozen=True):
    """The parameters of one group in the order of their ids.

    Attributes:
        fqns: the originals in the order of their ids; if `unknown` is not empty, in any order that is equal on all ranks.
        unknown: why the order is not known; empty where it is.
        own_order: whether the optimizer lists the parameters in another order than the model.
    """

    fqns: tuple[str, ...]
    unknown: str = ""
    own_order: bool = False

    def only(self, kept: Mapping[str, object]) -> Counted:
        return Counted(tuple(fqn for fqn in self.fqns if fqn in kept), self.unknown, self.own_order)


class OrderedParam(Struct, frozen=True, gc=False):
    """One live parameter in an optimizer's group: its index in the wrapped model's parameters(), and its originals."""

    position: int
    fqns: tuple[str, ...]


Mixed = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
"""For each module from which a wrapper took only some parameters: the parameters that it took, and the rest."""


def count(listed: Sequence[OrderedParam], place: Mapping[str, int], mixed: Mixed) -> Counted:
    """Return the order of one group of an optimizer. `place`: FQN -> index in the unwrapped model's parameters()."""
    sequences: list[list[OrderedParam]] = []
    for unit in listed:
        if sequences and sequences[-1][-1].position < unit.position:
            sequences[-1].append(unit)
        else:
            sequences.append([unit])
    counted = [
        fqn
        for sequence in sequences
        for fqn in sorted((fqn for unit in sequence for fqn in unit.fqns), key=place.__getitem__)
    ]
    unknown = _lost_order(frozenset(counted), mixed) or _torn_unit(sequences, place)
    return Counted(tuple(counted), unknown, own_order=len(sequences) > 1)


def _lost_order(members: frozenset[str], mixed: Mixed) -> str:
    """Return why the order is not known, if a wrapper took some parameters of a module and left others; else ""."""
    for taken, left in mixed:
        in_group = [fqn for fqn in taken if fqn in members], [fqn for fqn in left if fqn in members]
        if all(in_group):
            return (
                f"the order of {in_group[0][0]} and {in_group[1][0]} in the unwrapped model is lost, because the wrapper took "
                "some parameters of their module and left others (ignored_states)"
            )
    return ""


def _torn_unit(sequences: Sequence[Sequence[OrderedParam]], place: Mapping[str, int]) -> str:
    """Return why the order is not known, if a parameter of one sequence lies inside a flat parameter of another; else ""."""
    if len(sequences) < 2:
        return ""
    sequence_of = {fqn: number for number, sequence in enumerate(sequences) for unit in sequence for fqn in unit.fqns}
    by_model = sorted(sequence_of, key=place.__getitem__)
    at = {fqn: index for index, fqn in enumerate(by_model)}
    for unit in (unit for sequence in sequences for unit in sequence if len(unit.fqns) > 1):
        places = [at[fqn] for fqn in unit.fqns]
        for between in by_model[min(places) : max(places)]:
            if sequence_of[between] != sequence_of[unit.fqns[0]]:
                return (
                    f"the optimizer lists its parameters in an order of its own, and {between} lies between "
                    f"{by_model[min(places)]} and {by_model[max(places)]} in the model, which are in one flat parameter"
                )
    return ""


def as_ids_count(listed: Sequence[str], wrapped: Sequence[str], place: Mapping[str, int]) -> list[str] | None:
    """Return a group of another tool's dict in the order of ids; None where that order is not known.

    Args:
        listed: the group's FQNs, as the tool lists them.
        wrapped: all FQNs, unit after unit of the wrapped model.
        place: FQN -> index in the unwrapped model's parameters().
    """
    members = frozenset(listed)
    by_model = sorted(listed, key=place.__getitem__)
    unit_after_unit = [fqn for fqn in wrapped if fqn in members]
    return by_model if list(listed) in (by_model, unit_after_unit) else None


def merge(counts: Sequence[Counted], model_order: Sequence[str], models: Sequence[tuple[str, ...]] = ()) -> Counted:
    """Merge several ranks' orders of one group. `model_order`: the order to use where no order is known.

    `models`: the orders of the ranks' models, which also order parameters that are in different ranks' optimizers.
    """
    distinct = tuple(dict.fromkeys(counts))
    if len(distinct) == 1:
        return distinct[0]
    unknown = next((counted.unknown for counted in distinct if counted.unknown), "")
    own_order = any(counted.own_order for counted in distinct)
    known = {fqn for counted in distinct for fqn in counted.fqns}
    lists = [counted.fqns for counted in distinct]
    if not own_order:
        lists += [tuple(fqn for fqn in names if fqn in known) for names in models]
    try:
        merged, unrelated = merge_lists(lists)
    except StateError as error:
        return Counted(tuple(fqn for fqn in model_order if fqn in known), unknown or str(error), own_order)
    for a, b in unrelated:
        if own_order or not _is_numbered_before(a, b):
            unknown = unknown or f"no rank has both {a} and {b}, so their order in the unwrapped model is not known"
    return Counted(merged, unknown, own_order)


def merge_lists(lists: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Return all names in an order that agrees with every list, and the pairs of neighbours whose order no list gives.

    Such neighbours are sorted with numbers as numbers: experts.2, experts.10.
    """
    if len(set(lists)) == 1:
        return lists[0], []
    sorter = TopologicalSorter({fqn: () for names in lists for fqn in names})
    for names in lists:
        for before, fqn in itertools.pairwise(names):
            sorter.add(fqn, before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise StateError(
            f"{error.args[1][0]}: the ranks have their parameters in orders that contradict each other; build the model in the "
            "same order on all ranks"
        ) from None
    free: list[tuple[tuple[tuple[int, str], ...], str]] = []
    merged: list[str] = []
    unrelated: list[tuple[str, str]] = []
    while sorter.is_active():
        for fqn in sorter.get_ready():
            heapq.heappush(free, (_natural_key(fqn), fqn))
        _, fqn = heapq.heappop(free)
        merged.append(fqn)
        unrelated += [(fqn, free[0][1])] if free else []
        sorter.done(fqn)
    return tuple(merged), unrelated


def _natural_key(fqn: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts numbers inside a name as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", fqn))


def _is_numbered_before(first: str, second: str) -> bool:
    """Return whether two names first differ in a number (as children of a ModuleList do) that is lower in the first."""
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            return a.isdigit() and b.isdigit() and int(a) < int(b)
    return False
