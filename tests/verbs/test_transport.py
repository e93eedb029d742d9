"""StoreControl and CollectiveTransport (over gloo) pass the conformance tests on real ranks."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.control_conformance import ControlConformance
from kit.transport_conformance import TransportConformance

from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import meeting


def keys_left() -> int:
    return int(dist.distributed_c10d._get_default_store().num_keys())


def impatient(fn: Callable[..., Any], *args: Any) -> Any:
    """A context in which waiting ranks look for each other sooner than after five seconds."""
    with mock.patch.object(meeting, "_QUIET", 1.0):
        return fn(*args)


class StoreControlTest(ControlConformance, unittest.TestCase):
    left = staticmethod(keys_left)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return run_on_ranks(impatient, world_size, fn, *args)


def in_a_chain(fn: Callable[..., Any], *args: Any) -> Any:
    """The same, where each rank has one rank below it: of three ranks one is the root, one inner and one a leaf."""
    with mock.patch.object(meeting, "_FANOUT", 1):
        return impatient(fn, *args)


class StoreControlInAChainTest(ControlConformance, unittest.TestCase):
    left = staticmethod(keys_left)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return run_on_ranks(in_a_chain, world_size, fn, *args)


class CollectiveTransportTest(TransportConformance, unittest.TestCase):
    left = staticmethod(keys_left)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return run_on_ranks(fn, world_size, *args)
