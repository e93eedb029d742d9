"""Tiles, element by element: a range of a part from its live parameter, and a range of the live parameter from its parts."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.cases import examples

from fsdp_optim import View
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.views import Part, Tile, run_in_live, tiles_of_live, tiles_of_part

HEADS = View("w", "(g (q + k + v) d) c", {"q": "(g q d) c", "k": "(g k d) c", "v": "(g v d) c"}, q=2, k=1, v=1, d=3)
PAIRS = View("w", "f (a + b) c", {"one": "(f a) c", "two": "(f b) c"}, a=1, b=1)
STACK = View("w", "e (a + b) c", {"{e}.gate": "a c", "{e}.up": "b c"})
OSS = View("w", "e c (f (a + b))", {"{e}.one": "(f a) c", "{e}.two": "(f b) c"}, a=1, b=1)
UNEVEN = View("w", "(q + k) c", {"q": "q c", "k": "k c"}, q=5, k=1)
TURNED = View("w", "i o", {"linear": "o i"})
RENAMED = View("w", "n", {"other": "n"})


def by_hand(view: View, live: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts, cut in plain torch."""
    if view is HEADS:
        groups = live.unflatten(0, (-1, 4, 3))
        return {name: groups[:, taken].flatten(0, 2) for name, taken in (("q", slice(2)), ("k", [2]), ("v", [3]))}
    if view is PAIRS:
        return {"one": live[:, 0], "two": live[:, 1]}
    if view is STACK:
        half = live.shape[1] // 2
        return {
            f"{e}.{name}": each.split(half)[at] for at, name in enumerate(("gate", "up")) for e, each in enumerate(live)
        }
    if view is OSS:
        return {
            f"{e}.{name}": each[:, at::2].T for at, name in enumerate(("one", "two")) for e, each in enumerate(live)
        }
    if view is UNEVEN:
        return {"q": live[:5], "k": live[5:]}
    return {"linear": live.T} if view is TURNED else {"other": live}


CASES = [
    (HEADS, (24, 5)),
    (HEADS, (12, 1)),
    (PAIRS, (3, 2, 4)),
    (STACK, (3, 4, 5)),
    (STACK, (1, 2, 1)),
    (OSS, (2, 3, 8)),
]
CASES += [(UNEVEN, (6, 3)), (TURNED, (4, 7)), (RENAMED, (9,)), (RENAMED, (1,))]
ALL = {f"{view.axes} {shape}": (view, shape) for view, shape in CASES}


def copied(tiles: tuple[Tile, ...], source: torch.Tensor, into: torch.Tensor) -> None:
    for tile in tiles:
        target = into.as_strided(tile.sizes, tile.target_steps, tile.target_at)
        assert bool((target == -1).all()), "each element comes from one place"
        target.copy_(source.flatten().as_strided(tile.sizes, tile.source_steps, tile.source_at))


def filled(numel: int) -> torch.Tensor:
    return torch.full((numel,), -1)


ranges = st.tuples(st.sampled_from(sorted(ALL)), st.floats(0, 1), st.floats(0, 1))


@examples(200)
@given(ranges)
def test_a_range_of_a_part_comes_from_the_live_parameter(case: tuple[str, float, float]) -> None:
    view, shape = ALL[case[0]]
    live = torch.arange(prod(shape)).view(shape)
    expected = by_hand(view, live)
    assert list(view.bind("w", shape).names) == list(expected)
    for name, part in view.bind("w", shape).parts:
        assert part.shape == tuple(expected[name].shape)
        start, stop = sorted(round(share * prod(part.shape)) for share in case[1:])
        made = filled(stop - start)
        copied(tiles_of_part(part, start, stop), live, made)
        assert torch.equal(made, expected[name].flatten()[start:stop])


@examples(200)
@given(ranges)
def test_a_range_of_the_live_parameter_comes_from_its_parts(case: tuple[str, float, float]) -> None:
    view, shape = ALL[case[0]]
    live = torch.arange(prod(shape)).view(shape)
    parts = {name: part.contiguous().clone() for name, part in by_hand(view, live).items()}
    start, stop = sorted(round(share * prod(shape)) for share in case[1:])
    made = filled(stop - start)
    for name, part in view.bind("w", shape).parts:
        copied(tiles_of_live(part, start, stop), parts[name], made)
    assert torch.equal(made, live.flatten()[start:stop])


def test_what_is_long_is_one_run() -> None:
    """A stack is cut into runs, and interleaved heads into one tile of long rows, whatever the width is."""
    parts = dict(STACK.bind("w", (3, 4, 5)).parts)
    assert [run_in_live(part) for part in parts.values()] == [0, 20, 40, 10, 30, 50]
    (tile,) = tiles_of_part(part_of(HEADS, (8 * 12, 1000), "q"), 0, 8 * 6 * 1000)
    assert (tile.sizes, tile.source_steps) == ((8, 6000), (12000, 1))
    assert run_in_live(part_of(HEADS, (96, 10), "q")) is None
    assert run_in_live(part_of(HEADS, (12, 10), "q")) == 0


def test_a_transposed_stack_is_one_tile() -> None:
    (tile,) = tiles_of_part(part_of(OSS, (2, 1000, 800), "1.two"), 0, 400 * 1000)
    assert (sorted(tile.sizes), tile.source_at) == ([400, 1000], 1000 * 800 + 1)


def part_of(view: View, shape: tuple[int, ...], name: str) -> Part:
    return dict(view.bind("w", shape).parts)[name]


# ------------------------------------------------------------------------------------------------ the inverse


@pytest.mark.parametrize("case", sorted(ALL))
def test_the_inverse_finds_the_live_parameter(case: str) -> None:
    view, shape = ALL[case]
    bound = view.bind("w", shape)
    assert view.inverse.joined({**bound.shapes, "another": (3,)}) == {"w": bound}
    assert repr(view.inverse) == f"{view!r}.inverse"
    assert view.inverse.inverse == view
    assert eval(repr(view.inverse), {"View": View}) == view.inverse


def test_the_inverse_of_many_layers() -> None:
    view = View("l.{i}.w", "e (a + b)", {"l.{i}.{e}.a": "a", "l.{i}.{e}.b": "b"})
    shapes = {f"l.{i}.{e}.{half}": (i + 1,) for i in range(3) for e in range(2) for half in "ab"}
    joined = view.inverse.joined({**shapes, "l.0.shared.a": (7,)})
    assert {name: bound.live_shape for name, bound in joined.items()} == {f"l.{i}.w": (2, 2 * i + 2) for i in range(3)}


@pytest.mark.parametrize(
    ("view", "shapes", "words"),
    [
        (UNEVEN, {"q": (5, 2)}, ("makes it of parts of which k is not there, beside q",)),
        (UNEVEN, {"q": (5, 2), "k": (1, 3)}, ("k: a part of w", "dimension 1 of shape [1, 3] is 3", "c=2")),
        (UNEVEN, {"q": (4, 2), "k": (1, 2)}, ("q: a part of w", "dimension 0 of shape [4, 2] is 4", "q=5")),
        (
            STACK,
            {"0.gate": (2, 2), "0.up": (2, 2), "2.gate": (2, 2), "2.up": (2, 2)},
            ("makes it of parts", "1.gate, 1.up are"),
        ),
        (
            STACK,
            {"0.gate": (2, 2), "0.up": (2, 2), "1.gate": (3, 2), "1.up": (2, 2)},
            ("1.gate: a part of w", "3", "a=2"),
        ),
        (HEADS, {"q": (12, 2), "k": (6, 2), "v": (3, 2)}, ("v: a part of w", "dimension 0", "3", "g=2")),
    ],
)
def test_the_inverse_refuses(view: View, shapes: dict[str, tuple[int, ...]], words: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError) as refused:
        view.inverse.joined(shapes)
    for word in words:
        assert word in str(refused.value)


def test_a_name_that_may_be_two_parts_is_refused() -> None:
    view = View("w", "e (a + b)", {"{e}.x": "a", "0.x": "e b"})
    with pytest.raises(LayoutError, match=r"0\.x: may be two parts of w"):
        view.inverse.joined({"0.x": (3,)})


# ------------------------------------------------------------------------------------------------ rows


def test_row_blocks() -> None:
    assert UNEVEN.row_blocks((6, 3)) == (("q", 5), ("k", 1))
    assert HEADS.row_blocks((24, 5)) == (("q", 6), ("k", 3), ("v", 3)) * 2
    rows = View("l.{i}.w", "(f (a + b)) c", {"l.{i}.a": "(f a) c", "l.{i}.b": "(f b) c"}, a=1, b=1)
    assert rows.row_blocks((4, 3)) == (("l.{i}.a", 1), ("l.{i}.b", 1)) * 2
    assert TURNED.row_blocks((4, 7)) == (("linear", 4),)
    assert sum(rows for _, rows in HEADS.row_blocks((48, 2))) == 48


@pytest.mark.parametrize(("view", "shape"), [(PAIRS, (3, 2, 4)), (STACK, (3, 4, 5)), (OSS, (2, 3, 8))])
def test_rows_of_several_parts_are_refused(view: View, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="some of the columns of a row"):
        view.row_blocks(shape)
