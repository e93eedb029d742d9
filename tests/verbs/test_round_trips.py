"""How many round trips to the rendezvous store each call takes: where hosts are far from each other, that is what it takes.

docs/hosts.md has the same numbers.
"""

from __future__ import annotations

import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.checkpoints import scramble
from kit.optimizers import adam
from kit.options import as_options
from kit.round_trips import counted
from kit.trained import Trained
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import meeting

ROUNDS = 3
PER_MEETING = (6, 2)
"""On the lowest rank, which waits for the others and deletes the verdict before, and on each other rank."""
PER_WAKE = 3
"""More on the lowest rank, besides a wait, each time that a rank has come before others have."""
MEETINGS = {
    "gather": 3,
    "scatter": 4,
    "get_shard": 0,
    "transfer": 7,
    "save": 5,
    "async_save": 4,
    "async_wait": 0,
    "load": 7,
    "resume": 8,
    "manager_made": 2,
    "manager_resume": 3,
    "first_step": 1,
    "step_without_meeting": 0,
    "step_with_meeting": 1,
    "step_that_saves": 7,
    "manager_wait": 1,
    "manager_close": 1,
}
"""By call; the calls make no other round trips."""
MORE_AT_FIRST = (9, 8)
"""In the first call of a job: two connections, the number of earlier meetings, the ranks on the host of the store; on the lowest
rank, whether a meeting was ended early, and who has ever come."""
OF_BACKGROUND_SAVE = (13, 3)


class Calls:
    """A trained model, one of other values, and a folder. The calls that are counted are methods, in the order of `MEETINGS`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._trained, self._other = Trained("FSDP2", adam, 1), Trained("FSDP2", adam, 1)
        scramble(self._other)
        self._both = self._trained.model, self._trained.optim
        self._others = self._other.model, self._other.optim
        self._full: Any = None
        self._handle: Any = None
        self._manager: Any = None

    def _new(self, name: str) -> Path:
        self._number += 1
        return self._folder / f"{name}-{self._number}"

    def gather(self) -> None:
        self._full = self._trained.gather(None)

    def scatter(self) -> None:
        self._trained.scatter(self._full, 0)

    def get_shard(self) -> None:
        self._trained.shard(self._full)

    def transfer(self) -> None:
        fsdp_optim.transfer_optim_state(*self._both, *self._others)

    def save(self) -> None:
        self._saved = self._new("saved")
        fsdp_optim.save(self._saved, *self._both, options=fsdp_optim.SaveOptions(durable=False))

    def async_save(self) -> None:
        self._handle = fsdp_optim.async_save(
            self._new("later"), *self._both, options=fsdp_optim.SaveOptions(durable=False)
        )

    def async_wait(self) -> None:
        self._handle.wait()

    def load(self) -> None:
        fsdp_optim.load(self._saved, *self._others)

    def resume(self) -> None:
        fsdp_optim.resume(self._folder, *self._others)

    def manager_made(self) -> None:
        options: dict[str, Any] = {"every": 4, "agree_every": 2, "durable": False, "signals": ()}
        self._manager = fsdp_optim.CheckpointManager(
            self._new("run"), *self._both, **as_options(fsdp_optim.ManagerOptions, **options)
        )

    def manager_resume(self) -> None:
        self._manager.resume()

    def first_step(self) -> None:
        self._manager.step(1)

    def step_without_meeting(self) -> None:
        self._manager.step(2)

    def step_with_meeting(self) -> None:
        self._manager.step(3)

    def step_that_saves(self) -> None:
        self._manager.step(4)

    def manager_wait(self) -> None:
        self._manager.wait()

    def manager_close(self) -> None:
        self._manager.close()


def trips_of(folder: Path) -> tuple[list[dict[str, int]], float]:
    """The round trips of each call on this rank, in each round; those of a save in the background, on average."""
    rounds: list[dict[str, int]] = []
    with counted() as trips, mock.patch.object(meeting, "_QUIET", 15.0):
        calls = Calls(folder)
        for _ in range(ROUNDS):
            rounds.append({})
            for name in MEETINGS:
                dist.barrier()  # a rank that comes much too late would be looked for
                before = trips.of_call
                getattr(calls, name)()
                rounds[-1][name] = trips.of_call - before
        wait_for_background()
    return rounds, trips.in_background / (2 * ROUNDS)


def wait_for_background() -> None:
    """Wait for what saves still do in the background when they have been waited for."""
    saves = [thread for thread in threading.enumerate() if thread.name.startswith("fsdp_optim: /")]
    for thread in saves:
        thread.join(60)


class RoundTripsTest(unittest.TestCase):
    @parameterized.expand([(2,), (4,)])
    def test_calls_take_as_many_round_trips_as_is_documented(self, world_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(trips_of, world_size, Path(folder))
        for rank, (rounds, in_background) in enumerate(by_rank):
            which = min(rank, 1)
            wanted = {name: number * PER_MEETING[which] for name, number in MEETINGS.items()}
            first = {**wanted, "gather": wanted["gather"] + MORE_AT_FIRST[which]}
            for number, trips in enumerate(rounds):
                with self.subTest(rank=rank, round=number):
                    self.check_trips(trips, wanted if number else first, 0 if rank else world_size - 2)
            with self.subTest(rank=rank, when="in the background"):
                self.assertEqual(in_background, OF_BACKGROUND_SAVE[which])

    def check_trips(self, trips: dict[str, int], wanted: dict[str, int], wakes: int) -> None:
        """Compare by call. `wakes`: how often at most a rank is woken in a meeting before all ranks below it have come."""
        for name, number in wanted.items():
            more = trips[name] - number
            self.assertIn(
                more, range(0, MEETINGS[name] * wakes * PER_WAKE + 1, PER_WAKE), f"{name}: {trips[name]}, not {number}"
            )
