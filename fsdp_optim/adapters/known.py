"""The adapters that there are: built-in adapters, those of installed packages, and those that a program adds.

What only one of them can say, whose wrapper it is, is asked here of all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import nn

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import TRANSPARENT_CHILDREN, is_transparent
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Placement
from fsdp_optim.registry import ADAPTERS, BUILT_IN_ADAPTERS, named
from fsdp_optim.tensors.memory import is_plain

Key = TypeVar("Key", bound=Hashable)


@contextlib.contextmanager
def use_adapters(adapters: Sequence[Adapter]) -> Iterator[None]:
    """A context in which calls use these adapters too, before all others.

    All ranks must use the same adapters. Threads that are started inside the context do not inherit the adapters.

    Raises WrapperError for an object that is not an Adapter.
    """
    for adapter in adapters:
        if not _is_adapter(adapter):
            raise WrapperError(
                f"use_adapters() was given a {type(adapter).__name__}, which is not a fsdp_optim.plugins.Adapter"
            )
    with ADAPTERS.use([("", adapter) for adapter in adapters]):
        yield


def all_adapters() -> tuple[Adapter, ...]:
    """All adapters in the order of their calls: those of `use_adapters`, of installed packages, and the built-in adapters.

    Raises WrapperError that names an entry point which cannot be loaded.
    """
    added: tuple[Adapter, ...] = tuple(adapter for _, adapter in ADAPTERS.added())
    installed = tuple(ADAPTERS.make(point, _is_adapter) for point in ADAPTERS.points() if point.name in sys.modules)
    return (*added, *installed, *built_in_adapters())


@functools.cache
def built_in_adapters() -> tuple[Adapter, ...]:
    """The adapters of this package."""
    return tuple(named(where)() for where in BUILT_IN_ADAPTERS)


def wrapper_parts() -> frozenset[str]:
    """The components of names that wrappers insert, and that are not part of an FQN."""
    return TRANSPARENT_CHILDREN.union(*(adapter.wrapper_parts for adapter in all_adapters()))


def is_wrapper_child(module: nn.Module, name: str) -> bool:
    """Whether a child is the module that a wrapper has inside itself, by the classes of the wrappers that are loaded."""
    present = (adapter for adapter in all_adapters() if adapter.is_present())
    return is_transparent(module, name) or any(adapter.is_wrapper_child(module, name) for adapter in present)


def _is_adapter(value: object) -> bool:
    return isinstance(value, Adapter)


def is_sharded_value(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a state value is cut over ranks."""
    return _adapter_of(value) is not None


def read_sharded_values(
    values: Iterable[tuple[Key, str, object]],
) -> dict[Key, tuple[Placement, torch.Tensor]]:
    """Return the placement of each value that is cut over ranks, and this rank's elements as a 1-D tensor.

    `values`: each with its key in the result, and its FQN for errors. Those that are not cut over ranks are left out.
    """
    by_adapter: dict[int, tuple[Adapter, list[Key], list[tuple[str, torch.Tensor]]]] = {}
    for key, fqn, value in values:
        adapter = _adapter_of(value)
        if adapter is not None and isinstance(value, torch.Tensor):
            _, keys, cut = by_adapter.setdefault(id(adapter), (adapter, [], []))
            keys.append(key)
            cut.append((fqn, value))
    return {
        key: read
        for adapter, keys, cut in by_adapter.values()
        for key, read in zip(keys, adapter.read_sharded_values(cut), strict=True)
    }


def _adapter_of(value: object) -> Adapter | None:
    """Return the adapter of the wrapper that has cut a value over ranks; None for any other value."""
    if not isinstance(value, torch.Tensor) or is_plain(value):
        return None
    return next((a for a in all_adapters() if a.is_present() and a.is_sharded_value(value)), None)
