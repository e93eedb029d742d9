"""The rank that comes last to a meeting dies before it has written the verdict for all."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import error_text
from kit.optimizers import adam
from kit.trained import Trained

from fsdp_optim.testing import RanksFailed, run_on_ranks
from fsdp_optim.transport import meeting

WORLD, DIES = 3, 2
PATIENCE = 60.0  # seconds


def dies(folder: Path) -> None:
    """Gather, where one rank comes last and is killed before the verdict; the others note their errors."""
    trained = Trained("FSDP2", adam, 1)
    trained.gather(0)

    def killed(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(meeting, "_QUIET", 0.2):
        if dist.get_rank() == DIES:
            time.sleep(1.0)
            mock.patch.object(meeting.Meeting, "_made", killed).start()
        begun = time.monotonic()
        kind, text = error_text(lambda: trained.gather(0, timeout=PATIENCE))
    (folder / f"{dist.get_rank()}").write_text(f"{time.monotonic() - begun < PATIENCE / 2}\n{kind}\n{text}")


class LastRankDiesTest(unittest.TestCase):
    def test_the_others_hear_it_at_once(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            with self.assertRaises(RanksFailed):
                run_on_ranks(dies, WORLD, Path(name), grace=60.0)
            for rank in set(range(WORLD)) - {DIES}:
                is_soon, kind, text = Path(name, f"{rank}").read_text().split("\n", 2)
                self.assertEqual((is_soon, kind), ("True", "RankError"), text)
                self.assertIn(f"rank {DIES}: its process has ended", text)


if __name__ == "__main__":
    unittest.main()
