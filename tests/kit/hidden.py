"""A process in which a package that is installed cannot be found, as if it were not installed.

    from kit.hidden import hide          # in a process of its own: kit.scripts, or a program under torchrun
    hide("fairscale")

or `python -m kit.hidden fairscale program.py arguments...`, which hides the package and then runs the program.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


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
    runpy.run_path(sys.argv[0], run_name="__main__")
