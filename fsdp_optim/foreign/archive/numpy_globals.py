"""The classes and functions of numpy that a pickle may name: arrays and scalars of numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy

from fsdp_optim.foreign.archive.pickle_table import Known

_MOST_DIMS = 64
_NUMBERS = re.compile(r"[<|=]?(?:[biufc][0-9]{1,2}|\?)")


def _dtype(name: Any = "", *others: Any) -> Any:
    if type(name) is not str or not _NUMBERS.fullmatch(name):
        raise TypeError("a dtype of numpy that is not one of numbers")
    return numpy.dtype(name)


def _set_dtype(target: Any, state: Any) -> None:
    """Check the state of a dtype of numbers: only its byte order says anything."""
    if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|", "="):
        raise TypeError("numbers of numpy that are not in this machine's byte order")


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, numpy.dtype) or type(data) is not bytes or len(data) != dtype.itemsize:
        raise TypeError("a number of numpy without its bytes")
    return numpy.frombuffer(data, dtype)[0]


def _empty(cls: Any, shape: Any, kind: Any) -> Any:
    if not (isinstance(cls, Known) and cls.of is numpy.ndarray):
        raise TypeError("a subclass of numpy's arrays")
    return numpy.empty(0, numpy.int8)


def _set_array(target: Any, state: Any) -> None:
    version, shape, dtype, is_fortran, data = state
    is_shape = (
        type(shape) is tuple and len(shape) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    )
    if version != 1 or not is_shape or not isinstance(dtype, numpy.dtype) or dtype.kind not in "biufc":
        raise TypeError("an array of numpy whose elements are not numbers")
    if type(data) is not bytes or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError("an array of numpy whose bytes do not fit its shape")
    target.__setstate__((1, shape, dtype, bool(is_fortran), data))


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if type(data) not in (bytes, bytearray) or order not in ("C", "F") or type(shape) is not tuple:
        raise TypeError("an array of numpy without its bytes")
    made = numpy.empty(0, numpy.int8)
    _set_array(made, (1, shape, dtype, order == "F", bytes(data)))
    return made


def _no_call(*arguments: Any) -> Any:
    raise TypeError("an array of numpy that is made in an unknown way")


_CALLS: Mapping[str, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _scalar),
    **dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), _empty),
    **dict.fromkeys(("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"), _from_buffer),
}

NUMPY: Mapping[str, Any] = {
    **{name: Known(name, call) for name, call in _CALLS.items()},
    "numpy.ndarray": Known("numpy.ndarray", _no_call, numpy.ndarray),
}
"""The globals of numpy."""

NUMPY_BUILD: Mapping[type, Callable[[Any, Any], None]] = {
    numpy.ndarray: _set_array,
    **{type(numpy.dtype(code)): _set_dtype for code in "?bhilqBHILQefdgFDG"},
}
"""The functions that give numpy's objects their state."""
