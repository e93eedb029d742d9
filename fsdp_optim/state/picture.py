"""What each rank tells the others about its model and optimizer, and the one picture that all ranks draw from it.

No rank tells more than a few hundred bytes per live parameter, and no elements. Ranks that see the same say the same to
the letter, so that usually nothing but a digest travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from fsdp_optim.errors import RankError, StateError, counted_noun
from fsdp_optim.layout import Boxes, Placement, Ranks, Whole
from fsdp_optim.state.classes import OptimizerClass
from fsdp_optim.state.kinds import is_known_moment
from fsdp_optim.state.order import Counted, merge, merge_lists
from fsdp_optim.state.replicas import NAME_OF, STATE, not_replicas, ranks_said
from fsdp_optim.state.values import Odd, Summary

_MOST_SHOWN = 200  # letters of a value in an error


@dataclass(frozen=True)
class LiveParam:
    """One live parameter as its rank tells it. `summary` None: it has no state.

    `fingerprint` stands for the elements of the state on this rank, given where the wrapper does not keep replicas
    equal, so that replicas can be told from different parameters of the same name.

    `loose`: no wrapper tells which ranks have it, and its placement names all that make the call.

    `what`: how errors call the elements that the fingerprint stands for.
    """

    fqns: tuple[str, ...]
    placements: tuple[Placement, ...]
    group_index: int
    num_padded: tuple[int, ...]
    collected: bool
    summary: Summary | None
    fingerprint: str = ""
    loose: bool = False
    what: str = STATE


@dataclass(frozen=True)
class RankReport:
    """All that a rank tells of its model and optimizer.

    Attributes:
        call: what it was asked to do.
        order: its original parameters, in the unwrapped model's order.
        params: its live parameters.
        groups: each group's hyperparameters.
        counted: each group's original parameters, as ids count them.
        not_held: the model's other original parameters, which the optimizer does not have.
        extra: the other keys of the optimizer's own dict.
        classes: the class of each group's optimizer.
        values: the names of the state values of each class, where they are needed.
        stateless: where they are needed, the parameters that have no state, of an optimizer that has some; but for those that
            an optimizer leaves out on this rank.
        module_values: what state_dict() has besides parameters and buffers, by FQN; what stands for it, where it is needed.
        module_takers: paths of modules that may take such values without having them.
    """

    call: str
    order: tuple[str, ...] = ()
    params: tuple[LiveParam, ...] = ()
    groups: tuple[tuple[tuple[str, str], ...], ...] = ()
    counted: tuple[Counted, ...] = ()
    not_held: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    classes: tuple[OptimizerClass, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stateless: tuple[str, ...] = ()
    module_values: tuple[tuple[str, str], ...] = ()
    module_takers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Param:
    """One original parameter in the common picture.

    `variants`: what each group of ranks has of it, where the wrapper says that it must not be collected: then they may
    differ, and a recipient gets that of its own group. Empty for all other parameters.
    """

    fqn: str
    placement: Placement
    group_index: int
    summary: Summary | None
    variants: tuple[tuple[Placement, Summary | None], ...] = ()

    def as_seen_by(self, rank: int) -> Param | None:
        """The parameter as it is for one recipient; None for one that is not collected and that the recipient has not."""
        if not self.variants:
            return self
        for placement, summary in self.variants:
            if rank in placement.ranks:
                return replace(self, placement=placement, summary=summary, variants=())
        return None


@dataclass(frozen=True)
class Picture:
    """The model and the optimizer state of all ranks together, the same value on all of them.

    Attributes:
        params: every original parameter, in the unwrapped model's order.
        live: every live parameter.
        num_groups: the number of param groups.
        counts: what each distinct report says of the order of ids, group by group.
        values: the names of the state values that any rank's optimizer has, by its class.
        stateless: parameters that have no state on the ranks that would have it.
        module_values: what state_dict() has besides parameters and buffers, by FQN, with the ranks that have it.
        module_takers: paths of modules that may take such values without having them.
    """

    params: Mapping[str, Param] = field(default_factory=dict)
    live: tuple[LiveParam, ...] = ()
    num_groups: int = 0
    counts: tuple[tuple[Counted, ...], ...] = ()
    mismatched: tuple[str, ...] = ()  # of which replicas differ, so that only those of the lowest rank count
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    stateless: frozenset[str] = frozenset()
    module_values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    module_takers: tuple[str, ...] = ()

    @property
    def with_state(self) -> frozenset[str]:
        """The parameters that have state on any rank, where the ranks have told."""
        return frozenset(self.params) - self.stateless if self.values else frozenset()

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """Each group's parameters, as ids count them on all ranks together."""
        order = tuple(self.params)
        return tuple(
            merge([counts[index].only(self.params) for counts in self.counts], order)
            for index in range(self.num_groups)
        )

    @property
    def unknown_order(self) -> str:
        """Why ids cannot count these parameters; empty where they can."""
        return next((one.unknown for one in self.counted if one.unknown), "")

    def group_fqns(self, group_index: int) -> tuple[str, ...]:
        return self.counted[group_index].fqns

    def as_seen_by(self, rank: int) -> Picture:
        """What one recipient gets."""
        if not any(param.variants for param in self.params.values()):
            return self
        seen = {fqn: param.as_seen_by(rank) for fqn, param in self.params.items()}
        return replace(self, params={fqn: param for fqn, param in seen.items() if param is not None})

    def ids(self) -> dict[str, int]:
        """FQN -> id, as torch.optim counts: group after group, inside a group as the optimizer lists it."""
        return {fqn: index for index, fqn in enumerate(fqn for group in self.counted for fqn in group.fqns)}


Told = Sequence[tuple[RankReport, tuple[int, ...]]]
"""Distinct reports, each with the ranks that gave it."""


def draw(told: Told, *, take_lowest_rank: bool = False) -> Picture:
    """Put the reports of all ranks together. The same on all ranks, errors too.

    `take_lowest_rank`: where replicas differ, only those of the lowest rank count; else that is an error.

    Raises StateError when the ranks do not see one model with one state.
    """
    _check_calls(told)
    _check_groups(told)
    values: dict[str, frozenset[str]] = {}
    for report, _ in told:
        for name, its in report.values:
            values[name] = values.get(name, frozenset()).union(its)
    seen: dict[str, list[_Seen]] = {}
    live: list[LiveParam] = []
    for report, ranks in told:
        for param in report.params:
            live.append(param)
            for position, fqn in enumerate(param.fqns):
                seen.setdefault(fqn, []).append(_Seen(fqn, param, param.placements[position], ranks))
    not_held = {fqn for report, _ in told for fqn in report.not_held}
    for fqn, items in seen.items():
        if fqn not in not_held and all(item.live.loose for item in items):
            seen[fqn] = _where_it_is(items)
        if any(isinstance(item.placement, Boxes) and item.placement.is_open for item in items):
            seen[fqn] = _all_listed(fqn, items)
    order, _ = merge_lists([report.order for report, _ in told])
    mismatched = tuple(fqn for fqn in order if fqn in seen and _replicas_differ(seen[fqn])) if take_lowest_rank else ()
    lowest = frozenset(mismatched)
    speakers = _Speakers(told[0][1])
    params = {
        fqn: speakers.param(seen[fqn]) or _merge(seen[fqn], take_lowest_rank=fqn in lowest)
        for fqn in order
        if fqn in seen
    }
    _check_classes(told)  # after what says more
    module_values, differing = _merge_module_values(told, take_lowest_rank=take_lowest_rank)
    return Picture(
        params=params,
        live=tuple(live),
        num_groups=len(told[0][0].groups),
        mismatched=(*mismatched, *differing),
        counts=tuple(report.counted for report, _ in told),
        values=values,
        stateless=frozenset(fqn for report, _ in told for fqn in report.stateless),
        module_values=module_values,
        module_takers=tuple(dict.fromkeys(path for report, _ in told for path in report.module_takers)),
    )


def _merge_module_values(told: Told, *, take_lowest_rank: bool) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """The values of modules, with the ranks that have each, the lowest first; and the names of those that differ."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for report, ranks in told:
        for fqn, stands_for in report.module_values:
            found.setdefault(fqn, []).append((stands_for, ranks))
    differing = []
    for fqn, said in found.items():
        (first, first_ranks), *others = said
        for other, ranks in others:
            if other != first and not take_lowest_rank:
                raise StateError(
                    f"{fqn}: what state_dict() has of it differs between {ranks_said(first_ranks)} and {ranks_said(ranks)}"
                    f"{NAME_OF}; if nobody keeps it equal, give on_replica_mismatch='lowest_rank', which takes that of the "
                    "lowest rank"
                )
        if len({stands_for for stands_for, _ in said}) > 1:
            differing.append(fqn)
    return {fqn: tuple(sorted(r for _, ranks in said for r in ranks)) for fqn, said in found.items()}, tuple(differing)


class _Seen(NamedTuple):
    """One parameter as the ranks `ranks` see it."""

    fqn: str
    live: LiveParam
    placement: Placement
    ranks: tuple[int, ...]

    @property
    def is_sure(self) -> bool:
        """Whether nothing is left to be settled, where all that hold the parameter say so."""
        live, summary = self.live, self.live.summary
        return live.collected and (summary is None or not summary.unsure)


class _Speakers:
    """The ranks that gave one report. Parameters share their ranks, so that these are looked at once."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._known: dict[tuple[Ranks, ...], bool] = {}

    def param(self, seen: list[_Seen]) -> Param | None:
        """A parameter of which only these ranks speak, all that hold it, and with nothing to settle; None for others."""
        first = seen[0]
        if len(seen) > 1 or not first.is_sure or not self._are_all_of(first.placement.rank_groups):
            return None
        return Param(first.fqn, first.placement, first.live.group_index, first.live.summary)

    def _are_all_of(self, groups: tuple[Ranks, ...]) -> bool:
        known = self._known.get(groups)
        if known is None:
            known = self._known[groups] = all(self._ranks.issuperset(group) for group in groups)
        return known


def _where_it_is(seen: list[_Seen]) -> list[_Seen]:
    """A parameter without a wrapper is on the ranks whose models have it, as those of pipeline stages are."""
    ranks = tuple(sorted(rank for item in seen for rank in item.ranks))
    return [item._replace(placement=Whole(item.placement.shape, ranks)) for item in seen]


def _all_listed(fqn: str, seen: list[_Seen]) -> list[_Seen]:
    """A parameter of which each rank lists what it holds is what all of them list together.

    Raises StateError where some elements are on no list.
    """
    if len({item.placement.shape for item in seen}) > 1:
        return seen  # an error that is told with those of other parameters
    listed = _merge_placements(seen)
    if not isinstance(listed, Boxes):
        return seen
    gap = listed.gap()
    if gap is not None:
        raise StateError(
            f"{fqn}: its elements {gap[0]} to {gap[1] - 1} of {listed.numel} are in no shard that {ranks_said(listed.ranks)} "
            f"{'list' if len(listed.ranks) > 1 else 'lists'}; give process_group=, all ranks that hold shards of it"
        )
    return [item._replace(placement=listed.closed()) for item in seen]


def _check_calls(told: Told) -> None:
    if len({report.call for report, _ in told}) > 1:
        lines = "; ".join(f"{ranks_said(ranks)}: {report.call}" for report, ranks in told)
        raise RankError(f"the ranks do not make the same call: {lines}")


def _check_groups(told: Told) -> None:
    (first, first_ranks), *others = told
    for report, ranks in others:
        if len(report.groups) != len(first.groups):
            raise StateError(
                f"{_has(first_ranks)} {counted_noun(len(first.groups), 'param group')}, {_has(ranks)} "
                f"{len(report.groups)}: build the optimizer "
                "alike on all ranks"
            )
        where = [f"param group {index}" for index in range(len(first.groups))]
        for what, mine, theirs in zip(
            (*where, "the optimizer's state_dict()"),
            (*first.groups, first.extra),
            (*report.groups, report.extra),
            strict=True,
        ):
            a, b = dict(mine), dict(theirs)
            for key in {**a, **b}:
                if a.get(key) != b.get(key):
                    raise StateError(
                        f"{what}: {key} is {_short(a.get(key, 'absent'))} on {ranks_said(first_ranks)} and "
                        f"{_short(b.get(key, 'absent'))} on {ranks_said(ranks)}; set it alike on all ranks"
                    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _check_classes(told: Told) -> None:
    (first, first_ranks), *others = told
    for report, ranks in others:
        for index, (mine, theirs) in enumerate(zip(first.classes, report.classes, strict=True)):
            if mine.name != theirs.name:
                raise StateError(
                    f"param group {index}: its optimizer is {mine.name} on {ranks_said(first_ranks)} and {theirs.name} on "
                    f"{ranks_said(ranks)}; build the same one on all ranks"
                )


def _merge(seen: list[_Seen], *, take_lowest_rank: bool) -> Param:
    """What several ranks say about one parameter, as one."""
    first = seen[0]
    for other in seen[1:]:
        if other.placement.shape != first.placement.shape:
            raise StateError(
                f"{first.fqn}: shape {list(first.placement.shape)} on {ranks_said(first.ranks)}, "
                f"{list(other.placement.shape)} on {ranks_said(other.ranks)}{NAME_OF}"
            )
        if other.live.group_index != first.live.group_index:
            raise StateError(
                f"{first.fqn}: in param group {first.live.group_index} on {ranks_said(first.ranks)}, in group "
                f"{other.live.group_index} on {ranks_said(other.ranks)}"
            )
    seen = _settled(seen)
    first = seen[0]
    if not all(item.live.collected for item in seen):
        variants = tuple({item.placement: item.live.summary for item in seen}.items())
        return Param(first.fqn, first.placement, first.live.group_index, first.live.summary, variants)
    placement = _merge_placements(seen)
    _check_all_holders_speak(first.fqn, placement, seen)
    if take_lowest_rank:
        placement = placement.on_lowest_ranks()
        seen = [item for item in seen if not set(item.ranks).isdisjoint(placement.ranks)]
        return Param(first.fqn, placement, first.live.group_index, _merge_summaries(placement, seen))
    summary = _merge_summaries(placement, seen)  # says more than the fingerprints do
    _check_replicas_are_equal(seen)
    return Param(first.fqn, placement, first.live.group_index, summary)


def _merge_placements(seen: list[_Seen]) -> Placement:
    said = {item.placement: item for item in reversed(seen)}
    first, *others = dict.fromkeys(item.placement for item in seen)
    joined: Placement | None = first
    for other in others:
        joined = joined.join(other) if joined is not None else None
        if joined is None:
            hint = NAME_OF if set(first.ranks).isdisjoint(other.ranks) else ". Is the model wrapped alike on all ranks?"
            raise StateError(
                f"{seen[0].fqn}: {first} to {ranks_said(said[first].ranks)}, and {other} to {ranks_said(said[other].ranks)}{hint}"
            )
    return joined or first


def _replicas(seen: list[_Seen]) -> Iterator[tuple[_Seen, _Seen]]:
    """Every report of a shard, with the first report of the same shard."""
    first: dict[int, _Seen] = {}
    for item in seen:
        for rank in item.ranks:
            shard = item.placement.shard_of(rank)
            if shard is not None:
                yield first.setdefault(shard, item), item


def _alike(one: _Seen, other: _Seen) -> bool:
    """Whether two reports have the same elements, as far as they say it."""
    prints = {one.live.fingerprint, other.live.fingerprint} - {""}
    return len(prints) < 2


def _replicas_differ(seen: list[_Seen]) -> bool:
    """Whether ranks that hold the same part of a parameter have other elements or scalars of its state."""
    return len(seen) > 1 and any(
        not _alike(one, other)
        or (one.live.summary and one.live.summary.scalars) != (other.live.summary and other.live.summary.scalars)
        for one, other in _replicas(seen)
    )


def _check_replicas_are_equal(seen: list[_Seen]) -> None:
    """Two ranks whose shards of the same name and number differ do not hold replicas of one parameter."""
    for one, other in _replicas(seen) if len(seen) > 1 else ():
        if not _alike(one, other):
            is_state = one.live.what == STATE
            what = (one.live.summary or other.live.summary) if is_state else one.live.what
            raise not_replicas(one.fqn, str(what), one.ranks, other.ranks)


def _check_all_holders_speak(fqn: str, placement: Placement, seen: list[_Seen]) -> None:
    spoken = {rank for item in seen for rank in item.ranks}
    silent = [r for r in placement.ranks if r not in spoken and placement.numel_on(r)]
    if silent:
        raise StateError(
            f"{fqn}: {ranks_said(tuple(silent))} should hold a part of it, and found no such parameter in the model and "
            f"optimizer; {_has(tuple(sorted(spoken)))} one. Is the model built and wrapped alike on all ranks?"
        )


def _merge_summaries(placement: Placement, seen: list[_Seen]) -> Summary | None:
    """The common summary; a rank that holds no element of the parameter may have no state for it."""
    if len(seen) == 1:
        return seen[0].live.summary
    holding = [item for item in seen if any(placement.numel_on(rank) for rank in item.ranks)] or seen
    first = holding[0]
    for other in holding[1:]:
        a, b = first.live.summary, other.live.summary
        if a is None or b is None:
            if a is not b:
                has, lacks = (first, other) if b is None else (other, first)
                raise StateError(
                    f"{first.fqn}: {_has(has.ranks)} {has.live.summary}, {_has(lacks.ranks)} no state; "
                    "did all ranks step, or load, the optimizer?"
                )
            continue
        _compare(first, a, other, b)
    return first.live.summary


def _settled(seen: list[_Seen]) -> list[_Seen]:
    """The same, with one kind for each value that ranks take for different ones, or are not sure of.

    A value that has the shape of the local part on one rank and not on another does not follow the parameter.
    """
    summaries = [item.live.summary for item in seen if item.live.summary is not None]
    if not any(summary.unsure for summary in summaries) and len({summary.sharded for summary in summaries}) < 2:
        return seen
    sure = {name for s in summaries for name, _ in s.sharded if name not in s.unsure}
    unsure = {name for s in summaries for name in s.unsure}
    other = {name for s in summaries for name, odd in s.opaque if odd.kind == "Tensor" and not is_known_moment(name)}
    apart = (unsure - sure) | (other & (sure | unsure))
    return [
        item._replace(live=replace(item.live, summary=item.live.summary.as_opaque(apart)))
        if item.live.summary is not None
        else item
        for item in seen
    ]


def _of_any_rank(told: object) -> object:
    """What is told of a value, without what may differ between ranks: the size of an opaque tensor."""
    return replace(told, shape=()) if isinstance(told, Odd) else told


def _compare(first: _Seen, a: Summary, other: _Seen, b: Summary) -> None:
    mine, theirs = ({name: _of_any_rank(told) for name, told in s.everything.items()} for s in (a, b))
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs or mine[name] != theirs[name]:
            raise StateError(
                f"{first.fqn}: {name} is {mine.get(name, 'absent')} on {ranks_said(first.ranks)} and "
                f"{theirs.get(name, 'absent')} on {ranks_said(other.ranks)}"
                f"{NAME_OF if first.placement != other.placement else ''}"
            )


def _has(ranks: tuple[int, ...]) -> str:
    """`rank 3 has`, `ranks 0, 1 have`."""
    return f"{ranks_said(ranks)} {'has' if len(ranks) == 1 else 'have'}"
