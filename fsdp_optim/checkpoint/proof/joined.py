"""One record of what all ranks saw of a step. Called by all ranks; the lowest rank gets the record."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_optim.checkpoint.proof.measured import Key, LocalMeasures, ModelMarks, measured_of
from fsdp_optim.checkpoint.proof.record import (
    Batch,
    CameOut,
    Groups,
    Measured,
    Random,
    StateValues,
    StepRecord,
    Values,
    WentIn,
)
from fsdp_optim.prints import LocalSums
from fsdp_optim.results.fingerprints import ValueFingerprint
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure


class RankStep(NamedTuple):
    """What one rank saw of a step. None: its hooks were not called."""

    before: tuple[LocalMeasures, LocalMeasures, ModelMarks] | None  # weights and moments
    trees_before: LocalMeasures
    gradients: LocalMeasures | None
    after: tuple[LocalMeasures, LocalMeasures]
    marks: ModelMarks
    groups: Groups
    has_updated: bool
    random: Random
    batches: tuple[Batch, ...]
    is_observed: bool
    numbers: Mapping[str, float]
    observed: Mapping[str, str]
    rounding: float
    spread: Mapping[str, float]
    trees: LocalMeasures
    objects: Mapping[str, Mapping[str, str]]
    own_objects: Mapping[str, Mapping[str, str]]


def joined(group: RankGroup, seen: RankStep | None, failure: Failure, saved_step: int, step: int) -> StepRecord | None:
    """Return the record of a step on the lowest rank; None elsewhere, and where a rank could not watch its step.

    `seen`: None on a rank that could not. Called by all ranks; an error noted in `failure` is raised on all of them.
    """
    content = b""
    with failure:
        content = pickle.dumps(seen)
    report = all_gather_bytes(group, f"step {step}", content, error=failure.error, fatal=failure.fatal)
    if group.rank != group.ranks[0]:
        return None
    ranks: list[RankStep | None] = [pickle.loads(report.content_of(rank)) for rank in group.ranks]
    watched = [rank for rank in ranks if rank is not None]
    if len(watched) < len(ranks):
        return None
    return _record(watched, saved_step, step)


def _record(ranks: Sequence[RankStep], saved_step: int, step: int) -> StepRecord:
    first = ranks[0]
    befores = [rank.before for rank in ranks]
    went_in = None
    if all(before is not None for before in befores):
        went_in = WentIn(
            weights=_values(before[0] for before in befores if before is not None),
            moments=_state(before[1] for before in befores if before is not None),
            frozen=_union(before[2].frozen for before in befores if before is not None),
            evaluated=_union(before[2].evaluated for before in befores if before is not None),
            aliases=_merged(before[2].aliases for before in befores if before is not None),
            trees=_values(rank.trees_before for rank in ranks),
        )
    gradients = [rank.gradients for rank in ranks if rank.gradients is not None]
    spreads: dict[str, float] = {}
    for rank in ranks:
        for fqn, square in rank.spread.items():
            spreads[fqn] = spreads.get(fqn, 0.0) + square
    structure = hashlib.sha256("\n".join(rank.marks.structure for rank in ranks).encode()).hexdigest()[:32]
    return StepRecord(
        saved_step=saved_step,
        step=step,
        world_size=len(ranks),
        structure=structure,
        rounding=max(rank.rounding for rank in ranks),
        went_in=went_in,
        groups=first.groups,
        other_groups={index: rank.groups for index, rank in enumerate(ranks) if rank.groups != first.groups},
        has_updated=any(rank.has_updated for rank in ranks),
        random=tuple(rank.random for rank in ranks),
        batches=tuple(rank.batches for rank in ranks),
        is_observed=any(rank.is_observed for rank in ranks),
        numbers=_by_rank([rank.numbers for rank in ranks]),
        observed=_by_rank([rank.observed for rank in ranks]),
        gradients=_values(gradients) if len(gradients) == len(ranks) else {},
        came_out=CameOut(
            weights=_values(rank.after[0] for rank in ranks),
            moments=_state(rank.after[1] for rank in ranks),
            buffers=_union(rank.marks.buffers for rank in ranks),
            spread={fqn: math.sqrt(square) for fqn, square in spreads.items()},
            trees=_values(rank.trees for rank in ranks),
            objects=first.objects,
            own_objects=tuple(rank.own_objects for rank in ranks),
        ),
        depends_on_ranks=next((rank.marks.depends_on_ranks for rank in ranks if rank.marks.depends_on_ranks), ""),
    )


def _by_rank(by_name: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return name -> the values of all ranks, of the names that all ranks have."""
    names = [name for name in by_name[0] if all(name in values for values in by_name)]
    return {name: tuple(values[name] for values in by_name) for name in names}


def _union(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for listed in names for name in listed))


def _merged(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def _values(measures: Iterable[LocalMeasures]) -> Values:
    return {fqn: value for (fqn, _), value in _added(measures).items()}


def _state(measures: Iterable[LocalMeasures]) -> StateValues:
    by_fqn: dict[str, dict[str, Measured]] = {}
    for (fqn, name), value in _added(measures).items():
        by_fqn.setdefault(fqn, {})[name] = value
    return by_fqn


class _Values(NamedTuple):
    """The values that some ranks have, all in one order."""

    keys: tuple[Key, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


class _Part(NamedTuple):
    """The sums of some ranks, and the row of one value there."""

    sums: LocalSums
    row: int
    dtype: str
    shape: tuple[int, ...]
    owner: int


def _added(measures: Iterable[LocalMeasures]) -> dict[Key, Measured]:
    """Add the sums of all ranks: those of ranks with the same values at once."""
    alike: dict[_Values, LocalSums] = {}
    own: dict[Key, Measured] = {}
    for measure in measures:
        values = _Values(measure.keys, measure.dtypes, measure.shapes, measure.owners)
        alike[values] = alike[values] + measure.sums if values in alike else measure.sums
        own = {**measure.own, **own}  # of the lowest rank that has it
    parts: dict[Key, list[_Part]] = {}
    for values, sums in alike.items():
        for index, (key, dtype, shape, owner) in enumerate(zip(*values, strict=True)):
            parts.setdefault(key, []).append(_Part(sums, index, dtype, shape, owner))
    return {**{key: _measured(listed) for key, listed in parts.items()}, **own}


def _measured(parts: Sequence[_Part]) -> Measured:
    """Add the sums of the ranks that hold parts of one value; replicas may be among them."""
    owner = min(part.owner for part in parts)
    first, *others = [part for part in parts if part.owner == owner]
    total = _single(first)
    for part in others:
        total += _single(part)
    return measured_of(
        ValueFingerprint(
            total.bits_of(0),
            parts[0].dtype,
            parts[0].shape,
            math.sqrt(float(total.squares[0])),
            int(total.num_nonfinite[0]),
            tuple(map(float, total.projections[0])),
        )
    )


def _single(part: _Part) -> LocalSums:
    sums, rows = part.sums, slice(part.row, part.row + 1)
    return LocalSums(sums.bits[rows], sums.squares[rows], sums.num_nonfinite[rows], sums.projections[rows])
