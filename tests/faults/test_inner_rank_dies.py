"""A rank dies in a meeting to which all have come, before it has told the rank above it what those below it state."""

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

WORLD, DIES = 3, 1
PATIENCE = 60.0  # seconds


def dies(folder: Path) -> None:
    """Gather, where the inner one of three ranks in a chain is killed when it has heard the last; the others note errors."""
    trained = Trained("FSDP2", adam, 1)

    def killed(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(meeting, "_QUIET", 0.2), mock.patch.object(meeting, "_FANOUT", 1):
        trained.gather(0)
        if dist.get_rank() == DIES:
            time.sleep(1.0)
            mock.patch.object(meeting.Meeting, "tell", killed).start()
        begun = time.monotonic()
        kind, text = error_text(lambda: trained.gather(0, timeout=PATIENCE))
    (folder / f"{dist.get_rank()}").write_text(f"{time.monotonic() - begun < PATIENCE / 2}\n{kind}\n{text}")


class InnerRankDiesTest(unittest.TestCase):
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
