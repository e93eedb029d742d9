"""Views from the numbers of elements, as hooks and converters give them: layouts of trainers, any View, and what is none."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from kit.any_views import any_views, numbers
from kit.cases import examples

from fsdp_optim import View
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import fitted_view, numbers_of_part

many = examples(300)


def elements_of(view: View, name: str, shape: Shape) -> dict[str, Any]:
    """The elements of the live parameter by part."""
    return {fqn: numbers_of_part(part) for fqn, part in view.bind(name, shape).parts}


def check(view: View, name: str, shape: Shape, wanted: dict[str, Any]) -> None:
    """Compare the elements of a View's parts, in their shapes, with those that they must be."""
    parts = elements_of(view, name, shape)
    assert parts.keys() == wanted.keys(), view
    for fqn, elements in wanted.items():
        assert parts[fqn].shape == elements.shape, (fqn, view)
        assert np.array_equal(parts[fqn], elements), (fqn, view)


@many
@given(any_views())
def test_any_view_is_found_again_from_its_elements(drawn: tuple[View, Shape, dict[str, Any]]) -> None:
    _, shape, wanted = drawn
    check(fitted_view("live.3", shape, wanted), "live.3", shape, wanted)


LIVE = numbers((24, 6))
STACK = numbers((3, 8, 5))


@pytest.mark.parametrize(
    ("shape", "parts", "text"),
    [
        (
            (24, 6),  # two groups of four query heads, a key and a value, of two rows each
            {
                "wq": LIVE.reshape(2, 6, 2, 6)[:, :4].reshape(16, 6),
                "wk": LIVE.reshape(2, 6, 2, 6)[:, 4].reshape(4, 6),
                "wv": LIVE.reshape(2, 6, 2, 6)[:, 5].reshape(4, 6),
            },
            "View('w', '(d (wq + wk + wv)) c', {'wq': '(d wq) c', 'wk': '(d wk) c', 'wv': '(d wv) c'}, wk=2, wq=8, wv=2)",
        ),
        (
            (24, 6),
            {"q.weight": LIVE[:12], "k.weight": LIVE[12:18], "v.weight": LIVE[18:]},
            "View('w', '(a_0 + a_1 + a_2) c', {'q.weight': 'a_0 c', 'k.weight': 'a_1 c', 'v.weight': 'a_2 c'}, a_0=12, "
            "a_1=6, a_2=6)",
        ),
        (
            (24, 6),
            {"gate.weight": LIVE[:12], "up.weight": LIVE[12:]},
            "View('w', '(gate + up) c', {'gate.weight': 'gate c', 'up.weight': 'up c'})",
        ),
        (
            (24, 6),
            {"w1.weight": LIVE[::2], "w3.weight": LIVE[1::2]},
            "View('w', '(d (w1 + w3)) c', {'w1.weight': '(d w1) c', 'w3.weight': '(d w3) c'}, w1=1, w3=1)",
        ),
        (
            (12, 2, 6),
            {"w1": LIVE[::2], "w3": LIVE[1::2]},
            "View('w', 'd (w1 + w3) c', {'w1': '(d w1) c', 'w3': '(d w3) c'})",
        ),
        (
            (3, 8, 5),
            {
                f"experts.{e}.{name}.weight": STACK[e, low : low + 4]
                for e in range(3)
                for name, low in (("gate", 0), ("up", 4))
            },
            "View('w', 'e (gate + up) c', {'experts.{e}.gate.weight': 'gate c', 'experts.{e}.up.weight': 'up c'})",
        ),
        (
            (3, 8, 5),
            {f"experts.{e}.{n}": STACK[e, r::2].T for e in range(3) for r, n in ((0, "gate"), (1, "up"))},
            "View('w', 'e (d (gate + up)) c', {'experts.{e}.gate': 'c (d gate)', 'experts.{e}.up': 'c (d up)'}, gate=1, "
            "up=1)",
        ),
        ((24, 6), {"layers.3.other": LIVE}, "View('w', 'd c', {'layers.3.other': 'd c'})"),
        ((24, 6), {"t": LIVE.T}, "View('w', 'd c', {'t': 'c d'})"),
        ((24, 6), {"flat": LIVE.ravel()}, "View('w', 'd c', {'flat': '(d c)'})"),
        (
            (24, 6),
            {"flat": np.concatenate([LIVE[:, :3].ravel(), LIVE[:, 3:].ravel()])},
            "View('w', 'f (d c)', {'flat': '(d f c)'}, c=3)",
        ),
        ((24, 1), {"squeezed": np.arange(24)}, "View('w', 'd c', {'squeezed': 'd'})"),
        ((24,), {"unsqueezed": np.arange(24)[:, None]}, "View('w', '(c more)', {'unsqueezed': 'c more'}, more=1)"),
        ((3,), {f"e.{e}.scale": np.array(e) for e in range(3)}, "View('w', 'e', {'e.{e}.scale': ''})"),
        ((), {"other": np.array(0)}, "View('w', '', {'other': ''})"),
        ((1,), {"other": np.array([0])}, "View('w', 'c', {'other': 'c'})"),
    ],
)
def test_a_layout_of_a_trainer_is_found_as_one_writes_it(shape: Shape, parts: dict[str, Any], text: str) -> None:
    view = fitted_view("w", shape, parts)
    assert repr(view) == text
    check(view, "w", shape, parts)
    assert View.from_text(text) == view


def test_layers_of_other_width_have_one_view() -> None:
    views = {
        fitted_view("w", (8, width), {"gate": numbers((8, width))[:4], "up": numbers((8, width))[4:]})
        for width in (3, 5)
    }
    assert len(views) == 1


def test_an_index_that_names_do_not_have_is_a_sum() -> None:
    parts = {f"expert_{'abc'[e]}.weight": STACK[e] for e in range(3)}
    view = fitted_view("w", (3, 8, 5), parts)
    check(view, "w", (3, 8, 5), parts)
    assert view.axes == "(expert_a + expert_b + expert_c) d c"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"a": LIVE[:12]}, "72 elements of 144 are in no part; the first is 72"),
        ({"a": LIVE, "b": LIVE[:1]}, "150 elements and the live parameter 144: some are in two"),
        ({"a": LIVE + 1}, "a has element 144, and there are 144"),
        ({"a": LIVE - 1}, "a has element -1, and there are 144"),
        ({"a": LIVE[::-1]}, "dimension 0 runs backwards"),
        ({"a": LIVE[[1, 0, *range(2, 24)]]}, "runs backwards"),
        (
            {"a": LIVE[[0, 2, 1, *range(3, 24)]]},
            "its dimension 0 has no constant step: 2 indices are 12 elements apart",
        ),
        ({"a": np.concatenate([LIVE[:, :2].ravel(), LIVE[:, 2:].ravel()])}, "no constant step"),
        ({"a": LIVE[:5], "b": LIVE[5:, ::2], "c": LIVE[5:, 1::2]}, "no axes give its parts"),
        ({"a": np.zeros((0, 6), np.int64), "b": LIVE}, "its part a: has no elements"),
        ({"a": np.where(np.arange(6) < 3, LIVE, np.roll(LIVE, 1, 0))}, "its dimensions depend on each other"),
        ({}, "144 elements of 144 are in no part"),
    ],
)
def test_what_is_no_order_of_axes_is_refused_by_name(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=r"^layers\.0\.w: ") as raised:
        fitted_view("layers.0.w", (24, 6), parts)
    assert words in str(raised.value)


def test_steps_that_do_not_divide_each_other_are_refused() -> None:
    live = numbers((12,))
    parts = {"a": live[[0, 2, 4, 6, 8, 10]], "b": live[[1, 4 - 1, 5]], "c": live[[7, 9, 11]]}
    with pytest.raises(LayoutError, match="w"):
        fitted_view("w", (12,), parts)
    with pytest.raises(LayoutError, match="3 is no multiple of 2"):
        fitted_view("w", (6,), {"a": np.array([0, 2]), "b": np.array([1, 4]), "c": np.array([3, 5])})


@many
@given(any_views())
def test_elements_that_have_changed_places_are_never_taken(drawn: tuple[View, Shape, dict[str, Any]]) -> None:
    """Two elements of the parts in each other's places: an error, or a View that has just these."""
    _, shape, wanted = drawn
    changed = {name: elements.copy() for name, elements in wanted.items()}
    everything = [(name, at) for name, elements in changed.items() for at in range(elements.size)]
    if prod(shape) < 2:
        return
    (first, a), (last, b) = everything[0], everything[-1]
    element, other = changed[first].flat[a], changed[last].flat[b]
    changed[first].flat[a], changed[last].flat[b] = other, element
    try:
        view = fitted_view("live.3", shape, changed)
    except LayoutError:
        return
    check(view, "live.3", shape, changed)
