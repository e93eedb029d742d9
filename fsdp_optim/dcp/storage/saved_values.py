"""Values that are no tensors: torch's planners hand them over as bytes, and a checkpoint has plain values wherever it can."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.part_in_memory import InMemory
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.formats.base.codec import Encoder
from fsdp_optim.formats.base.tree_values import BRANCHES, items_of
from fsdp_optim.tensors.elements import MOST_DEEP

_LEAVES = (type(None), bool, int, float, complex, str, bytes, io.BytesIO)

# These are kept where the codec has a form for them: not for arrays of texts, say.
_KEPT = (numpy.ndarray, numpy.generic, bytearray, range, torch.Size, torch.dtype, torch.device)

_MOST_DROPPED = 1 << 16  # items of a list that torch has saved nothing of


def value_in(data: bytes) -> tuple[Any, bool]:
    """Return the plain value in bytes of `torch.save`; the bytes themselves where it is not plain, and whether they are."""
    try:
        value = _plain_value(data)
    except Exception:  # of many classes, for another planner's bytes, and for objects that only a pickle makes
        return data, True
    return (value, False) if is_plain_value(value) else (data, True)


def _plain_value(data: bytes) -> Any:
    """Return the value in bytes of `torch.save`, as this library reads it in files of torch: without unknown objects."""
    archive = read_archive(InMemory("a value", data), "")
    return archive.materialised(archive.value)


def bytes_with(value: Any) -> io.BytesIO:
    """Return the bytes from which a planner loads a plain value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def is_plain_value(value: Any, depth: int = 0) -> bool:
    """Return whether a value comes back exactly: numbers, text, bytes and arrays in dicts, lists, tuples and sets."""
    if type(value) in _LEAVES:
        return not (type(value) is int and value.bit_length() > 4096) and not (
            type(value) is str and not value.isascii() and not _is_utf8(value)
        )
    if isinstance(value, _KEPT):
        return _is_encoded(value)
    if type(value) in (set, frozenset):
        return all(is_plain_value(item, depth + 1) for item in value)
    if type(value) not in BRANCHES or depth > MOST_DEEP // 2:
        return False
    keys_are_plain = not isinstance(value, Mapping) or all(is_plain_value(key, depth + 1) for key in value)
    return keys_are_plain and all(is_plain_value(item, depth + 1) for _, item in items_of(value))


def _is_encoded(value: Any) -> bool:
    try:
        Encoder().encode("", value)
    except CheckpointError:
        return False
    return True


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def paths_of(planner_data: Any, keys: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each key in the dict that was saved. Planners that do not flatten record none: the key is its path.

    Raises CheckpointError for other data of a planner, which a checkpoint does not keep.
    """
    given: Mapping[str, Any] = {}
    if isinstance(planner_data, Mapping):
        given = planner_data
    elif planner_data is not None:
        raise CheckpointError(
            f"the planner has recorded a {type(planner_data).__name__} in its plans (planner_data), which a checkpoint does not "
            "keep: use a planner whose planner_data is a dict from keys to paths, or None"
        )
    paths = {}
    for key in keys:
        path = given.get(key, (key,))
        is_path = isinstance(path, (tuple, list)) and path and all(type(part) in (str, int) for part in path)
        paths[key] = tuple(path) if is_path and type(path[0]) is str else (key,)
    return paths


def nested(values: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]]) -> Any:
    """Return the values in dicts and lists along their paths; None where these contradict each other.

    `values`: by key.
    """
    root: dict[str | int, Any] = {}
    for key, value in values.items():
        branch = root
        *outer, last = paths[key]
        for part in outer:
            inner = branch.setdefault(part, _Branch())
            if type(inner) is not _Branch:
                return None
            branch = inner
        if last in branch:
            return None
        branch[last] = value
    return {part: _listed(branch) for part, branch in root.items()}


class _Branch(dict[Any, Any]):
    """A dict or a list while it is built, which no value is."""


def _listed(branch: Any) -> Any:
    """Return lists in the place of branches whose keys are numbers, and dicts in the place of all others.

    A number that is lacking is an empty dict, of which torch saves nothing.
    """
    if type(branch) is not _Branch:
        return branch
    made = {part: _listed(inner) for part, inner in branch.items()}
    if not made or not all(type(part) is int and 0 <= part < len(made) + _MOST_DROPPED for part in made):
        return made
    return [made.get(number, {}) for number in range(max(made) + 1)]


def at_path(tree: Any, path: Sequence[str | int]) -> Any:
    """Return the value at a path of a tree. Raises CheckpointError where there is none."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError) as error:
            named = ".".join(map(str, path))
            raise CheckpointError(f"{named}: the checkpoint lists this value, and does not have it") from error
    return tree
