"""Sizes, numbers, durations and speeds in words, for lines of the log."""

from __future__ import annotations

import time

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def speed_of(nbytes: int, since: float) -> str:
    """The seconds since a time of `time.monotonic`, and the MB/s."""
    seconds = time.monotonic() - since
    return f"{seconds:.2f} s, {nbytes / 1e6 / max(seconds, 1e-9):.0f} MB/s"


def sized(nbytes: float) -> str:
    """Return a number of bytes in words: `14.1 GB`."""
    for unit in _UNITS:
        if nbytes < 999.5 or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return `1 tensor`, `1,163 tensors`, `1.3 M elements`."""
    if number < 1_000_000:
        text = f"{number:,}"
    elif number < 999_950_000:  # four digits round what is above up to 1 G
        text = f"{number / 1e6:.4g} M"
    else:
        text = f"{number / 1e9:.4g} G"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def lasted(seconds: float) -> str:
    """Return a duration in words: `0.05 s`, `6.2 s`, `75 s`."""
    return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def moved(nbytes: int, seconds: float) -> str:
    """Return how fast bytes were moved, in words: `14.1 GB in 6.2 s (2.3 GB/s)`."""
    return f"{sized(nbytes)} in {lasted(seconds)} ({sized(nbytes / max(seconds, 1e-9))}/s)"
