"""From the reports of all ranks to one picture, the same on all of them."""

from __future__ import annotations

from fsdp_optim.errors import RankError, StateError, counted_noun
from fsdp_optim.layout import Boxes
from fsdp_optim.state.merge import Seen, Speakers, all_listed, merge_param, ranks_have, replicas_differ, where_it_is
from fsdp_optim.state.order import merge_lists
from fsdp_optim.state.picture import Picture
from fsdp_optim.state.replicas import NAME_OF, ranks_said
from fsdp_optim.state.reports import LiveParam, Told

_MOST_SHOWN = 200  # letters of a value in an error


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
    seen: dict[str, list[Seen]] = {}
    live: list[LiveParam] = []
    for report, ranks in told:
        for param in report.params:
            live.append(param)
            for position, fqn in enumerate(param.fqns):
                seen.setdefault(fqn, []).append(Seen(fqn, param, param.placements[position], ranks))
    not_held = {fqn for report, _ in told for fqn in report.not_held}
    for fqn, items in seen.items():
        if fqn not in not_held and all(item.live.loose for item in items):
            seen[fqn] = where_it_is(items)
        if any(isinstance(item.placement, Boxes) and item.placement.is_open for item in items):
            seen[fqn] = all_listed(fqn, items)
    order, _ = merge_lists([report.order for report, _ in told])
    mismatched = tuple(fqn for fqn in order if fqn in seen and replicas_differ(seen[fqn])) if take_lowest_rank else ()
    lowest = frozenset(mismatched)
    speakers = Speakers(told[0][1])
    params = {
        fqn: speakers.param(seen[fqn]) or merge_param(seen[fqn], take_lowest_rank=fqn in lowest)
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


def _check_calls(told: Told) -> None:
    if len({report.call for report, _ in told}) > 1:
        lines = "; ".join(f"{ranks_said(ranks)}: {report.call}" for report, ranks in told)
        raise RankError(f"the ranks do not make the same call: {lines}")


def _check_groups(told: Told) -> None:
    (first, first_ranks), *others = told
    for report, ranks in others:
        if len(report.groups) != len(first.groups):
            raise StateError(
                f"{ranks_have(first_ranks)} {counted_noun(len(first.groups), 'param group')}, {ranks_have(ranks)} "
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
