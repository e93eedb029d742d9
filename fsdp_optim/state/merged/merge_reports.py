"""The merge of the reports of all ranks into one global state, equal on all ranks."""

from __future__ import annotations

from fsdp_optim.errors import RankError, StateError, counted_noun, only_differing
from fsdp_optim.layout import RankSet, Whole
from fsdp_optim.layout.once import first_equal
from fsdp_optim.layout.views import live_placement
from fsdp_optim.state.dicts.order import merge_lists
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.merge_fused import check_fused
from fsdp_optim.state.merged.merge_param import (
    ReportedParam,
    all_listed,
    merge_param,
    of_single_report,
    on_reporting_ranks,
    ranks_have,
    replicas_differ,
    sure_params,
)
from fsdp_optim.state.merged.replicas import NAME_OF, format_ranks
from fsdp_optim.state.merged.reports import ReportsByRanks, first_difference

_MOST_SHOWN = 200  # characters of a value in an error


def merge_reports(reports: ReportsByRanks, *, take_lowest_rank: bool = False) -> GlobalState:
    """Merge the reports of all ranks. The result, or the error, is equal on all ranks.

    `take_lowest_rank`: of replicas that differ, only the lowest rank's count; else differing replicas are an error.

    Raises StateError when the reports do not describe one model with one state.
    """
    _check_calls(reports)
    _check_groups(reports)
    _check_views(reports)
    values: dict[str, frozenset[str]] = {}
    for report, _ in reports:
        for name, names_of_values in report.values:
            values[name] = values.get(name, frozenset()).union(names_of_values)
    live = [param for report, _ in reports for param in report.params]
    not_held = {fqn for report, _ in reports for fqn in frozenset(report.model_order).difference(report.order)}
    sure = sure_params(live, RankSet(reports[0][1]), not_held) if len(reports) == 1 else {}
    by_fqn: dict[str, list[ReportedParam]] = {}
    for report, ranks in reports:
        for param in report.params:
            for fqn, placement in zip(param.fqns, param.placements, strict=True):
                if fqn not in sure:
                    by_fqn.setdefault(fqn, []).append(ReportedParam(fqn, param, placement, ranks))
    for fqn, items in by_fqn.items():
        if all(item.live.loose or (fqn in not_held and _is_complete(item)) for item in items):
            by_fqn[fqn] = on_reporting_ranks(items)
        if any(item.placement.is_open for item in items):
            by_fqn[fqn] = all_listed(fqn, items)
    known = {**sure, **by_fqn} if by_fqn else sure
    models = [tuple([fqn for fqn in report.model_order or report.order if fqn in known]) for report, _ in reports]
    order, _ = merge_lists(models)
    mismatched = (
        tuple(fqn for fqn in order if fqn in by_fqn and replicas_differ(by_fqn[fqn])) if take_lowest_rank else ()
    )
    lowest = frozenset(mismatched)
    first_ranks = RankSet(reports[0][1])
    alike = first_equal()  # a merge makes a placement for each parameter
    params = {
        fqn: sure.get(fqn)
        or (
            of_single_report(by_fqn[fqn], first_ranks) or merge_param(by_fqn[fqn], take_lowest_rank=fqn in lowest)
        ).placed(alike)
        for fqn in order
        if fqn in known
    }
    check_fused(reports, take_lowest_rank=take_lowest_rank)
    _check_classes(reports)  # last, because the other errors say more
    module_values, differing = _merge_module_values(reports, take_lowest_rank=take_lowest_rank)
    return GlobalState(
        params=params,
        live=tuple(live),
        num_groups=len(reports[0][0].groups),
        mismatched=(*mismatched, *differing),
        counts=tuple(report.counted for report, _ in reports),
        models=tuple(dict.fromkeys(models)),
        values=values,
        stateless=frozenset(fqn for report, _ in reports for fqn in report.stateless),
        module_values=module_values,
        extra_state_loaders=tuple(dict.fromkeys(path for report, _ in reports for path in report.extra_state_loaders)),
        views=tuple(dict.fromkeys(text for report, _ in reports for text in report.views)),
        aliases=dict(pair for report, _ in reversed(reports) for pair in report.aliases),
        buffers=frozenset(fqn for report, _ in reports for fqn in report.buffers),
    )


def _is_complete(item: ReportedParam) -> bool:
    """Return whether the ranks that report a parameter have all of it, so that its state may be on some of its ranks only.

    ZeRO-1 by hand does that: each rank gives its optimizer some of the parameters, and has their complete state.
    """
    return isinstance(live_placement(item.placement), Whole)


def _merge_module_values(
    reports: ReportsByRanks, *, take_lowest_rank: bool
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Return FQN -> sorted ranks that have this entry of a module's state_dict(), and the FQNs of entries that differ."""
    prints_by_fqn: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for report, ranks in reports:
        for fqn, fingerprint in report.module_values:
            prints_by_fqn.setdefault(fqn, []).append((fingerprint, ranks))
    differing = []
    for fqn, prints in prints_by_fqn.items():
        (first, first_ranks), *others = prints
        for other, ranks in others:
            if other != first and not take_lowest_rank:
                raise StateError(
                    f"{fqn}: this entry of state_dict() differs between {format_ranks(first_ranks)} and {format_ranks(ranks)}"
                    f"{NAME_OF}; if it may differ between ranks, give on_replica_mismatch='lowest_rank', which takes the entry "
                    "of the lowest rank"
                )
        if len({fingerprint for fingerprint, _ in prints}) > 1:
            differing.append(fqn)
    return {
        fqn: tuple(sorted(r for _, ranks in prints for r in ranks)) for fqn, prints in prints_by_fqn.items()
    }, tuple(differing)


def _check_calls(reports: ReportsByRanks) -> None:
    if len({report.call for report, _ in reports}) > 1:
        calls = only_differing([report.call for report, _ in reports])
        lines = "; ".join(f"{format_ranks(ranks)}: {call}" for call, (_, ranks) in zip(calls, reports, strict=True))
        raise RankError(f"all ranks must make the same call, but they differ: {lines}")


def _check_views(reports: ReportsByRanks) -> None:
    """Refuse a View that names nothing on any rank."""
    nowhere = set.intersection(*(set(report.unmatched) for report, _ in reports))
    if nowhere:
        raise StateError(
            f"{min(nowhere)}: no parameter or buffer of the model has its name, or the name of one of its parts, on any rank: "
            "compare it with the names of model.named_parameters(), without the parts of wrappers, or leave the View out"
        )


def _check_groups(reports: ReportsByRanks) -> None:
    (first, first_ranks), *others = reports
    for report, ranks in others:
        if len(report.groups) != len(first.groups):
            raise StateError(
                f"{ranks_have(first_ranks)} {counted_noun(len(first.groups), 'param group')}, {ranks_have(ranks)} "
                f"{len(report.groups)}: build the optimizer "
                "alike on all ranks"
            )
        names = [*(f"param group {index}" for index in range(len(first.groups))), "the optimizer's state_dict()"]
        sections = zip(names, (*first.groups, first.other_keys), (*report.groups, report.other_keys), strict=True)
        difference = first_difference(sections)
        if difference is not None:
            section, key, first_text, text = difference
            raise StateError(
                f"{section}: {key} is {_short(first_text)} on {format_ranks(first_ranks)} and {_short(text)} on "
                f"{format_ranks(ranks)}; set it alike on all ranks"
            )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _check_classes(reports: ReportsByRanks) -> None:
    (first, first_ranks), *others = reports
    for report, ranks in others:
        for index, (first_class, other) in enumerate(zip(first.classes, report.classes, strict=True)):
            if first_class.name != other.name:
                raise StateError(
                    f"param group {index}: its optimizer is {first_class.name} on {format_ranks(first_ranks)} and {other.name} "
                    f"on {format_ranks(ranks)}; build the same optimizer on all ranks"
                )
