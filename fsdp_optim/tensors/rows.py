"""Rows of bytes: the runs of many short values, as columns of numbers. numpy does what is done to each row."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from typing import TYPE_CHECKING

import numpy
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[numpy.uint8]
    Numbers = NDArray[numpy.int64]

_FEW = 8  # rows of one length, which are copied one by one


def rows_of_kinds(lengths: Numbers, of_kind: Numbers) -> tuple[Numbers, Numbers]:
    """Return the rows of some values, value by value: the index of each row's value, and of the row among those of all kinds.

    `lengths`: the number of rows of each kind, whose rows are listed one kind after the other. `of_kind`: the kind of each value.
    """
    counts = lengths[of_kind]
    of = numpy.arange(len(of_kind)).repeat(counts)
    row: Numbers = numpy.arange(len(of)) + (places_of(lengths)[of_kind] - places_of(counts))[of]
    return of, row


def places_of(nbytes: Numbers) -> Numbers:
    """Return where each of some rows begins if they lie one after the other."""
    places: Numbers = nbytes.cumsum() - nbytes
    return places


def copy_bytes(sources: Numbers, targets: Numbers, nbytes: Numbers) -> None:
    """Copy rows of `nbytes` bytes from and to addresses of this process. The caller keeps the memory alive."""
    deque(map(ctypes.memmove, targets.tolist(), sources.tolist(), nbytes.tolist()), maxlen=0)


def copy_rows(source: Bytes, source_at: Numbers, target: Bytes, target_at: Numbers, nbytes: Numbers) -> None:
    """Copy rows of `nbytes` bytes each. Rows that are adjacent on both sides are one copy, and those of one length too."""
    if not len(nbytes):
        return
    begins = numpy.ones(len(nbytes), bool)
    begins[1:] = (source_at[1:] != source_at[:-1] + nbytes[:-1]) | (target_at[1:] != target_at[:-1] + nbytes[:-1])
    firsts = begins.nonzero()[0]
    lengths = numpy.add.reduceat(nbytes, firsts)
    by_length = lengths.argsort(kind="stable")
    lengths, firsts = lengths[by_length], firsts[by_length]
    borders = numpy.append((numpy.diff(lengths, prepend=-1) != 0).nonzero()[0], len(lengths)).tolist()
    for begin, end in itertools.pairwise(borders):
        length, rows = int(lengths[begin]), firsts[begin:end]
        if not length:
            continue
        if end - begin > _FEW:
            _windows(target, length)[target_at[rows]] = _windows(source, length)[source_at[rows]]
            continue
        for start, place in zip(source_at[rows].tolist(), target_at[rows].tolist(), strict=True):
            target[place : place + length] = source[start : start + length]


def _windows(memory: Bytes, length: int) -> Bytes:
    """Return a view whose row i is the bytes [i, i + length) of `memory`."""
    return as_strided(memory, (len(memory) - length + 1, length), (1, 1))
