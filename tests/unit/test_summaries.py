"""Parameters share a summary where their values have equal traits, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.layout import FlatChunks, Whole
from fsdp_optim.plugins import Handle, Original
from fsdp_optim.state.live import LocalParam, read_optimizer
from fsdp_optim.state.values import Summary
from fsdp_optim.view import NamedHandle


def summaries_of(model: nn.Module, *states: dict[str, Any]) -> tuple[Summary | None, ...]:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for param, state in zip(model.parameters(), states, strict=True):
        optim.state[param] = state
    return read_optimizer(optim, ModelReader(model, 0).read()).summaries


def layers(num: int, **options: Any) -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False, **options) for _ in range(num)))


def moment(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, 3, dtype=dtype)


BASE: dict[str, Any] = {"step": 3, "exp_avg": moment(), "exp_avg_sq": moment()}
OTHERS: dict[str, dict[str, Any]] = {
    "another number": {**BASE, "step": 4},
    "a number of another type": {**BASE, "step": 3.0},
    "a tensor in place of a number": {**BASE, "step": torch.tensor(3)},
    "another dtype": {**BASE, "exp_avg": moment(torch.bfloat16)},
    "dtypes the other way round": {**BASE, "exp_avg": moment(torch.float64), "exp_avg_sq": moment()},
    "another order": dict(reversed(BASE.items())),
    "one value more": {**BASE, "max_exp_avg_sq": moment()},
    "another kind": {**BASE, "exp_avg": torch.ones(3)},
    "no state": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_parameter_with_other_traits_has_a_summary_of_its_own(name: str) -> None:
    twin = {**BASE, "exp_avg": moment(), "exp_avg_sq": moment()}
    first, second, other, last = summaries_of(layers(4), BASE, twin, OTHERS[name], dict(BASE))
    assert first is second is last
    assert first is not None
    assert other != first
    assert dict(first.scalars)["step"].value == 3
    assert first.sharded == (("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def test_a_value_may_be_there_under_two_names() -> None:
    number = torch.tensor(2.0)
    model = nn.ParameterList([nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3))])
    whole, other = summaries_of(
        model, {"step": number, "exp_avg": number}, {"step": torch.tensor(2.0), "exp_avg": torch.ones(3)}
    )
    assert whole is not None
    assert other is not None
    assert [name for name, _ in whole.scalars] == ["step"] == [name for name, _ in other.scalars]
    assert whole.sharded == (("exp_avg", "float32"),) == other.sharded


def test_opaque_values_are_described_one_by_one() -> None:
    summaries = summaries_of(layers(3), *({**BASE, "blocks": torch.ones(size)} for size in (5, 5, 7)))
    assert summaries[0] is summaries[1]
    assert [dict(summary.opaque)["blocks"].shape for summary in summaries if summary is not None] == [(5,), (5,), (7,)]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_value_of_one_element_is_unsure_only_where_its_parameter_is_cut(is_cut: bool) -> None:
    param = torch.ones(1)
    placement = FlatChunks((2,), 0, 1, (range(2),)) if is_cut else Whole((1,), (0,))
    handle = Handle(param, (Original(nn.Module(), "a", placement),), (1,))
    assert LocalParam(0, 0, NamedHandle(handle, ("a",)), {"factor": torch.ones(1)}).is_little is is_cut


def test_names_of_any_type_can_be_said() -> None:
    (summary,) = summaries_of(layers(1), {1: moment(), "step": 3})  # type: ignore[dict-item]
    assert str(summary) == "1, step"
    assert str(Summary()) == "an empty state"
