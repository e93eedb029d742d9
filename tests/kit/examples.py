"""How many examples hypothesis tries: few each time, and many times more in `make test-long`, where EXAMPLES= is a factor."""

from __future__ import annotations

import os

from hypothesis import settings

FACTOR = float(os.environ.get("EXAMPLES", "0.5"))


def examples(number: int) -> settings:
    """A decorator that sets the number of random examples of a test, times EXAMPLES."""
    return settings(max_examples=max(int(number * FACTOR), 10), deadline=None, database=None)
