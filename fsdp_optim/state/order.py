"""How integer ids count parameters: as the optimizer lists them, with the originals of a flat parameter in place.

An optimizer is built from parameters() of a model or of parts of it (`[*head.parameters(), *body.parameters()]`), and the
user's plain optimizer from the same on the unwrapped model. So every run of live parameters that lies in the order of the
wrapped model's parameters() is counted in the order of the unwrapped model's, and the runs as the optimizer lists them.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fsdp_optim.errors import StateError


@dataclass(frozen=True)
class Counted:
    """The parameters of one group as ids count them.

    Attributes:
        fqns: the originals, in the order of their ids; in an order that is alike on all ranks where `unknown` is given.
        unknown: why no count can be right; empty where this one is.
        own_order: whether the optimizer lists them in another order than the model does.
    """

    fqns: tuple[str, ...]
    unknown: str = ""
    own_order: bool = False

    def only(self, kept: Mapping[str, object]) -> Counted:
        return Counted(tuple(fqn for fqn in self.fqns if fqn in kept), self.unknown, self.own_order)


@dataclass(frozen=True)
class Listed:
    """One live parameter in an optimizer's group: its position in the wrapped model's parameters(), and its originals."""

    position: int
    fqns: tuple[str, ...]


Mixed = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
"""For each module that a wrapper took in part: the parameters it took, and those it left. The order between them is lost."""


def count(listed: Sequence[Listed], place: Mapping[str, int], mixed: Mixed) -> Counted:
    """One group of an optimizer, counted. `place`: each FQN's place in the unwrapped model's parameters()."""
    runs: list[list[Listed]] = []
    for unit in listed:
        if runs and runs[-1][-1].position < unit.position:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    counted = [fqn for run in runs for fqn in sorted((f for unit in run for f in unit.fqns), key=place.__getitem__)]
    unknown = _lost(frozenset(counted), mixed) or _torn(runs, place)
    return Counted(tuple(counted), unknown, own_order=len(runs) > 1)


def _lost(members: frozenset[str], mixed: Mixed) -> str:
    for taken, left in mixed:
        ours = [fqn for fqn in taken if fqn in members], [fqn for fqn in left if fqn in members]
        if all(ours):
            return (
                f"the order of {ours[0][0]} and {ours[1][0]} in the unwrapped model is lost, because the wrapper took some "
                "parameters of their module and left others (ignored_states)"
            )
    return ""


def _torn(runs: Sequence[Sequence[Listed]], place: Mapping[str, int]) -> str:
    """Whether a parameter of one run lies between two of a flat parameter of another, which cannot be in place and apart."""
    run_of = {fqn: number for number, run in enumerate(runs) for unit in run for fqn in unit.fqns}
    by_model = sorted(run_of, key=place.__getitem__) if len(runs) > 1 else []
    at = {fqn: index for index, fqn in enumerate(by_model)}
    for unit in (unit for run in runs for unit in run if len(runs) > 1 and len(unit.fqns) > 1):
        places = [at[fqn] for fqn in unit.fqns]
        for between in by_model[min(places) : max(places)]:
            if run_of[between] != run_of[unit.fqns[0]]:
                return (
                    f"the optimizer lists its parameters in an order of its own, and {between} lies between "
                    f"{by_model[min(places)]} and {by_model[max(places)]} in the model, which are in one flat parameter"
                )
    return ""


def as_ids_count(listed: Sequence[str], wrapped: Sequence[str], place: Mapping[str, int]) -> list[str] | None:
    """A group of another tool's dict as ids count it; None where that cannot be told.

    Args:
        listed: the group's FQNs, as the tool lists them.
        wrapped: all FQNs, unit after unit of the wrapped model.
        place: the place of each in the unwrapped model's parameters().
    """
    members = frozenset(listed)
    by_model = sorted(listed, key=place.__getitem__)
    unit_after_unit = [fqn for fqn in wrapped if fqn in members]
    return by_model if list(listed) in (by_model, unit_after_unit) else None


def merge(counts: Sequence[Counted], model_order: Sequence[str]) -> Counted:
    """What several ranks count in one group, as one. `model_order`: an order that all ranks know, for want of a better."""
    first, *others = dict.fromkeys(counts)
    if not others:
        return first
    unknown = next((one.unknown for one in (first, *others) if one.unknown), "")
    own_order = any(one.own_order for one in (first, *others))
    known = {fqn for one in (first, *others) for fqn in one.fqns}
    try:
        merged, unrelated = merge_lists([one.fqns for one in (first, *others)])
    except StateError as error:
        return Counted(tuple(fqn for fqn in model_order if fqn in known), unknown or str(error), own_order)
    for a, b in unrelated:
        if own_order or not _is_numbered_before(a, b):
            unknown = (
                unknown or f"no rank has both {a} and {b}, so that their order in the unwrapped model is not known"
            )
    return Counted(merged, unknown, own_order)


def merge_lists(lists: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """All names, each list's order kept, and neighbours whose order no list tells.

    These come as people count: experts.2, experts.10.
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
            f"{error.args[1][0]}: the ranks have their parameters in orders that contradict each other"
        ) from None
    free: list[tuple[tuple[tuple[int, str], ...], str]] = []
    merged: list[str] = []
    unrelated: list[tuple[str, str]] = []
    while sorter.is_active():
        for fqn in sorter.get_ready():
            heapq.heappush(free, (_as_people_count(fqn), fqn))
        _, fqn = heapq.heappop(free)
        merged.append(fqn)
        unrelated += [(fqn, free[0][1])] if free else []
        sorter.done(fqn)
    return tuple(merged), unrelated


def _as_people_count(fqn: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbers inside a name as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", fqn))


def _is_numbered_before(first: str, second: str) -> bool:
    """Whether two names part at a number, as the children of a ModuleList or a Sequential do, and the first's is lower."""
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            return a.isdigit() and b.isdigit() and int(a) < int(b)
    return False
