"""Hooks that cut and permute by any View, learned exactly and from twins: the View of what they do, element by element."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.any_views import any_views
from kit.cases import examples
from kit.hooked import Hooked
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import View
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import Part, numbers_of_part
from fsdp_optim.layout.views.axes import read_axes

many = examples(60)


def taken(live: Tensor, part: Part) -> Tensor:
    """The elements of a part, by reshaping, narrowing and permuting."""
    pieces = live.reshape([size for factors in part.factors for size in factors])
    for factor, (low, size) in enumerate(zip(part.lows, part.sizes, strict=True)):
        pieces = pieces.narrow(factor, low, size)
    order = [factor for dim in part.dims for factor in dim]
    return pieces.permute([*order, *(f for f in range(pieces.dim()) if f not in order)]).reshape(part.shape)


def put(live: Tensor, part: Part, value: Tensor) -> None:
    """Write the elements of a part."""
    pieces = live.view([size for factors in part.factors for size in factors])
    for factor, (low, size) in enumerate(zip(part.lows, part.sizes, strict=True)):
        pieces = pieces.narrow(factor, low, size)
    order = [factor for dim in part.dims for factor in dim]
    rest = [factor for factor in range(pieces.dim()) if factor not in order]
    moved = pieces.permute([*order, *rest])
    moved.copy_(value.reshape(moved.shape))


def hooked(view: View, shape: Shape) -> nn.Module:
    """A module whose hooks do what the View says, with the sizes that it does not infer as attributes."""

    def save(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        live = state.pop(f"{prefix}live.3")
        for name, part in view.bind("live.3", tuple(live.shape)).parts:
            state[prefix + name] = taken(live, part)

    def load(module: Any, state: dict[str, Any], prefix: str) -> None:
        names = {name for name in state if name.startswith(f"{prefix}p.")}
        for size in live_shapes(view, shape, {name: tuple(state[name].shape) for name in names}):
            live = torch.empty(size, dtype=state[next(iter(names))].dtype, device=state[next(iter(names))].device)
            for name, part in view.bind("live.3", size).parts:
                put(live, part, state.pop(prefix + name))
            state[f"{prefix}live.3"] = live

    module = Hooked(save, load)
    module.live = nn.Module()
    module.live.register_parameter("3", nn.Parameter(torch.empty(shape, device="meta")))
    return module


def live_shapes(view: View, shape: Shape, parts: Mapping[str, Shape]) -> list[Shape]:
    """The live shape whose parts have these shapes: each dimension a part of the full one, or as long."""
    options: list[list[int]] = [
        sorted({length, *(t * b for t in (3, 5) for b in range(1, length + 1) if length % b == 0)}) for length in shape
    ]
    for size in itertools.product(*options):
        try:
            if view.bind("live.3", size).shapes == dict(parts):
                return [size]
        except LayoutError:
            continue
    return []


@st.composite
def views_of_sizes(draw: st.DrawFn) -> tuple[View, Shape]:
    """A View that infers the size of an axis of some dimensions, which are longer than the twins."""
    view, _, _ = draw(any_views())
    sizes = dict(view.sizes)
    dims = read_axes("any", view.axes)
    for dim in dims:
        plain = [factor[0] for factor in dim if len(factor) == 1]
        if plain and draw(st.booleans()):
            del sizes[draw(st.sampled_from(plain))]
    inferred = dict(view.sizes).keys() - sizes.keys()
    brackets = [
        re.split(r"[ +()]+", group) for part in dict(view.parts).values() for group in re.findall(r"\([^()]*\)", part)
    ]
    assume(
        not any(len(inferred.intersection(group)) > 1 for group in brackets)
    )  # a hook cannot tell 3 x 20 from 5 x 12
    left = View(view.name, view.axes, dict(view.parts), **sizes)
    full = dict(view.sizes) | {a: draw(st.sampled_from([1, 5, 7, 12])) for a in dict(view.sizes) if a not in sizes}
    lengths = [[sum(full[axis] for axis in factor) for factor in dim] for dim in dims]
    shape = tuple(int(np.prod(factors)) for factors in lengths)
    try:
        left.bind("live.3", shape)
    except LayoutError:  # an axis of one index, which parts leave out, has more here
        assume(False)
    return left, shape


def check(view: View, shape: Shape, limits: dict[str, int]) -> None:
    with mock.patch.multiple("fsdp_optim.model_views.hooks", **limits):
        (learned,) = fsdp_optim.views_for(hooked(view, shape))
    parts, wanted = (dict(each.bind("live.3", shape).parts) for each in (learned, view))
    assert parts.keys() == wanted.keys(), (learned, view)
    for name, part in wanted.items():
        assert np.array_equal(numbers_of_part(parts[name]), numbers_of_part(part)), (name, learned, view)


@many
@given(views_of_sizes())
def test_twins_show_what_hooks_do_at_full_size(drawn: tuple[View, Shape]) -> None:
    check(*drawn, {"EXACT_NBYTES": 0, "MOST_NBYTES": 0})


@many
@given(views_of_sizes())
def test_numbers_show_what_hooks_do(drawn: tuple[View, Shape]) -> None:
    check(*drawn, {"EXACT_NBYTES": 1 << 30})
