"""The duration and the speed of a call, as text for a line of the log."""

from __future__ import annotations

import time


def speed_of(nbytes: int, since: float) -> str:
    """The seconds since a time of `time.monotonic`, and the MB/s."""
    seconds = time.monotonic() - since
    return f"{seconds:.2f} s, {nbytes / 1e6 / max(seconds, 1e-9):.0f} MB/s"
