"""Trees: dicts, lists and tuples of values, whose tensors are in files of tensors beside the values.

A checkpoint has the tree itself among the values of the trainer, with an `InFile` in the place of each such tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError

BRANCHES = (dict, OrderedDict, list, tuple)
"""The classes of the inner nodes of a tree. An object of any other class is a leaf."""


@dataclass(frozen=True)
class InFile:
    """Stands for a tensor of a tree. `key`: the name of the tensor in its file: the names on its path, joined by dots."""

    key: str


def items_of(branch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, or the indices and items of a list or tuple."""
    return iter(branch.items() if isinstance(branch, Mapping) else enumerate(branch))


def leaves_of(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of a tree, each with its path: keys of dicts, and indices of lists and tuples."""
    if type(tree) not in BRANCHES:
        yield (), tree
        return
    for key, inner in items_of(tree):
        for path, leaf in leaves_of(inner):
            yield (key, *path), leaf


def keys_in(tree: Any) -> list[str]:
    """Return the keys of the tensors that are in files, in their order.

    Raises CheckpointError where two places of the tree have one tensor, as no save writes it.
    """
    keys = [leaf.key for _, leaf in leaves_of(tree) if isinstance(leaf, InFile)]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CheckpointError(f"{twice}: two values of a tree in the checkpoint name this tensor, so it is damaged")
    return keys


def has_tensors(tree: Any) -> bool:
    """Return whether a tree has tensors, in files or in memory."""
    return any(isinstance(leaf, (InFile, torch.Tensor)) for _, leaf in leaves_of(tree))


def with_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with `change(leaf)` in the place of each leaf. Containers are new objects of the same classes."""
    kind = type(tree)
    if kind not in BRANCHES:
        return change(tree)
    if kind in (list, tuple):
        return kind(with_leaves(item, change) for item in tree)
    return kind((key, with_leaves(item, change)) for key, item in tree.items())


def with_tensors(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree with tensors in the place of those that are in files, by key. A tensor that is not given stays out."""
    return with_leaves(tree, lambda leaf: tensors.get(leaf.key, leaf) if isinstance(leaf, InFile) else leaf)
