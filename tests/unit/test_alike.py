"""The facts that equal layers share are found out once, and nothing that differs is taken for the same."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from kit.compare import check_same
from msgspec import structs
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.state.live import read_optimizer
from fsdp_optim.state.merged import GlobalState, LiveParam, RankReport
from fsdp_optim.state.merged.global_state import Param
from fsdp_optim.state.values import Scalar, Scalars, Summary, same
from fsdp_optim.state.values.summary import OpaqueType


def with_bits(bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_scalars_with_equal_bits_are_one_and_all_others_stay_apart() -> None:
    nans = with_bits(0x7FC00001), with_bits(0x7FC00002)
    values = [
        *(torch.tensor(3.0), torch.tensor(3.0), torch.tensor(3), torch.tensor(3, dtype=torch.int32), torch.tensor(4.0)),
        *(torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(True), torch.tensor(3.0, dtype=torch.bfloat16), *nans),
        *(torch.tensor(1 + 2j), torch.tensor(3.0, requires_grad=True), 3.0, "3.0", None, torch.ones(3)[1]),
    ]
    scalars = Scalars(values)
    scalars_of_values = [scalars.of(value) for value in values]
    assert scalars_of_values == [Scalar.of(value) for value in values]
    assert scalars_of_values[0] is scalars_of_values[1]
    for value, scalar in zip(values, scalars_of_values, strict=True):
        if isinstance(value, torch.Tensor):
            assert scalar.value.dtype is value.dtype
            assert scalar.value.data_ptr() != value.data_ptr()
            assert not scalar.value.requires_grad
        else:
            assert scalar.value is value
    assert [int(scalars.of(nan).value.view(torch.int32)) for nan in nans] == [0x7FC00001, 0x7FC00002]


@pytest.mark.parametrize("bits", [0x7F800001, -0x3EDCBB, -(1 << 31), 1, 0x3F800000])
def test_a_scalar_for_other_ranks_keeps_its_bits(bits: int) -> None:
    """Also a NaN that signals, which becomes a quiet one where it is a number of Python."""
    others = (1 + 2j, 2**62 + 1, True, -0.0)
    for value in (with_bits(bits), torch.tensor(1.5).bfloat16(), *map(torch.tensor, others)):
        scalar = Scalar.of(value)
        again = pickle.loads(pickle.dumps(scalar))
        assert again == scalar
        check_same("value", again.value, scalar.value)


def test_parameters_with_the_same_state_share_a_summary_and_others_do_not() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    states = [optim.state[param] for param in model.parameters()]
    states[2]["step"] = torch.tensor(7.0)
    states[3]["exp_avg"] = states[3]["exp_avg"].to(torch.bfloat16)
    states[4]["step"], states[5]["step"] = with_bits(0x7FC00001), with_bits(0x7FC00002)
    summaries = read_optimizer(optim, ModelReader(model, 0).read()).summaries
    assert summaries[0] is summaries[1]
    assert len({id(summary) for summary in summaries}) == 5
    assert summaries[2] != summaries[0] != summaries[3]
    bits = [
        int(dict(summary.scalars)["step"].value.view(torch.int32)) for summary in summaries[4:] if summary is not None
    ]
    assert bits == [0x7FC00001, 0x7FC00002]


def kinds_of(units: list[tuple[str, ...]], params: dict[str, Param]) -> list[tuple[object, ...]]:
    """What a load looks at of each unit, one parameter after the other."""
    kinds = []
    for fqns in units:
        held = [params[fqn] for fqn in fqns]
        kinds.append(tuple((param.placement.shape, param.group_index, repr(param.summary)) for param in held))
    return kinds


def test_one_parameter_of_each_kind() -> None:
    """Each kind is there, flat parameters stay together, and opaque values, which no summary describes, are all there."""
    adam = Summary((("exp_avg", "float32"),), (("step", Scalar.of(torch.tensor(3.0))),), names=("exp_avg", "step"))
    copied = Summary((("exp_avg", "float32"),), (("step", Scalar.of(torch.tensor(3.0))),), names=("exp_avg", "step"))
    later = Summary((("exp_avg", "float32"),), (("step", Scalar.of(torch.tensor(4.0))),), names=("exp_avg", "step"))
    opaque = Summary(opaque=(("history", OpaqueType("list")),), names=("history",))
    square, wide = Whole((4, 4), (0,)), Whole((4, 8), (0,))
    cases = [
        (square, 0, adam),
        (square, 0, copied),
        (square, 1, adam),
        (wide, 0, adam),
        (square, 0, later),
        (square, 0, None),
    ]
    cases += [(square, 0, opaque), (square, 0, opaque), (wide, 0, adam), (square, 0, adam), (wide, 0, copied)]
    params = {f"p{at}": Param(f"p{at}", place, group, summary) for at, (place, group, summary) in enumerate(cases)}
    units = [*((f"p{at}",) for at in range(9)), ("p9", "p10")]
    state = GlobalState(params=params)
    kept = state.one_of_each_kind(units, frozenset())
    assert [fqns for fqns in units if not kept.isdisjoint(fqns)] == [
        *((f"p{at}",) for at in (0, 2, 3, 4, 5, 6, 7)),
        ("p9", "p10"),
    ]
    assert {*kinds_of([fqns for fqns in units if kept.issuperset(fqns)], params)} == {*kinds_of(units, params)}
    on_mesh = state.one_of_each_kind(units, frozenset({"p1", "p8"}))
    assert on_mesh == kept | {"p1", "p8"}


PLACES: tuple[Placement, ...] = (
    Whole((4, 3), (0, 1)),
    FlatChunks((4, 3), 0, 6, (range(2),)),
    FlatChunks((4, 3), 2, 7, (range(2),)),
    MeshBoxes((4, 3), (2,), ((0, 0),), (range(2),)),
)
LIVE = LiveParam(("a", "b"), PLACES[:2], 0, (), collected=True, summary=Summary((("exp_avg", "float32"),)))
OTHERS = (
    structs.replace(LIVE, fqns=("a", "c")),
    structs.replace(LIVE, placements=PLACES[1:3]),
    structs.replace(LIVE, placements=PLACES[1::-1]),
    structs.replace(LIVE, group_index=1),
    structs.replace(LIVE, num_padded=(0, 1)),
    structs.replace(LIVE, collected=False),
    structs.replace(LIVE, summary=None),
    structs.replace(LIVE, summary=Summary((("exp_avg", "float64"),))),
    structs.replace(LIVE, summary=Summary(scalars=(("step", Scalar.of(1.0)),))),
    structs.replace(LIVE, fingerprint="1"),
    structs.replace(LIVE, loose=True),
    structs.replace(LIVE, what="elements"),
    structs.replace(LIVE, fused=("ab",)),
)


@pytest.mark.parametrize("other", OTHERS)
def test_reports_have_one_text_only_where_they_are_equal(other: LiveParam) -> None:
    report = RankReport("gather()", order=("a", "b"), params=(LIVE, LIVE))
    placements = tuple(map(replace, LIVE.placements))
    copied = structs.replace(LIVE, placements=placements, summary=Summary((("exp_avg", "float32"),)))
    assert copied.placements[0] is not LIVE.placements[0]
    assert replace(report, params=(copied, LIVE)).text() == report.text()
    texts = {replace(report, params=params).text() for params in ((LIVE, other), (other, LIVE), (other, other))}
    assert len({report.text(), *texts}) == 4


@pytest.mark.parametrize(
    "changed", [{"call": "save()"}, {"order": ("b", "a")}, {"other_keys": (("scale", "2.0"),)}, {"model_order": ("c",)}]
)
def test_what_is_not_of_one_parameter_is_in_the_text_too(changed: dict[str, object]) -> None:
    report = RankReport("gather()", order=("a", "b"), params=(LIVE,))
    assert replace(report, **changed).text() != report.text()  # type: ignore[arg-type]


def test_values_of_different_types_are_not_the_same() -> None:
    """Also where all their parts are equal, as after a decoder that makes lists of tuples."""
    part = torch.ones(2)
    for value, other in (
        ([1, part], (1, part)),
        ({"a": part}, OrderedDict(a=part)),
        (True, 1),
        (1, 1.0),
        (None, "None"),
    ):
        assert same(value, value)
        assert not same(value, other)
        assert not same([value], [other])
