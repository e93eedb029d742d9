"""Plug-ins of packages that seem to be installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from unittest import mock

from fsdp_optim import registry


@contextlib.contextmanager
def installed(kind: registry.Kind, **where: str) -> Iterator[None]:
    """Inside, the installed packages have these entry points of one kind, by name, and no others."""
    points = tuple(EntryPoint(name, value, kind.group) for name, value in where.items())
    with mock.patch.object(registry, "installed_points", lambda group: points if group == kind.group else ()):
        yield


@contextlib.contextmanager
def nothing_asked_for() -> Iterator[None]:
    """Inside, nothing may look at what is installed."""
    with mock.patch.object(registry, "installed_points", side_effect=AssertionError("they were asked for")):
        yield
