"""Names of a trainer's package that a plug-in needs, and the refusal of a version that lacks one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def needed(package: str, tested: str, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The objects of these names, by module. Raises ImportError, in one line, if the package or a name is missing.

    `tested`: the version of the package that the tests run with. Others are tried.
    """
    found: dict[str, Any] = {}
    for module, wanted in names.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # a package that the trainer's own package needs
            raise ImportError(_refusal(package, tested, f"the module {module}")) from None
        for name in wanted:
            if not hasattr(loaded, name):
                raise ImportError(_refusal(package, tested, f"{module}.{name}"))
            found[name] = getattr(loaded, name)
    return found


def _refusal(package: str, tested: str, missing: str) -> str:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"fsdp_optim.integrations.{package} needs {package}, which is not installed: pip install fsdp-optim[{package}]"
    return (
        f"{package} {installed} does not have {missing}, which fsdp_optim.integrations.{package} needs: install {package} "
        f"{tested}, with which it was tested"
    )
