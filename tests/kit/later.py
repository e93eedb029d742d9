"""A package that a test file names at its top, and that is imported when a test uses it.

    peft = Later("peft")

Every process that collects tests imports every test file; the packages of trainers take seconds.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Stands for a module, and has its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
