"""Modules that stand for packages which a trainer imports and does not use on CPU."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kit.compare import Differs


class _StandIn(types.ModuleType):
    """A module with any name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class_named(name)


def _class_named(name: str) -> type:
    """A class that is also a decorator, because packages decorate with such names when they are imported."""
    methods = {"__init__": lambda self, *_, **__: None, "__call__": lambda self, decorated=None, *_, **__: decorated}
    return type(name, (), methods)


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Stand-ins for the modules that are not loaded, for the imports inside the block."""
    made = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def import_without(plug_in: str, module: str, name: str) -> str:
    """The error of the import of a plug-in where a module of the trainer does not have a name."""
    lacking = importlib.import_module(module)
    with mock.patch.dict(vars(lacking)), mock.patch.dict(sys.modules):
        sys.modules.pop(plug_in, None)
        delattr(lacking, name)
        try:
            importlib.import_module(plug_in)
        except ImportError as error:
            return str(error)
    raise Differs("the plug-in was imported")
