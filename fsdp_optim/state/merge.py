"""What several ranks say of one parameter, as one; or an error that names the ranks which do not agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Boxes, Placement, Ranks, Whole
from fsdp_optim.state.kinds import is_known_moment
from fsdp_optim.state.picture import Param
from fsdp_optim.state.replicas import NAME_OF, STATE, not_replicas, ranks_said
from fsdp_optim.state.reports import LiveParam
from fsdp_optim.state.values import Odd, Summary


class Seen(NamedTuple):
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


class Speakers:
    """The ranks that gave one report. Parameters share their ranks, so that these are looked at once."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._known: dict[tuple[Ranks, ...], bool] = {}

    def param(self, seen: list[Seen]) -> Param | None:
        """The parameter, where one report from all of its holders leaves nothing to merge or settle; else None."""
        first = seen[0]
        if len(seen) > 1 or not first.is_sure or not self._are_all_of(first.placement.rank_groups):
            return None
        return Param(first.fqn, first.placement, first.live.group_index, first.live.summary)

    def _are_all_of(self, groups: tuple[Ranks, ...]) -> bool:
        known = self._known.get(groups)
        if known is None:
            known = self._known[groups] = all(self._ranks.issuperset(group) for group in groups)
        return known


def where_it_is(seen: list[Seen]) -> list[Seen]:
    """A parameter without a wrapper is on the ranks whose models have it, as those of pipeline stages are."""
    ranks = tuple(sorted(rank for item in seen for rank in item.ranks))
    return [item._replace(placement=Whole(item.placement.shape, ranks)) for item in seen]


def all_listed(fqn: str, seen: list[Seen]) -> list[Seen]:
    """Give a parameter the placement that the lists of all ranks make together, where each rank lists its own shards.

    Raises StateError where some elements are on no list.
    """
    if len({item.placement.shape for item in seen}) > 1:
        return seen  # merge_param raises the error
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


def merge_param(seen: list[Seen], *, take_lowest_rank: bool) -> Param:
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


def _merge_placements(seen: list[Seen]) -> Placement:
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


def _replicas(seen: list[Seen]) -> Iterator[tuple[Seen, Seen]]:
    """Every report of a shard, with the first report of the same shard."""
    first: dict[int, Seen] = {}
    for item in seen:
        for rank in item.ranks:
            shard = item.placement.shard_of(rank)
            if shard is not None:
                yield first.setdefault(shard, item), item


def _alike(one: Seen, other: Seen) -> bool:
    """Whether two reports have the same elements, as far as they say it."""
    prints = {one.live.fingerprint, other.live.fingerprint} - {""}
    return len(prints) < 2


def replicas_differ(seen: list[Seen]) -> bool:
    """Whether ranks that hold the same part of a parameter have other elements or scalars of its state."""
    return len(seen) > 1 and any(
        not _alike(one, other)
        or (one.live.summary and one.live.summary.scalars) != (other.live.summary and other.live.summary.scalars)
        for one, other in _replicas(seen)
    )


def _check_replicas_are_equal(seen: list[Seen]) -> None:
    """Two ranks whose shards of the same name and number differ do not hold replicas of one parameter."""
    for one, other in _replicas(seen) if len(seen) > 1 else ():
        if not _alike(one, other):
            is_state = one.live.what == STATE
            what = (one.live.summary or other.live.summary) if is_state else one.live.what
            raise not_replicas(one.fqn, str(what), one.ranks, other.ranks)


def _check_all_holders_speak(fqn: str, placement: Placement, seen: list[Seen]) -> None:
    spoken = {rank for item in seen for rank in item.ranks}
    silent = [r for r in placement.ranks if r not in spoken and placement.numel_on(r)]
    if silent:
        raise StateError(
            f"{fqn}: {ranks_said(tuple(silent))} should hold a part of it, and found no such parameter in the model and "
            f"optimizer; {ranks_have(tuple(sorted(spoken)))} one. Is the model built and wrapped alike on all ranks?"
        )


def _merge_summaries(placement: Placement, seen: list[Seen]) -> Summary | None:
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
                    f"{first.fqn}: {ranks_have(has.ranks)} {has.live.summary}, {ranks_have(lacks.ranks)} no state; "
                    "did all ranks step, or load, the optimizer?"
                )
            continue
        _compare(first, a, other, b)
    return first.live.summary


def _settled(seen: list[Seen]) -> list[Seen]:
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
    """The description of a value without the shape of an opaque tensor, which may differ between ranks."""
    return replace(told, shape=()) if isinstance(told, Odd) else told


def _compare(first: Seen, a: Summary, other: Seen, b: Summary) -> None:
    mine, theirs = ({name: _of_any_rank(told) for name, told in s.everything.items()} for s in (a, b))
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs or mine[name] != theirs[name]:
            raise StateError(
                f"{first.fqn}: {name} is {mine.get(name, 'absent')} on {ranks_said(first.ranks)} and "
                f"{theirs.get(name, 'absent')} on {ranks_said(other.ranks)}"
                f"{NAME_OF if first.placement != other.placement else ''}"
            )


def ranks_have(ranks: tuple[int, ...]) -> str:
    """`rank 3 has`, `ranks 0, 1 have`."""
    return f"{ranks_said(ranks)} {'has' if len(ranks) == 1 else 'have'}"
