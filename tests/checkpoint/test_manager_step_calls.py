"""A manager's step that saves nothing and does not meet: how many calls of functions it takes, and that it asks nobody."""

from __future__ import annotations

import cProfile
import pstats
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import Meeting

STEPS = 100
MOST_CALLS = 60
"""Calls of functions, in Python and C, of one step; torch's modes around a public call are most of them."""


def steps(folder: Path, has_signals: bool) -> tuple[float, int]:
    """Calls of functions per step, and meetings, on this rank; the next meeting is far away."""
    trained = Trained("FSDP2", adam, 1)
    signals = fsdp_optim.ManagerOptions().signals if has_signals else ()
    options = fsdp_optim.ManagerOptions(durable=False, signals=signals, agree_every=1000 if has_signals else None)
    with fsdp_optim.CheckpointManager(folder, trained.model, trained.optim, every=1000, options=options) as manager:
        manager.resume()
        manager.step(1)  # the ranks meet
        dist.barrier()
        profile = cProfile.Profile()
        with mock.patch.object(Meeting, "enter", side_effect=AssertionError("it meets")) as enter:
            profile.enable()
            for step in range(2, 2 + STEPS):
                manager.step(step)
            profile.disable()
    return pstats.Stats(profile).total_calls / STEPS, enter.call_count  # type: ignore[attr-defined]


class StepCallsTest(unittest.TestCase):
    @parameterized.expand([(2, False), (2, True), (4, True)])
    def test_a_step_that_saves_nothing_is_a_few_calls(self, world_size: int, has_signals: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for calls, meetings in run_on_ranks(steps, world_size, Path(folder) / "run", has_signals):
                self.assertLessEqual(calls, MOST_CALLS)
                self.assertEqual(meetings, 0)


if __name__ == "__main__":
    unittest.main()
