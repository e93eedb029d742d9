"""This library as its calls and its commands load it, piece by piece: `import fsdp_optim` alone loads next to nothing."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import fsdp_optim.api  # noqa: F401

for room in ("buckets", "cli", "foreign", "offline"):
    package = import_module(f"fsdp_optim.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
