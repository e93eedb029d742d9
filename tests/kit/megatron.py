"""megatron-core, in no site-packages, because other libraries change what they do where they find it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".megatron"
"""Where `make test-all` puts it."""


def why_not() -> str:
    """Why megatron-core cannot be used; empty if it can."""
    if (FOLDER / "megatron").is_dir() or importlib.util.find_spec("megatron") is not None:
        return ""
    return "megatron-core 0.16 is not installed: `make megatron` puts it beside the tests"


@contextmanager
def megatron_core() -> Iterator[None]:
    """A context in which megatron-core can be imported."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
