"""Agreement, messages and errors of ranks that are threads."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

from kit.control_conformance import ControlConformance
from kit.transport_conformance import TransportConformance

from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import world_here
from fsdp_optim.transport.in_process import InProcessWorld


def things_left() -> int:
    """The leftovers of meetings and exchanges in the world of this thread."""
    world = world_here()
    if not isinstance(world, InProcessWorld):
        raise TypeError("not in an in-process world")
    shared = world.shared
    return len(shared.meetings) + len(shared.waiting) + len(shared.letters) + len(shared.claims)


class InProcessControlTest(ControlConformance, unittest.TestCase):
    left = staticmethod(things_left)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return run_on_threads(fn, world_size, *args)


class InProcessTransportTest(TransportConformance, unittest.TestCase):
    left = staticmethod(things_left)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return run_on_threads(fn, world_size, *args)
