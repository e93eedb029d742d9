"""Slices of a tensor as text: `0:3, :5` are rows 0 to 2 and columns 0 to 4, as between brackets in Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Box, Placement, Shape
from fsdp_optim.offline.values.element_windows import all_elements, elements_in_box

_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_INDEX = re.compile(r"\s*(-?\d+)\s*")


@dataclass(frozen=True)
class TensorSlice:
    """Some elements of a tensor. `cut`: on rank 0, in their order. `shape`: without dimensions that an index removes."""

    cut: Placement
    shape: Shape


def sliced(name: str, text: str | None, shape: Shape) -> TensorSlice:
    """Return the slice that a text describes; None: all elements.

    Raises StateError that names the value, the text and the shape.
    """
    if text is None:
        return TensorSlice(all_elements(shape), shape)
    parts = text.strip().removeprefix("[").removesuffix("]").split(",") if text.strip("[] ") else []
    if len(parts) > len(shape):
        raise StateError(
            f"{name}: the slice {text!r} has {counted_noun(len(parts), 'dimension')}, and the value has {len(shape)}: {shape}"
        )
    offsets, sizes, kept = list[int](), list[int](), list[int]()
    for part, size in zip([*parts, *[":"] * (len(shape) - len(parts))], shape, strict=True):
        start, stop, is_index = _bounds(name, text, part, size)
        offsets.append(start)
        sizes.append(stop - start)
        kept += [] if is_index else [stop - start]
    return TensorSlice(elements_in_box(shape, Box(tuple(offsets), tuple(sizes))), tuple(kept))


def _bounds(name: str, text: str, part: str, size: int) -> tuple[int, int, bool]:
    """Return the first index of a dimension, one past the last, and whether the part is a single index."""
    index = _INDEX.fullmatch(part)
    if index is not None:
        at = int(index[1]) + (size if int(index[1]) < 0 else 0)
        if not 0 <= at < size:
            raise StateError(f"{name}: the slice {text!r} asks for index {index[1]} of a dimension of {size}")
        return at, at + 1, True
    match = _RANGE.fullmatch(part)
    if match is None:
        raise StateError(
            f"{name}: the slice {text!r} has {part.strip()!r}: give ranges such as 0:3, : or an index for each dimension"
        )
    start, stop, _ = slice(*(int(bound) if bound else None for bound in match.groups())).indices(size)
    return start, max(start, stop), False
