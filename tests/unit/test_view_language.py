"""Views against an index oracle: what a View says of its text, the parts of live parameters, and what is refused by name."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import oracle
from kit.any_views import any_views, numbers
from kit.cases import examples

from fsdp_optim import View
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, FlatChunks, MeshBoxes, Shape
from fsdp_optim.layout.views import placement_of_part

many = examples(150)

WQKV = View(
    "layers.{i}.attention.wqkv.weight",
    "(g (q + k + v) d) c",
    {
        "layers.{i}.attention.wq.weight": "(g q d) c",
        "layers.{i}.attention.wk.weight": "(g k d) c",
        "layers.{i}.attention.wv.weight": "(g v d) c",
    },
    q=4,
    k=1,
    v=1,
    d=8,
)
EXPERTS = View(
    "l.{i}.experts.gate_up_proj",
    "e (a + b) c",
    {"l.{i}.experts.{e}.gate_proj.weight": "a c", "l.{i}.experts.{e}.up_proj.weight": "b c"},
)
GPT_OSS = View(
    "l.{i}.experts.gate_up_proj",
    "e c (f (a + b))",
    {"l.{i}.experts.{e}.w1.weight": "(f a) c", "l.{i}.experts.{e}.w3.weight": "(f b) c"},
    a=1,
    b=1,
)
MEGATRON = View("*.linear_fc1.weight", "(a + b) c", {"*.gate.weight": "a c", "*.up.weight": "b c"})


def parts_of(view: View, name: str, shape: Shape) -> dict[str, Any]:
    """The elements of the live parameter that are each part, in the part's shape."""
    return {fqn: np.array(oracle.live_elements(part)).reshape(part.shape) for fqn, part in view.bind(name, shape).parts}


# ----------------------------------------------------------------------------------- the layouts of trainers


def test_wqkv_of_torchtitan() -> None:
    """Row (group G, r, x) is number (G (q + 2) + r) d + x: query heads, then the key, then the value."""
    g, q, d, c = 2, 4, 8, 3
    live = numbers((g * (q + 2) * d, c))
    parts = parts_of(WQKV, "layers.7.attention.wqkv.weight", live.shape)
    assert list(parts) == [f"layers.7.attention.{name}.weight" for name in ("wq", "wk", "wv")]
    rows = {"wq": [], "wk": [], "wv": []}  # type: dict[str, list[Any]]
    for group in range(g):
        for r in range(q + 2):
            name = "wq" if r < q else "wk" if r == q else "wv"
            rows[name] += [live[(group * (q + 2) + r) * d + x] for x in range(d)]
    for name, listed in rows.items():
        assert np.array_equal(parts[f"layers.7.attention.{name}.weight"], np.array(listed)), name


def test_concatenated_rows() -> None:
    view = View("h.{i}.qkv", "(q + k + v) c", {"h.{i}.q": "q c", "h.{i}.k": "k c", "h.{i}.v": "v c"}, q=6, k=2, v=2)
    live = numbers((10, 3))
    parts = parts_of(view, "h.0.qkv", live.shape)
    assert np.array_equal(parts["h.0.q"], live[:6])
    assert np.array_equal(parts["h.0.k"], live[6:8])
    assert np.array_equal(parts["h.0.v"], live[8:])


@pytest.mark.parametrize(("axes", "shape"), [("f (a + b) c", (5, 2, 3)), ("(f (a + b)) c", (10, 3))])
def test_swiglu_in_three_and_in_two_dimensions(axes: str, shape: Shape) -> None:
    parts = {"l.{i}.w1.weight": "(f a) c", "l.{i}.w3.weight": "(f b) c"}
    arrays = parts_of(View("l.{i}.w13", axes, parts, a=1, b=1), "l.2.w13", shape)
    live = numbers((10, 3))
    assert np.array_equal(arrays["l.2.w1.weight"], live[::2])
    assert np.array_equal(arrays["l.2.w3.weight"], live[1::2])


@pytest.mark.parametrize(
    ("axes", "shape"),
    [("e f (a + b) c", (2, 5, 2, 3)), ("e (a + b) f c", (2, 2, 5, 3)), ("(a + b) e f c", (2, 2, 5, 3))],
)
def test_an_axis_of_one_index_may_be_left_out_of_a_part_by_the_name_of_the_range(axes: str, shape: Shape) -> None:
    """Three layouts of one class in three months; `a` and `b` have one index each, and are named in no dimension but one."""
    view = View("w13", axes, {"w1": "e (f a) c", "w3": "e (f b) c"}, a=1, b=1)
    live = numbers(shape)
    dim = axes.replace("(a + b)", "s").split().index("s")
    for number, name in enumerate(("w1", "w3")):
        assert np.array_equal(parts_of(view, "w13", shape)[name], live.take(number, axis=dim))


def test_stacked_experts_are_one_parameter_each() -> None:
    live = numbers((3, 8, 5))
    parts = parts_of(EXPERTS, "l.0.experts.gate_up_proj", live.shape)
    assert len(parts) == 6
    for e in range(3):
        assert np.array_equal(parts[f"l.0.experts.{e}.gate_proj.weight"], live[e, :4])
        assert np.array_equal(parts[f"l.0.experts.{e}.up_proj.weight"], live[e, 4:])


def test_transposed_and_alternating_experts_of_gpt_oss() -> None:
    live = numbers((2, 3, 8))
    parts = parts_of(GPT_OSS, "l.0.experts.gate_up_proj", live.shape)
    for e in range(2):
        assert np.array_equal(parts[f"l.0.experts.{e}.w1.weight"], live[e, :, ::2].T)
        assert np.array_equal(parts[f"l.0.experts.{e}.w3.weight"], live[e, :, 1::2].T)


def test_stars_stand_for_any_text_and_equal_ranges_need_no_size() -> None:
    parts = parts_of(MEGATRON, "decoder.layers.11.mlp.linear_fc1.weight", (8, 2))
    assert list(parts) == ["decoder.layers.11.mlp.gate.weight", "decoder.layers.11.mlp.up.weight"]
    assert np.array_equal(parts["decoder.layers.11.mlp.up.weight"], numbers((8, 2))[4:])
    assert not MEGATRON.matches("linear_fc1.weights")
    assert not WQKV.matches("layers.1.2.attention.wqkv.weight"), "{i} stands for a text between two dots"


def test_a_rename_and_a_transpose() -> None:
    assert np.array_equal(parts_of(View("a.w", "x y", {"b.w": "y x"}), "a.w", (2, 3))["b.w"], numbers((2, 3)).T)
    assert parts_of(View("a.{n}", "x", {"b.{n}": "x"}), "a.w", (4,))["b.w"].tolist() == [0, 1, 2, 3]


def test_wqkv_is_a_run_for_each_group_and_part() -> None:
    """However wide the rows are: 4 groups, 4 runs of rows."""
    for width in (1, 4096):
        bound = WQKV.bind("layers.0.attention.wqkv.weight", (4 * 6 * 8, width))
        for name, part in bound.parts:
            whole = Block(Box((0, 0), part.live_shape), 0)
            blocks = list(part.blocks(whole))
            assert len(blocks) == 4, name
            assert all(block.strides is None for block in blocks)
        _, gate = MEGATRON.bind("x.linear_fc1.weight", (8, width)).parts[0]
        assert len(list(gate.blocks(Block(Box((0, 0), (8, width)), 0)))) == 1


def test_a_shard_is_planned_without_a_look_at_the_others() -> None:
    """On 4,096 ranks, a part asks for the shards that have its rows."""
    part = dict(MEGATRON.bind("x.linear_fc1.weight", (8192, 16)).parts)["x.up.weight"]
    place = placement_of_part(MeshBoxes((8192, 16), (4096,), ((0, 0),), (range(4096),)), part)
    assert list(place.shards_over(0, 16)) == [2048]
    flat = placement_of_part(FlatChunks((8192, 16), 100, 32, (range(4200),)), part)
    assert len(flat.shards_over(0, 16)) <= 2


# ------------------------------------------------------------------------------------------ any View


@many
@given(any_views())
def test_every_element_has_a_place_in_one_part(drawn: tuple[View, Shape, dict[str, Any]]) -> None:
    view, shape, wanted = drawn
    bound = view.bind("live.3", shape)
    assert bound.shapes == {name: elements.shape for name, elements in wanted.items()}
    for name, part in bound.parts:
        assert part.live_shape == shape
        assert oracle.live_elements(part) == wanted[name].ravel().tolist(), name
    held = [element for _, part in bound.parts for element in oracle.live_elements(part)]
    assert sorted(held) == list(range(prod(shape)))


@many
@given(any_views())
def test_a_view_is_read_from_its_text(drawn: tuple[View, Shape, dict[str, Any]]) -> None:
    view, *_ = drawn
    assert View.from_text(repr(view)) == view
    assert repr(View.from_text(repr(view))) == repr(view)
    assert hash(view) == hash(View.from_text(repr(view)))


@many
@given(any_views(), st.data())
def test_an_unknown_size_is_inferred(drawn: tuple[View, Shape, dict[str, Any]], data: st.DataObject) -> None:
    view, shape, _ = drawn
    sizes = dict(view.sizes)
    del sizes[data.draw(st.sampled_from(sorted(sizes)))]
    fewer = View(view.name, view.axes, dict(view.parts), **sizes)
    assert fewer.bind("live.3", shape).parts == view.bind("live.3", shape).parts


# ------------------------------------------------------------------------------------------ refusals

A_B = {"a.w": "a c", "b.w": "b c"}


@pytest.mark.parametrize(
    ("name", "axes", "parts", "sizes", "words"),
    [
        ("w", "(a + b) c", {"a.w": "a c"}, {}, "the elements of b in '(a + b) c' are in no part; the parts are a.w"),
        ("w", "(a + b) c", {**A_B, "x.w": "b c"}, {}, "the elements of b are in two parts, b.w and x.w"),
        ("w", "c", {"a.w": "c", "b.w": "c"}, {}, "all elements are in two parts, a.w and b.w"),
        ("w", "(a + b) c", {"a.w": "(a b) c"}, {}, "has a and b, and no element is in both"),
        ("w", "(a + b) c", {**A_B, "d.w": "c"}, {}, "d.w must have one range of (a + b), and has none"),
        ("w", "(a + b) c", {"a.w": "a c", "b.w": "(a + b) c"}, {}, "b.w has the sum (a + b)"),
        ("w", "(a + b) c", {"a.w": "a c", "b.w": "b"}, {"c": 4}, "b.w has no axis c, which has 4 indices"),
        ("w", "(a + b) c", {"a.w": "a c", "b.w": "b x"}, {}, "b.w has the axis x, which is none of '(a + b) c'"),
        ("w", "(a + b) c", A_B, {"x": 3}, "has a size for x, which is no axis"),
        ("w", "(a + b) c", A_B, {"a": 0}, "the size of the axis a must be at least 1, an integer, not 0"),
        ("w", "(a + b) c", A_B, {"a": True}, "must be at least 1, an integer, not True"),
        (
            "l.{i}.w",
            "(a + b) c",
            A_B,
            {},
            "the part a.w has no {i}, so two live parameters would have parts of one name",
        ),
        ("*.w", "(a + b) c", A_B, {}, "the part a.w has no '*'"),
        (
            "w",
            "(a + b) c",
            {"{i}.a": "a c", "{i}.b": "b c"},
            {},
            "has {i}, which is no axis, and nothing stands for it",
        ),
        ("w", "(a + b) c", {"*.a": "a c", "b": "b c"}, {}, "has a '*' more than the live name"),
        ("l.{c}", "(a + b) c", {"{c}.a": "a c", "{c}.b": "b c"}, {}, "give one of the two another name"),
        ("w", "e c", {"{e}.w": "e c"}, {}, "the part {e}.w has the axis e in its name and in its axes"),
        ("w", "(a + a) c", A_B, {}, "the axis a is there twice"),
        ("w", "(a + b c", A_B, {}, "put (a + b) into parentheses of its own"),
        ("w", "(a b", A_B, {}, "an axis is missing at its end"),
        ("w", "a) c", A_B, {}, "an axis is missing before ')'"),
        ("w", "() c", A_B, {}, "there is nothing between"),
        ("w", "(a + 2) c", A_B, {}, "'2' is no axis"),
        ("w", "((a b) c)", A_B, {}, "inside parentheses only a sum has parentheses of its own"),
        ("w{", "(a + b) c", A_B, {}, "a placeholder is a word in braces"),
        ("", "(a + b) c", A_B, {}, "the name of a View must be a name"),
        ("w", "(a + b) c", {}, {}, "parts must be a dict of names"),
        ("w", "(a + b) c", {"a.w": 3}, {}, "the axes of a.w must be text"),
        ("w", 3, A_B, {}, "axes must be text"),
    ],
)
def test_a_wrong_view_is_refused_when_it_is_made(name: str, axes: Any, parts: Any, sizes: Any, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        View(name, axes, parts, **sizes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("view", "name", "shape", "words"),
    [
        (MEGATRON, "x.linear_fc1.weight", (7, 2), "a + b of '(a + b) c' is 7, which leaves no equal size"),
        (MEGATRON, "x.linear_fc1.weight", (8,), "has shape [8], 1 dimension, and the axes '(a + b) c' are 2"),
        (MEGATRON, "other", (8, 2), "other has another name"),
        (WQKV, "layers.0.attention.wqkv.weight", (50, 2), "dimension 0 is 50, which is no multiple of 48"),
        (View("w", "(a b) c", {"x": "(a b) c"}), "w", (8, 2), "2 axes of unknown size, a, b"),
        (
            View("w", "(a b) c", {"x": "(a b) c"}, a=2, b=3),
            "w",
            (8, 2),
            "is 8, and the axes '(a b) c' make it 6: a=2, b=3",
        ),
        (View("w", "(a + b) c", A_B, a=9), "w", (8, 2), "beside a=9"),
        (View("w", "a c", {"x": "a"}), "w", (8, 2), "the part x has no axis c, which has 2 indices"),
        (
            View(
                "w",
                "a c",
                {
                    "x.{a}.{c}": "",
                },
            ),
            "other",
            (8, 2),
            "has another name",
        ),
        (View("w", "a b", {"x{a}{b}": ""}), "w", (12, 12), "two of its parts are called x110"),
    ],
)
def test_a_view_that_does_not_fit_a_parameter_is_refused(view: View, name: str, shape: Shape, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        view.bind(name, shape)
    assert words in str(error.value)
    assert view.name in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "View(", "print('x')", "View('w')", "View('w', 'a', {'x': 'a'}, **{'a': 2})", "1"]
)
def test_a_text_that_is_no_view_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        View.from_text(text)
