"""Values of the trainer in the form in which `torch.load(weights_only=True)` reads them, and back.

numpy's arrays become tensors and its numbers Python's, so that the random states of numpy need no pickled class. A list beside
the values says what each of them was, by its place. It is in the file under the key `KINDS`, and other readers may ignore it.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.distrust import as_checkpoint_error

KINDS = "fsdp_optim_kinds"
"""The key of the list of what values were: pairs of a place, which is a tuple of keys and indices, and a kind."""

VALUE = "fsdp_optim_value"
"""The key of a value that is no dict, and so has no room for the list."""

Kinds = list[tuple[tuple[Any, ...], str]]

_NUMBERS = "biufc"  # kinds of numpy's dtypes
_MOST_IN_RANGE = 1 << 20
_DICTS = (dict, OrderedDict)


def safe(value: Any, at: tuple[Any, ...] = ()) -> tuple[Any, Kinds]:
    """Return the safe form of a value, and the kinds of its replaced parts. `at`: the place of the value, where all places begin.

    A part without a safe form stays as it is: the writer refuses it by its class.
    """
    kinds: Kinds = []
    return _safe(value, at, kinds), kinds


def _safe(value: Any, at: tuple[Any, ...], kinds: Kinds) -> Any:
    if type(value) in _DICTS:
        return type(value)((key, _safe(item, (*at, key), kinds)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)([_safe(item, (*at, index), kinds) for index, item in enumerate(value)])
    kind, made = _stand_in(value)
    if kind:
        kinds.append((at, kind))
        return made
    return value


def _stand_in(value: Any) -> tuple[str, Any]:
    """Return the kind of a value that has a safe form, and this form; "" for all others."""
    if type(value) is numpy.ndarray and value.dtype.kind in _NUMBERS:
        try:
            return "ndarray", torch.from_numpy(numpy.array(value, order="C"))
        except (TypeError, ValueError):  # torch has no such dtype, or the bytes have another order
            return "", value
    if isinstance(value, numpy.generic) and value.dtype.kind in _NUMBERS and value.dtype.itemsize <= _most_of(value):
        return f"numpy.{value.dtype.name}", value.item()
    if type(value) is bytes and not value:
        return "bytes", bytearray()
    if type(value) is io.BytesIO and not value.closed:
        return "BytesIO", (bytearray(value.getvalue()), value.tell())
    if type(value) is range and len(value) <= _MOST_IN_RANGE:
        return "range", (value.start, value.stop, value.step)
    if type(value) is frozenset:
        return "frozenset", set(value)
    return "", value


def _most_of(value: numpy.generic) -> int:
    """Return the bytes of the widest number of this kind that Python's own numbers hold exactly."""
    return 16 if value.dtype.kind == "c" else 8


def in_file(value: Any) -> Any:
    """Return the safe form of a value that has a file of its own."""
    made, kinds = safe(value)
    if not kinds:
        return made
    if type(made) is dict and KINDS not in made and VALUE not in made:
        return {**made, KINDS: kinds}
    return {VALUE: made, KINDS: kinds}


def of_file(where: str, value: Any) -> Any:
    """The inverse of `in_file`."""
    if not isinstance(value, dict) or KINDS not in value:
        return value
    rest = {key: item for key, item in value.items() if key != KINDS}
    return restored(where, rest[VALUE] if [*rest] == [VALUE] else rest, value[KINDS])


def restored(where: str, value: Any, kinds: Any, at: tuple[Any, ...] = ()) -> Any:
    """Return the original of a safe form. `at`: the place of this value, from where the places in the list lead on.

    Raises CheckpointError if the list is not of this value.
    """
    if not isinstance(kinds, list) or not all(_is_pair(pair) for pair in kinds):
        raise CheckpointError(f"{where}: {KINDS}: is not a list of kinds by place")
    tree: dict[Any, Any] = {}
    for path, kind in kinds:
        if path[: len(at)] == at:
            below = tree
            for part in path[len(at) :]:
                below = below.setdefault(part, {})
            below[_Kind] = kind
    with as_checkpoint_error(f"{where}: {KINDS}"):
        return _restored(value, tree)


class _Kind:
    """The key of a kind in the tree of places: no file can have it."""


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], tuple) and isinstance(pair[1], str)
    )


def _restored(value: Any, tree: Mapping[Any, Any]) -> Any:
    if _Kind in tree:
        return _original(value, tree[_Kind])
    if not tree:
        return value
    if type(value) in _DICTS and tree.keys() <= value.keys():
        return type(value)((key, _restored(item, tree.get(key, {}))) for key, item in value.items())
    if type(value) in (list, tuple) and tree.keys() <= set(range(len(value))):
        return type(value)([_restored(item, tree.get(index, {})) for index, item in enumerate(value)])
    raise TypeError(f"a {type(value).__name__} does not have the places {str([*tree])[:80]}")


def _original(value: Any, kind: str) -> Any:
    makers: Mapping[str, Callable[[Any], Any]] = {
        "ndarray": lambda value: value.numpy(),
        "bytes": bytes,
        "BytesIO": _buffer,
        "range": _range,
        "frozenset": frozenset,
    }
    if kind in makers:
        return makers[kind](value)
    dtype = numpy.dtype(kind.removeprefix("numpy."))
    if dtype.kind not in _NUMBERS or type(value) not in (bool, int, float, complex):
        raise TypeError(f"{kind} is no kind of a {type(value).__name__}")
    return dtype.type(value)


def _buffer(saved: tuple[bytearray, int]) -> io.BytesIO:
    data, position = saved
    made = io.BytesIO(data)
    made.seek(position)
    return made


def _range(numbers: Sequence[int]) -> range:
    made = range(*numbers)
    if len(made) > _MOST_IN_RANGE:
        raise ValueError(f"a range of {len(made)} numbers")
    return made
