"""For Python on a host whose clock is another: libfaketime 0.9.10 fails where `time.sleep` of Python 3.11 sleeps until a time."""

from __future__ import annotations

import select
import time


def sleep(seconds: float) -> None:
    """As `time.sleep`, in the way of Python 3.10."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]
