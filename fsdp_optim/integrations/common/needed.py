"""Names of a trainer's package that a plug-in needs, and the refusal of a version that lacks one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fsdp_optim import WrapperError
from fsdp_optim.plugins import pip_install


class MissingNameError(WrapperError, ImportError):
    """A package is not installed, or its version does not have a name that a plug-in needs. Users catch either parent."""


def needed(package: str, tested: str, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The objects of these names, by module. A name may have dots: `Trainer.save_model`.

    Raises MissingNameError, in one line with all names, if the package, a module or a name is missing. `tested`: the version of
    the package that the tests run with. Others are tried.
    """
    attributes: dict[str, Any] = {}
    missing: list[str] = []
    for module, wanted in names.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a package that the trainer's own package needs
            raise refusal(package, tested, f"the module {module}") from None
        for name in wanted:
            try:
                attributes[name] = _attribute(loaded, name)
            except (
                AttributeError,
                ImportError,
            ):  # a module that imports its names when they are asked for raises the other
                missing.append(f"{module}.{name}")
    if missing:
        raise refusal(package, tested, ", ".join(missing))
    return attributes


def refusal(package: str, tested: str, missing: str) -> MissingNameError:
    """The error of a plug-in whose package does not have the names in `missing`."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        return MissingNameError(f"this plug-in needs {package}, which is not installed: {pip_install(package)}")
    return MissingNameError(
        f"{package} {installed} does not have {missing}, which this plug-in needs: install {package} {tested}, which was tested, "
        "or save with fsdp_optim.save"
    )


def version_of(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner
