"""A model's dict as `state_dict()` of torch makes it: the entries of modules by name, and metadata of the modules beside them.

A module gets the version of the code that made its entries when it loads them, and a later version of the code changes what an
earlier one made. So an entry without its version would be changed as the first version's, without a word.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

EXTRA = "_extra_state"
"""torch's key for the result of `get_extra_state()`: the last part of its name."""

_BESIDE, _VERSION = "_metadata", "version"  # torch's attribute of the dict, and its key
_OF_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module|_orig_mod)(?:\.|$)"
)


def is_extra_state(name: str) -> bool:
    """Return whether an entry of a model's dict is the result of a module's `get_extra_state()`."""
    return name.rpartition(".")[2] == EXTRA


def module_path(name: str) -> str:
    """Return the path of the module that an entry or a module belongs to; "" for the model."""
    return name.rpartition(".")[0]


def unwrapped_path(path: str) -> str:
    """Return a path of a module, or a name, without the parts that wrappers add."""
    return _OF_WRAPPERS.sub("", path).rstrip(".")


def with_metadata(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a model's dict with metadata of its modules, by path."""
    made: OrderedDict[str, Any] = OrderedDict(entries)
    vars(made)[_BESIDE] = OrderedDict(metadata)
    return made


def with_versions(entries: Mapping[str, Any], versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a model's dict with the versions of the code of its modules, by path."""
    return with_metadata(entries, {path: {_VERSION: version} for path, version in versions.items()})


def versions_of(values: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return the known versions of the code of modules by path, of values of modules, each with its version."""
    return {module_path(name): version for name, (version, _) in values.items() if version is not None}


def versions_beside(model: object) -> dict[str, Any]:
    """Return the versions of the code of modules by path, as far as a model's dict has them beside its entries.

    Wrappers clean the names of entries, and not these paths, so that a module has both here.
    """
    metadata, versions = getattr(model, _BESIDE, None), dict[str, Any]()
    for path, of_module in metadata.items() if isinstance(metadata, Mapping) else ():
        if isinstance(path, str) and isinstance(of_module, Mapping):
            # A wrapper comes before its module, whose version counts.
            versions[path] = versions[unwrapped_path(path)] = plain_version(of_module.get(_VERSION))
    return versions


def plain_version(version: object) -> int | float | str | None:
    """Return a version as checkpoints have it; None for what is neither a number nor a word."""
    return version if type(version) in (int, float, str) else None  # type: ignore[return-value]
