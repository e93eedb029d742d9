"""The registry of adapters: built in, of installed packages, and added by a program."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points

from torch import nn

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.checkpointable import CheckpointableAdapter
from fsdp_optim.adapters.dtensor import DTensorAdapter
from fsdp_optim.adapters.fairscale import FairscaleAdapter
from fsdp_optim.adapters.fsdp1 import FSDP1Adapter
from fsdp_optim.adapters.replicated import ReplicatedAdapter
from fsdp_optim.adapters.tree import TRANSPARENT_CHILDREN, is_transparent
from fsdp_optim.errors import WrapperError

GROUP = "fsdp_optim.adapters"
"""The group of entry points by which installed packages add adapters."""

BUILT_IN: tuple[Adapter, ...] = (
    FairscaleAdapter(),
    FSDP1Adapter(),
    CheckpointableAdapter(),
    DTensorAdapter(),
    ReplicatedAdapter(),
)
"""The built-in adapters in the order of their calls; the last adapter claims all remaining parameters."""

_added: ContextVar[tuple[Adapter, ...]] = ContextVar("added", default=())


@contextlib.contextmanager
def use_adapters(adapters: Sequence[Adapter]) -> Iterator[None]:
    """Use these adapters too, before all others, for calls inside the context.

    All ranks must use the same adapters. Threads that are started inside the context do not inherit the adapters.

    Raises WrapperError for an object that is not an Adapter.
    """
    for adapter in adapters:
        _check(adapter, "use_adapters() was given")
    token = _added.set((*adapters, *_added.get()))
    try:
        yield
    finally:
        _added.reset(token)


def all_adapters() -> tuple[Adapter, ...]:
    """Return all adapters in the order of their calls: from `use_adapters`, of installed packages, and the built-in adapters.

    Raises WrapperError that names an entry point which cannot be loaded.
    """
    installed = tuple(_loaded(point) for point in installed_points() if point.name in sys.modules)
    return (*_added.get(), *installed, *BUILT_IN)


def wrapper_parts() -> frozenset[str]:
    """Return the components of names that wrappers insert, and that are not part of an FQN."""
    return TRANSPARENT_CHILDREN.union(*(adapter.wrapper_parts for adapter in all_adapters()))


def is_wrapper_child(module: nn.Module, name: str) -> bool:
    """Return whether a child is the module that a wrapper has inside itself, by the classes of the wrappers that are loaded."""
    present = (adapter for adapter in all_adapters() if adapter.is_present())
    return is_transparent(module, name) or any(adapter.is_wrapper_child(module, name) for adapter in present)


@functools.cache
def installed_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of all installed packages, looked up once per process because that takes milliseconds."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)))


@functools.cache
def _loaded(point: EntryPoint) -> Adapter:
    """Return the adapter of an entry point, which names an Adapter, or a class or a function that returns an Adapter."""
    where = f"the entry point {point.name!r} = {point.value!r} in the group {GROUP!r}"
    if point.dist is not None:
        where += f" of the package {point.dist.name} {point.dist.version}"
    try:
        loaded = point.load()
        return _check(loaded if isinstance(loaded, Adapter) else loaded(), f"{where} is")
    except WrapperError:
        raise
    except Exception as error:
        raise WrapperError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error


def _check(adapter: object, where: str) -> Adapter:
    if not isinstance(adapter, Adapter):
        raise WrapperError(f"{where} a {type(adapter).__name__}, which is not a fsdp_optim.adapters.Adapter")
    return adapter
