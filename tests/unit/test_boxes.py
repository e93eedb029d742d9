"""`Box` and runs of boxes against sets of elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit import oracle
from kit.cases import examples

from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import (
    Box,
    Shape,
    bounds_of_box,
    boxes_of_run,
    row_major_strides,
)

many = examples(100)
some = examples(40)


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(oracle.shapes)
    whole = Box((0,) * len(shape), shape)
    return shape, draw(st.one_of(st.just(whole), oracle.boxes_in(shape))), draw(oracle.boxes_in(shape))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(oracle.shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@many
@given(two_boxes())
def test_intersect_is_the_common_elements(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = set(oracle.elements_of_box(shape, a)) & set(oracle.elements_of_box(shape, b))
    intersection = a.intersect(b)
    if not common:
        assert intersection is None
    else:
        assert intersection is not None
        assert set(oracle.elements_of_box(shape, intersection)) == common
        assert intersection == b.intersect(a)


@many
@given(two_boxes())
@example(((4, 4, 4), Box((0, 0, 0), (4, 4, 4)), Box((1, 1, 1), (2, 2, 2))))
def test_subtract_leaves_every_other_element_once(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    rest = a.subtract(b)
    left = [element for box in rest for element in oracle.elements_of_box(shape, box)]
    without_b = set(oracle.elements_of_box(shape, a)) - set(oracle.elements_of_box(shape, b))
    assert sorted(left) == sorted(without_b)
    assert all(box.numel for box in rest)
    assert len(rest) <= max(2 * len(shape), 1)


@some
@given(two_boxes())
def test_bounds_are_the_first_element_and_one_past_the_last(case: tuple[Shape, Box, Box]) -> None:
    shape, box, _ = case
    elements = oracle.elements_of_box(shape, box)
    assert box.numel == len(elements)
    if elements:
        assert bounds_of_box(shape, box) == (min(elements), max(elements) + 1)


@some
@given(oracle.shapes.filter(all))
def test_strides_are_those_of_numpy(shape: Shape) -> None:
    assert row_major_strides(shape) == np.empty(shape, np.int8).strides


@many
@given(runs())
@example(((), 0, 1))
@example(((2, 2, 3, 2), 1, 23))
def test_boxes_of_run_are_the_run_in_order(case: tuple[Shape, int, int]) -> None:
    shape, start, stop = case
    boxes = boxes_of_run(shape, start, stop)
    elements = [element for box in boxes for element in oracle.elements_of_box(shape, box)]
    assert elements == list(range(start, stop))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_boxes_of_run_takes_whole_rows_together() -> None:
    assert boxes_of_run((4, 3), 2, 10) == (Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 1)))
    assert boxes_of_run((4, 3), 0, 12) == (Box((0, 0), (4, 3)),)
    assert boxes_of_run((4, 3), 3, 9) == (Box((1, 0), (2, 3)),)
    assert boxes_of_run((4, 3), 3, 3) == ()


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-1,))])
def test_impossible_boxes_are_refused(offsets: Shape, sizes: Shape) -> None:
    with pytest.raises(LayoutError):
        Box(offsets, sizes)
