"""What a load refuses to leave uninitialised, and what its bitwise check finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError, WrapperError
from fsdp_optim.checkpoint.load.compare import _CompareEnd
from fsdp_optim.checkpoint.load.reading import StoredValue
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.layout import Whole
from fsdp_optim.move import Slice
from fsdp_optim.plugins import StoredTensor
from fsdp_optim.state.dicts import NON_PARAM_STATE

NOT_DURABLE = fsdp_optim.SaveOptions(durable=False)
SAVED = torch.arange(6, dtype=torch.float32)


def compare(live: torch.Tensor, start: int, *, is_cast: bool = False) -> int:
    """Compare the elements from `start` on; the number of bytes that were compared."""
    stored = StoredTensor("state.layer.exp_avg", "float32", (6,), "optim.safetensors", 100)
    value = StoredValue.of("layer", "exp_avg", stored, Whole((6,), (0,)), None, is_state=True)
    end = _CompareEnd(0, {value.key: live}, frozenset({value.key} if is_cast else ()))
    end.drain([Slice(value, value.placement, SAVED[start:].clone(), start)])
    return end.nbytes


def test_the_element_that_differs_is_named() -> None:
    """Also in a later window of a value."""
    assert compare(SAVED, 2) == 16
    live = SAVED.clone()
    live[4] = 7
    with pytest.raises(CheckpointError, match=r"layer: exp_avg on rank 0 differs .* at byte 116 of its data"):
        compare(live, 2)
    with pytest.raises(CheckpointError, match=r"cast to bfloat16: the first difference is at element 4"):
        compare(live.to(torch.bfloat16), 2, is_cast=True)


def test_a_dtype_that_was_not_cast_is_refused() -> None:
    """Equal numbers in another dtype are no bitwise copy."""
    assert compare(SAVED.to(torch.bfloat16), 0, is_cast=True) == 24
    with pytest.raises(CheckpointError, match=r"exp_avg is bfloat16 in the live .*, but was saved as float32"):
        compare(SAVED.to(torch.bfloat16), 0)


def test_a_value_without_elements_in_any_file_is_refused(tmp_path: Path) -> None:
    """Memory would be made for it, and nothing would fill it."""
    model = nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    fsdp_optim.save(tmp_path / "step", model, optim, options=fsdp_optim.SaveOptions(durable=False))
    real = StoredState.of

    def without(*args: Any, **kwargs: Any) -> StoredState:
        stored = real(*args, **kwargs)
        values = {**stored.full.state["weight"], "exp_avg": torch.zeros(2, 3)}
        return replace(stored, full=replace(stored.full, state={**stored.full.state, "weight": values}))

    before = optim.state[model.weight]["exp_avg"].clone()
    with (
        mock.patch.object(StoredState, "of", without),
        pytest.raises(StateError, match="weight: exp_avg would be cut like the parameter, but no file has it"),
    ):
        fsdp_optim.load(tmp_path / "step", model, optim)
    assert torch.equal(optim.state[model.weight]["exp_avg"], before)


class Scaled(torch.optim.Adam):
    """Its own dict has another key, which its load leaves alone."""

    loss_scale = 2.0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "loss_scale": self.loss_scale}


def test_another_key_that_was_not_loaded(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optim = Scaled(model.parameters())
    fsdp_optim.save(tmp_path / "step", model, optim, options=fsdp_optim.SaveOptions(durable=False))
    fsdp_optim.load(tmp_path / "step", model, optim, options=fsdp_optim.LoadOptions(compare=True))
    optim.loss_scale = 4.0
    with pytest.raises(CheckpointError, match=r"loss_scale is 4\.0 in the live optimizer, but 2\.0 was saved"):
        fsdp_optim.load(tmp_path / "step", model, optim, options=fsdp_optim.LoadOptions(compare=True))


@pytest.mark.parametrize(
    "key",
    [
        *("kinds", "fqns", "num_padded", "optimizer_class", "param_id_map", "local_ids", "uncollected_local_ids"),
        *("unknown_order", NON_PARAM_STATE),
    ],
)
def test_another_key_with_a_name_of_a_full_dict(tmp_path: Path, key: str) -> None:
    """Every call that reads the optimizer refuses it: beside the library's own key of this name it would be lost."""

    class WithKey(torch.optim.Adam):
        def state_dict(self) -> Any:
            return {**super().state_dict(), key: {"a": 1}}

    model = nn.Linear(3, 2)
    fsdp_optim.save(tmp_path / "step", model, torch.optim.Adam(model.parameters()), options=NOT_DURABLE)
    full = fsdp_optim.gather_full_optim_state_dict(model, torch.optim.Adam(model.parameters()), None)
    optim = WithKey(model.parameters())
    calls: list[Callable[[], Any]] = [
        lambda: fsdp_optim.save(tmp_path / "new", model, optim, options=NOT_DURABLE),
        lambda: fsdp_optim.load(tmp_path / "step", model, optim),
        lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, None),
        lambda: list(fsdp_optim.iter_full_optim_state(model, optim, None)),
        lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full, 0),
        lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
        lambda: fsdp_optim.transfer_optim_state(model, optim, model, torch.optim.Adam(model.parameters())),
    ]
    for call in calls:
        with pytest.raises(
            WrapperError, match=f"state_dict\\(\\) of WithKey has '{key}', .* would be lost: give them other"
        ):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
