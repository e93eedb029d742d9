"""Memory that a call has used and freed goes back to the system, and does not stay with the process until its end."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_GROWN_NBYTES = 16 << 20
"""Growth of the process during a call that is worth a look at the heap, which takes some ms for each 100 MB in small pieces."""


@contextmanager
def returned_heap() -> Iterator[None]:
    """Give free memory of the heap back after a call in which the process has grown. On systems other than Linux, do nothing.

    The names and places of 100,000 values are a few hundred MB of small objects. glibc keeps what is freed between objects that
    stay, so each rank would hold most of it for the rest of the training.
    """
    before = _resident_nbytes()
    try:
        yield
    finally:
        if before and _resident_nbytes() - before > _GROWN_NBYTES:
            _trim()(0)


def _resident_nbytes() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not say it."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
    return 0


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """Return glibc's `malloc_trim`, or a function that does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if callable(trim) else lambda _: 0
