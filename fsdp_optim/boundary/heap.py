"""Memory that a long call has used and freed goes back to the system, and does not stay with the process until its end."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LONG_S = 1.0
"""Seconds of a call after which free memory of the heap is given back, which takes some 50 ms where it has the most."""


def give_back() -> None:
    """Give free memory of the heap back to the system. Where the C library is not glibc, do nothing.

    The names and places of 100,000 values are a few hundred MB of small objects. glibc keeps what is freed between objects that
    stay, so each rank would hold most of it for the rest of the training.
    """
    _trim()(0)


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """Return glibc's `malloc_trim`, or a function that does nothing."""
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no C library by that name
        trim = None
    return trim if callable(trim) else lambda _: 0
