"""The adapters that there are: this package's own, those of installed packages, and those that a program adds."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.checkpointable import CheckpointableAdapter
from fsdp_optim.adapters.dtensor import DTensorAdapter
from fsdp_optim.adapters.fairscale import FairscaleAdapter
from fsdp_optim.adapters.fsdp1 import FSDP1Adapter
from fsdp_optim.adapters.replicated import ReplicatedAdapter
from fsdp_optim.errors import WrapperError

GROUP = "fsdp_optim.adapters"
"""The entry points by which installed packages add adapters."""

BUILT_IN: tuple[Adapter, ...] = (
    FairscaleAdapter(),
    FSDP1Adapter(),
    CheckpointableAdapter(),
    DTensorAdapter(),
    ReplicatedAdapter(),
)
"""In the order in which they are asked; the last one takes every parameter that is left."""

_added: ContextVar[tuple[Adapter, ...]] = ContextVar("added", default=())


@contextlib.contextmanager
def use_adapters(adapters: Sequence[Adapter]) -> Iterator[None]:
    """Inside, calls know these adapters too, and ask them before all others.

    All ranks have to use the same ones. Threads that are started inside do not inherit them.

    Raises WrapperError for something that is no Adapter.
    """
    for adapter in adapters:
        _check(adapter, "use_adapters() was given")
    token = _added.set((*adapters, *_added.get()))
    try:
        yield
    finally:
        _added.reset(token)


def all_adapters() -> tuple[Adapter, ...]:
    """Every adapter, in the order in which they are asked: those in use, those of installed packages, the built-in ones.

    Raises WrapperError that names an entry point which cannot be loaded.
    """
    installed = tuple(_loaded(point) for point in installed_points() if point.name in sys.modules)
    return (*_added.get(), *installed, *BUILT_IN)


@functools.cache
def installed_points() -> tuple[EntryPoint, ...]:
    """The entry points of all installed packages, looked up once per process: that takes milliseconds."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)))


@functools.cache
def _loaded(point: EntryPoint) -> Adapter:
    """The adapter that an entry point names: an Adapter, or a class or a function that gives one."""
    where = f"the entry point {point.name!r} = {point.value!r} in the group {GROUP!r}"
    if point.dist is not None:
        where += f" of the package {point.dist.name} {point.dist.version}"
    try:
        found = point.load()
        return _check(found if isinstance(found, Adapter) else found(), f"{where} is")
    except WrapperError:
        raise
    except Exception as error:
        raise WrapperError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error


def _check(adapter: object, where: str) -> Adapter:
    if not isinstance(adapter, Adapter):
        raise WrapperError(f"{where} a {type(adapter).__name__}, which is no fsdp_optim.adapters.Adapter")
    return adapter
