"""Saves in the background on ranks that are threads, whose end each of them hears."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

from fsdp_optim import CheckpointError
from fsdp_optim.transport import Completion, RankGroup, completion
from fsdp_optim.transport.in_process import InProcessWorld, Shared
from fsdp_optim.transport.job import JobStore
from kit.compare import error_text

LIMIT = 20.0  # seconds; reached by nothing but a failure


class Watch:
    """Takes those ranks for lost that the test says, in `lost`."""

    lost: dict[int, str]

    def __init__(self, store: JobStore, ranks: Sequence[int], *, beats: bool) -> None:
        if not beats:
            raise AssertionError("ranks that save beat, and silence must be noticed")
        self._ranks = ranks

    def look(self) -> dict[int, str]:
        return {rank: how for rank, how in self.lost.items() if rank in self._ranks}


class Saves(unittest.TestCase):
    """Ranks of one job, each with a connection of its own, in the hands of a test."""

    def setUp(self) -> None:
        for name, value in (("_GRACE", 5.0), ("_LOOK_FOR_LIFE_EVERY", 0.0), ("_LOOK_EVERY", 0.002), ("Watch", Watch)):
            self.patch(name, value)
        Watch.lost = {}
        self.shared: Shared

    def patch(self, name: str, value: Any) -> None:
        patch = mock.patch.object(completion, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def joined(self, size: int, timeout: float = LIMIT, ranks: Sequence[int] | None = None) -> list[Completion]:
        self.shared = Shared(size)
        self.shared.store.set_timeout(timedelta(seconds=2))  # for a key that is not there, and is read
        ranks = range(size) if ranks is None else ranks
        made = [self.join(self.group(rank, ranks, timeout)) for rank in ranks]
        self.before = self.num_keys()
        return made

    def group(self, rank: int, ranks: Sequence[int], timeout: float = LIMIT) -> RankGroup:
        return InProcessWorld(self.shared, rank).group("async_save", tuple(ranks), timeout=timeout)

    def join(self, group: RankGroup, name: str = "a") -> Completion:
        made = Completion.join(group, name, f"run/{name}")
        self.addCleanup(made.close)
        return made

    def num_keys(self) -> int:
        return int(self.shared.store.num_keys())

    def check_nothing_left(self, more: int = 0) -> None:
        self.assertEqual(self.num_keys() - self.before, more, "keys are left in the store")

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """What calls that are made at once return, or raise, as (class, message)."""
        outcomes: list[Any] = [None] * len(calls)

        def run(index: int) -> None:
            results: list[Any] = []
            error = error_text(lambda: results.append(calls[index]()))
            outcomes[index] = error if error[0] else results[0]

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            self.assertFalse(thread.is_alive(), "a rank hangs")
        return outcomes

    def lead(self, leader: Completion, failed: str | None = None) -> Any:
        """All that the leader does, as a save does it; the reports of the ranks."""
        try:
            if failed is not None:
                raise CheckpointError(failed)
            reports = leader.wait_for_all()
            leader.commit()
        except Exception as error:
            self.all_know = leader.not_saved(str(error))
            raise
        leader.saved()
        return reports

    def ends(self, saves: Sequence[Completion], failed: str | None = None) -> list[Any]:
        """How a save ends on all these ranks, the first of which leads; then they are closed."""
        leader, others = saves[0], saves[1:]
        outcomes = self.together(lambda: self.lead(leader, failed), *(other.wait_for_end for other in others))
        for save in saves:
            save.close()
        return outcomes
