"""The merge of reports in one process: what differs between ranks, and what only some of them know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_optim import StateError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.state.merged import GlobalState, LiveParam, RankReport
from fsdp_optim.state.merged.merge_reports import merge_reports
from fsdp_optim.state.values import Scalar, Summary
from fsdp_optim.state.values.summary import OpaqueType

SUMMARY = Summary(sharded=(("exp_avg", "float32"),), names=("exp_avg",))
BOTH = Whole((4,), (0, 1))
CUT = FlatChunks((8,), 0, 5, ((0, 1),))


def report(
    placement: Placement, summary: Summary | None = SUMMARY, *, fingerprint: str = "", **more: Any
) -> RankReport:
    """The report of a rank that has one parameter, `w`."""
    live = LiveParam(("w",), (placement,), 0, (), collected=True, summary=summary, fingerprint=fingerprint)
    return RankReport("gather()", ("w",), (live,), ((),), **more)


def merged(*reports: RankReport, ranks: Sequence[tuple[int, ...]] = (), lowest: bool = False) -> GlobalState:
    """The merge of reports, which the ranks 0, 1, ... gave, or the given ones."""
    by_ranks = ranks or [(rank,) for rank in range(len(reports))]
    return merge_reports(list(zip(reports, by_ranks, strict=True)), take_lowest_rank=lowest)


def stepped(number: float) -> Summary:
    """A moment, and a count of steps."""
    return replace(SUMMARY, scalars=(("step", Scalar.of(torch.tensor(number))),), names=("exp_avg", "step"))


@pytest.mark.parametrize("numel", [4, 0])
@pytest.mark.parametrize("fingerprint", ["", "equal"])
def test_replicas_whose_scalars_differ_are_those_of_the_lowest_rank_where_asked_for(
    numel: int, fingerprint: str
) -> None:
    """Also where all their elements are equal, and where there are none."""
    place = Whole((numel,), (0, 1))
    reports = [report(place, stepped(number), fingerprint=fingerprint) for number in (3.0, 4.0)]
    state = merged(*reports, lowest=True)
    assert state.mismatched == ("w",)
    assert state.params["w"].summary == stepped(3.0)
    assert state.params["w"].placement.ranks == (0,)
    with pytest.raises(StateError, match=r"w: step is .*3.* on rank 0 and .*4.* on rank 1"):
        merged(*reports)


def test_equal_replicas_stay_on_all_their_ranks_where_the_lowest_is_asked_for() -> None:
    state = merged(*[report(BOTH, stepped(3.0), fingerprint="equal") for _ in range(2)], lowest=True)
    assert not state.mismatched
    assert state.params["w"].placement == BOTH


def test_ranks_without_elements_are_no_replicas() -> None:
    """Two ranks that list no shard of a parameter may have different states for it."""
    shard = Block(Box((0,), (4,)), 0)
    lists = [((0, (shard,)),), ((1, ()),), ((2, ()),)]
    reports = [
        report(Boxes((4,), by_rank, is_open=True), fingerprint=f"print {number}")
        for number, by_rank in enumerate(lists)
    ]
    assert merged(*reports).params["w"].placement.numel_on(0) == 4
    assert merged(*reports, lowest=True).mismatched == ()


def test_a_value_that_follows_the_parameter_on_one_rank_by_coincidence_is_kept_per_shard() -> None:
    """It has the shape of the local part on rank 0 alone."""
    of_first = Summary(sharded=(("codes", "float32"),), names=("codes",))
    of_other = Summary(opaque=(("codes", OpaqueType("Tensor", "float32", (5,))),), names=("codes",))
    for reports in ((of_first, of_other), (of_other, of_first)):
        summary = merged(*[report(CUT, summary) for summary in reports]).params["w"].summary
        assert summary is not None
        assert summary.sharded == ()
        assert [name for name, _ in summary.opaque] == ["codes"]


def test_a_moment_of_torch_follows_the_parameter_or_is_an_error() -> None:
    """Its name says that it has the shape of the parameter, whatever one rank has found."""
    summary = Summary(opaque=(("exp_avg", OpaqueType("Tensor", "float32", (5,))),), names=("exp_avg",))
    with pytest.raises(StateError, match="w: exp_avg is float32 on rank 0 and a Tensor of shape"):
        merged(report(CUT), report(CUT, summary))


@pytest.mark.parametrize("alone", [True, False])
def test_a_placed_value_needs_all_ranks_of_its_mesh(alone: bool) -> None:
    """Also where the parameter itself needs none of them, and all the ranks of the call give one report."""
    on_mesh = MeshBoxes((4,), (2,), ((0, 0),), ((0, 1),))
    summary = Summary(placed=(("factor", ("float32", on_mesh)),), names=("factor",))
    if alone:
        with pytest.raises(
            StateError, match=r"w: factor is .* and rank 1 should have a part of it, but only rank 0 has"
        ):
            merged(report(Whole((4,), (0,)), summary))
    else:
        (placed,) = (merged(report(BOTH, summary), ranks=[(0, 1)]).params["w"].summary or Summary()).placed
        assert placed == ("factor", ("float32", on_mesh))


def test_what_only_some_ranks_know_is_joined() -> None:
    """State, names of values and entries of state_dict() that are not on the first rank."""
    first = report(
        BOTH,
        values=(("Adam", ("exp_avg",)), ("SGD", ())),
        module_values=(("m.extra", "x"),),
        extra_state_loaders=("m",),
    )
    other = report(
        BOTH,
        values=(("Adam", ("step",)),),
        stateless=("w",),
        module_values=(("m.extra", "x"), ("n.extra", "y")),
        extra_state_loaders=("n", "m"),
    )
    for reports, ranks in (((first, other), [(0, 3), (1, 2)]), ((other, first), [(1, 2), (0, 3)])):
        place = report(Whole((4,), (0, 1, 2, 3))).params
        state = merged(*[replace(given, params=place) for given in reports], ranks=ranks)
        assert state.values == {"Adam": frozenset({"exp_avg", "step"}), "SGD": frozenset()}
        assert state.stateless == {"w"}
        assert state.with_state == frozenset()
        assert state.module_values == {"m.extra": (0, 1, 2, 3), "n.extra": (1, 2)}
        assert set(state.extra_state_loaders) == {"m", "n"}
    assert merged(first, first).with_state == {"w"}


def many(*, twice: bool = False, missing: bool = False, loose: bool = False) -> RankReport:
    """The report of a rank with the parameters a, b and c. The arguments change `b` only."""
    places = [BOTH, Whole((3,), (0, 1, 2) if missing else (0, 1)), CUT]
    live = [
        LiveParam((name,), (place,), 0, (), collected=True, summary=SUMMARY, loose=loose and name == "b")
        for name, place in zip("abc", places, strict=True)
    ]
    if twice:
        live.append(LiveParam(("b",), (BOTH,), 0, (), collected=True, summary=SUMMARY))
    return RankReport("gather()", ("a", "b", "c"), tuple(live), ((),))


def test_one_report_of_all_ranks_merges_as_one_of_each() -> None:
    """A single report takes a shorter way, parameter by parameter."""
    single = merged(many(), ranks=[(0, 1)])
    each = merged(many(), many())
    assert single.params == each.params
    assert list(single.params) == ["a", "b", "c"]


def test_one_report_of_fewer_ranks_than_hold_a_parameter() -> None:
    with pytest.raises(StateError, match=r"b: rank 2 should hold a part of this parameter"):
        merged(many(missing=True), ranks=[(0, 1)])


def test_one_report_that_names_a_parameter_twice() -> None:
    with pytest.raises(StateError, match=r"b: shape \[3\] on ranks 0, 1, \[4\] on ranks 0, 1"):
        merged(many(twice=True), ranks=[(0, 1)])


def test_a_parameter_that_no_wrapper_knows_is_on_the_ranks_that_report_it() -> None:
    state = merged(many(loose=True), ranks=[(0, 1, 2)])
    assert state.params["b"].placement.ranks == (0, 1, 2)
    assert state.params["a"].placement.ranks == (0, 1)
