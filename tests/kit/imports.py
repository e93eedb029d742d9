"""Packages that are imported when a test uses them (`Later`), that are stood for (`stand_ins`), or that cannot be found (`hide`).

peft = Later("peft")                 # at the top of a file: every process that collects tests imports every test file
with stand_ins("vllm"): ...          # imports inside find a module of any names
hide("fairscale")                    # in a process of its own (`kit.forked`), as if it were not installed

`python tests/kit/imports.py fairscale program.py arguments...` hides a package and then runs the program.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class Later:
    """Stands for a module, and has its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


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
    from kit.compare import Differs

    lacking = importlib.import_module(module)
    with mock.patch.dict(vars(lacking)), mock.patch.dict(sys.modules):
        sys.modules.pop(plug_in, None)
        delattr(lacking, name)
        try:
            importlib.import_module(plug_in)
        except ImportError as error:
            return str(error)
    raise Differs("the plug-in was imported")


class _Without:
    """A finder of modules that does not find one package. All else it leaves to the finder that it stands for."""

    def __init__(self, finder: Any, package: str) -> None:
        self._finder, self._package = finder, package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.split(".")[0] == self._package else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide(package: str) -> None:
    """Let nothing in this process find a package. It must not be loaded yet."""
    loaded = [name for name in sys.modules if name.split(".")[0] == package]
    if loaded:
        raise RuntimeError(f"{package} is loaded already: {loaded[0]}")
    sys.meta_path[:] = [_Without(finder, package) for finder in sys.meta_path]  # type: ignore[misc]


if __name__ == "__main__":
    hide(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if the program were run itself
    runpy.run_path(sys.argv[0], run_name="__main__")
