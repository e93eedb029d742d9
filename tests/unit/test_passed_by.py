"""A rank is counted as come to meetings, while it comes to them itself, or while another rank does the same."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_optim.transport import Meeting, RankGroup
from fsdp_optim.transport.world import TorchWorld

RANK = 1


class Interrupted:
    """A store in which something else happens after the first read of a count."""

    def __init__(self, store: Any, happens: Callable[[], object]) -> None:
        self._store, self._happens = store, [happens]

    def add(self, key: str, number: int) -> int:
        total: int = self._store.add(key, number)
        if self._happens and not number:
            self._happens.pop()()
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def meeting_in(store: Any, number: int) -> Meeting:
    return Meeting(RankGroup(TorchWorld(), (0, RANK)), store, "prefix", number)


def came(store: Any) -> int:
    return int(store.add(f"prefix/came/{RANK}", 0))


class PassedByTest(unittest.TestCase):
    def test_it_is_at_the_meeting(self) -> None:
        for before in (0, 1, 4, 5, 7):
            store = dist.HashStore()
            store.add(f"prefix/came/{RANK}", before)
            meeting_in(store, 5).pass_by(RANK, 5)
            self.assertEqual(came(store), max(before, 5))

    def test_it_comes_meanwhile(self) -> None:
        """The rank comes to meeting 4 of 5 meanwhile; its next meeting is the sixth, so it is not counted twice."""
        store = dist.HashStore()
        store.add(f"prefix/came/{RANK}", 3)
        meeting_in(Interrupted(store, lambda: store.add(f"prefix/came/{RANK}", 1)), 5).pass_by(RANK, 5)
        self.assertEqual(came(store), 5)

    def test_another_rank_passes_it_by_meanwhile(self) -> None:
        store = dist.HashStore()
        store.add(f"prefix/came/{RANK}", 3)
        meeting_in(Interrupted(store, lambda: meeting_in(store, 5).pass_by(RANK, 5)), 5).pass_by(RANK, 5)
        self.assertEqual(came(store), 5)

    def test_it_goes_further_meanwhile(self) -> None:
        store = dist.HashStore()
        store.add(f"prefix/came/{RANK}", 4)
        meeting_in(Interrupted(store, lambda: store.add(f"prefix/came/{RANK}", 2)), 5).pass_by(RANK, 5)
        self.assertEqual(came(store), 6)
