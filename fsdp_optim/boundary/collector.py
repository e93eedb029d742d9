"""Fewer runs of Python's garbage collector during calls that create many objects which stay in use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 500_000
"""Objects that are made before the collector looks at them, some 100 bytes each. Its usual number is below a thousand."""

_ROUNDS = 1_000
"""Collections of younger objects before older ones are walked too."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let the garbage collector look at many new objects at once, and hardly ever at all objects.

    A model of 100,000 values has millions of objects, and a call makes millions more: the usual thresholds let the collector
    walk all of them again and again, which takes 40 % of a save's processor time. It is not switched off, so that cycles which
    a long call leaves are freed. The thresholds are those of the process: a user's own, where they are larger, stay.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG:  # off, or another thread's call is under way
        yield
        return
    gc.set_threshold(_YOUNG, _ROUNDS, _ROUNDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
