"""Any Views, with the elements that their parts must have: sliced by numpy, axis by axis."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fsdp_optim import View
from fsdp_optim.layout import Shape


def numbers(shape: Shape) -> Any:
    """The row-major number of each element."""
    return np.arange(prod(shape)).reshape(shape)


@st.composite
def any_views(draw: st.DrawFn) -> tuple[View, Shape, dict[str, Any]]:
    """A View, a shape of its live parameter, and by part the elements that it must have: sliced by numpy, axis by axis."""
    letters = iter("abcdefghjklmn")
    factors = [
        [next(letters) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))] for _ in range(draw(st.integers(1, 4)))
    ]
    sizes = {axis: draw(st.integers(1, 3)) for factor in factors for axis in factor}
    cuts = sorted(draw(st.sets(st.integers(1, len(factors)))) | {0, len(factors)})
    dims = [factors[a:b] for a, b in itertools.pairwise(cuts)]
    texts = [" ".join(_text(factor) for factor in dim) for dim in dims]
    axes = " ".join(f"({text})" if len(dim) > 1 else text for dim, text in zip(dims, texts, strict=True))
    shape = tuple(prod(sum(sizes[axis] for axis in factor) for factor in dim) for dim in dims)
    live = numbers(tuple(sum(sizes[axis] for axis in factor) for factor in factors))
    indexed = draw(st.sampled_from([None, *(f[0] for f in factors if len(f) == 1)]))
    left_out = {f[0] for f in factors if len(f) == 1 and sizes[f[0]] == 1 and draw(st.booleans())} - {indexed}
    parts, wanted = dict[str, str](), dict[str, Any]()
    for ranges in _combinations(factors):
        order = [axis for axis in draw(st.permutations(ranges)) if axis != indexed and axis not in left_out]
        marks = [draw(st.booleans()) for _ in order]
        groups = list[list[str]]()
        for axis, is_joined in zip(order, marks, strict=True):
            if is_joined and groups:
                groups[-1].append(axis)
            else:
                groups.append([axis])
        index = f".{{{indexed}}}" if indexed else ""
        name = f"p.{{i}}.{'_'.join(ranges)}{index}"
        parts[name] = " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups)
        taken = live
        for dim, (axis, factor) in enumerate(zip(ranges, factors, strict=True)):
            before = sum(sizes[other] for other in factor[: factor.index(axis)])
            taken = taken.take(range(before, before + sizes[axis]), axis=dim)
        for number in range(sizes[indexed]) if indexed else [None]:
            chosen = taken if number is None else taken.take([number], axis=ranges.index(indexed or ""))
            moved = chosen.transpose([*map(ranges.index, order), *(ranges.index(a) for a in ranges if a not in order)])
            filled = name.replace("{i}", "3").replace(f"{{{indexed}}}", str(number))
            wanted[filled] = moved.reshape([prod(sizes[axis] for axis in group) for group in groups])
    return View("live.{i}", axes, parts, **sizes), shape, wanted


def _text(factor: list[str]) -> str:
    return factor[0] if len(factor) == 1 else f"({' + '.join(factor)})"


def _combinations(factors: list[list[str]]) -> list[list[str]]:
    listed: list[list[str]] = [[]]
    for factor in factors:
        listed = [[*ranges, axis] for ranges in listed for axis in factor]
    return listed
