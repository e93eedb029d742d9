"""The fingerprints of replicas: equal for equal values, whatever memory they are in, and different for any other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from fsdp_optim.layout import FlatChunks, Whole
from fsdp_optim.state.live import LocalParam
from fsdp_optim.state.merged import prints
from fsdp_optim.state.merged.prints import prints_of_states
from fsdp_optim.view import Handle, NamedHandle, Original

SHAPE = (4, 6)


def param_of(state: dict[Any, Any] | None, shape: tuple[int, ...] = SHAPE) -> LocalParam:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    handle = Handle(
        param=module.weight, originals=(Original(module, "weight", Whole(shape, (0, 1))),), local_shape=shape
    )
    return LocalParam(0, 0, NamedHandle(handle, ("a",)), state)


def print_of_state(param: LocalParam) -> str:
    """The fingerprint that a parameter has alone."""
    return next(prints_of_states([param], 0))


def moments(seed: int = 0) -> dict[Any, Any]:
    torch.manual_seed(seed)
    return {"step": torch.tensor(3.0), "exp_avg": torch.randn(SHAPE), "exp_avg_sq": torch.randn(SHAPE)}


def in_other_memory(value: torch.Tensor) -> list[torch.Tensor]:
    """The same elements: transposed, with gaps, as a Parameter, with a gradient, and negated twice without a copy."""
    wide = torch.zeros(*SHAPE, 2)
    wide[..., 0] = value
    lazily = torch.complex(torch.zeros_like(value), -value).conj().imag
    assert lazily.is_neg()
    return [
        value.t().contiguous().t(),
        wide[..., 0],
        nn.Parameter(value.clone()),
        value.clone().requires_grad_(),
        lazily,
    ]


class EveryOtherHandle(Handle):
    """A wrapper whose rank holds every other element of a plain tensor."""

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        return value[::2] if self.is_held(value) else None


class MarkingHandle(Handle):
    """A wrapper whose replicas hold different shards of every value that is not shaped like the parameter."""

    def is_marked(self, value: torch.Tensor) -> bool:
        return True

    def placement_of(self, value: torch.Tensor) -> FlatChunks:
        return FlatChunks((8,), 0, 4, ((0, 1),))


def as_kind(param: LocalParam, kind: type[Handle]) -> LocalParam:
    handle = kind(**{field.name: getattr(param.handle, field.name) for field in fields(Handle)})
    return structs.replace(param, named=structs.replace(param.named, handle=handle))


def test_only_what_a_wrapper_holds_counts():
    state = moments()
    other, same = state["exp_avg"].clone(), state["exp_avg"].clone()
    other[2] += 1
    same[1] += 1
    wanted, others, equal = (
        print_of_state(as_kind(param_of({**state, "exp_avg": value}), EveryOtherHandle))
        for value in (state["exp_avg"], other, same)
    )
    assert wanted == equal != others


def test_shards_that_replicas_have_for_themselves_do_not_count():
    state, shard = moments(), torch.zeros(4)
    plain = as_kind(param_of(state), MarkingHandle)
    assert print_of_state(as_kind(param_of({**state, "shard": shard}), MarkingHandle)) == print_of_state(plain)
    assert print_of_state(param_of({**state, "shard": shard})) != print_of_state(param_of(state))


class CopiedHandle(Handle):
    """A wrapper that says in its own way which elements are held."""

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        return value.detach().clone() if self.is_held(value) else None


def test_how_a_wrapper_holds_a_value_makes_no_difference():
    state = {**moments(), "scale": torch.tensor([2.0]), "count": 3, "none": None}
    param = param_of(state)
    copied = as_kind(param, CopiedHandle)
    assert print_of_state(copied) == print_of_state(param)
    other = structs.replace(copied, state={**state, "exp_avg": flipped(state["exp_avg"], 5)})
    assert print_of_state(other) != print_of_state(copied)


@pytest.mark.parametrize("kind", [Handle, CopiedHandle])
def test_padding_makes_no_difference(kind):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(6))
    flat = Original(module, "weight", FlatChunks((10,), 0, 6, ((1, 0),)))
    handle = kind(param=module.weight, originals=(flat,), local_shape=(6,), num_padded=(0, 2))

    def print_of(values: list[float]) -> str:
        return print_of_state(LocalParam(0, 0, NamedHandle(handle, ("a",)), {"exp_avg": torch.tensor(values)}))

    wanted = print_of([1, 2, 3, 4, 0, 0])
    assert print_of([1, 2, 3, 4, 5, 6]) == wanted
    assert print_of([1, 2, 3, 5, 0, 0]) != wanted


def test_the_memory_and_the_order_of_values_make_no_difference():
    state = moments()
    wanted = print_of_state(param_of(state))
    assert print_of_state(param_of(dict(reversed(state.items())))) == wanted
    for value in in_other_memory(state["exp_avg"]):
        assert print_of_state(param_of({**state, "exp_avg": value})) == wanted


def flipped(value: torch.Tensor, at: int) -> torch.Tensor:
    """The value with another lowest bit of one byte."""
    other = value.clone()
    other.view(-1).view(torch.uint8)[at] ^= 1
    return other


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
def test_each_bit_makes_a_difference(name):
    state = moments()
    last = state[name].nbytes - 1
    others = [{**state, name: flipped(state[name], at)} for at in sorted({0, last // 2, last})]
    assert len({print_of_state(param_of(each)) for each in (state, *others)}) == len(others) + 1


def test_what_bytes_do_not_show_makes_a_difference():
    zeros = torch.zeros(SHAPE)
    states = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.to(torch.int32)},
        {"a": zeros.view(6, 4)},
        {"a": zeros.double()[:2]},
        {"a": zeros[:2], "b": zeros[2:]},
        {"a": zeros, "b": torch.zeros(0)},
        {"a": torch.zeros(())},
        {"a": torch.zeros(1)},
        {"a": 0.0},
        {"a": zeros.tolist()},
        {"a": zeros.to_sparse()},
        {"a": zeros.to(torch.complex64)},
        {1: zeros},
        {},
    ]
    assert len({print_of_state(param_of(state)) for state in states}) == len(states)


@pytest.mark.parametrize(("together", "nbytes"), [(1, 1 << 20), (5, 1 << 20), (1000, 100), (1000, 1 << 20)])
def test_many_parameters_have_the_prints_that_each_has_alone(monkeypatch, together, nbytes):
    """Small and large values, several dtypes, values that are no tensors, none at all, and padding."""
    monkeypatch.setattr(prints, "_TOGETHER", together)
    monkeypatch.setattr(prints, "_TOGETHER_NBYTES", nbytes)
    states = [
        *map(moments, range(5)),
        None,
        {},
        {"momentum": torch.randn(SHAPE).bfloat16(), "flag": torch.tensor(True), "count": 7},
        {"large": torch.randn(10_000), "step": torch.tensor(1)},
        {"none": torch.zeros(0, 3)},
        *map(moments, range(5)),
    ]
    params = [param_of(state) for state in states]
    alone = [print_of_state(param) for param in params]
    assert list(prints_of_states(params, 0)) == alone
    assert alone[:5] == alone[-5:]
    assert len(set(alone)) == len(states) - 5 - 1  # None is no state, as {} is
