"""While ranks wait: who is missing is said early, in the error's words; and a round that cannot be posted hangs nobody."""

from __future__ import annotations

import logging
import time
import unittest
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import adam
from kit.trained import Trained

from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import long_wait, meeting

WORLD = 3
WORDS = "did not arrive within"


class Lines(logging.Handler):
    """The warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def comes_late(late: int, gives_up: bool) -> tuple[list[str], tuple[str, str]]:
    """The log lines on this rank while one rank does not come, and the error."""
    trained = Trained("FSDP2", adam, 1)
    wanted = trained.gather(None)
    handler = Lines()
    logging.getLogger("fsdp_optim").addHandler(handler)
    patience = 3.0 if gives_up else 60.0
    with mock.patch.object(meeting, "_QUIET", 0.2), mock.patch.object(long_wait, "_WARN_AFTER", 1.0):
        try:
            dist.barrier()
            if dist.get_rank() == late:
                time.sleep(4.5 if gives_up else 2.5)
            error = error_text(lambda: check_same("after waiting", trained.gather(None, timeout=patience), wanted))
        finally:
            logging.getLogger("fsdp_optim").removeHandler(handler)
    return handler.lines, error


def cannot_post(times: int) -> list[tuple[str, str]]:
    """Each rank in turn cannot post a round, several times one after the other."""
    trained, errors = Trained("FSDP2", adam, 1), []
    wanted = trained.gather(None)
    make = dist.P2POp
    for rank in range(WORLD):
        left = [times if dist.get_rank() == rank else 0]

        def broken(*args: Any, left: list[int] = left) -> Any:
            if left[0]:
                left[0] -= 1
                raise MemoryError("nothing left for a message")
            return make(*args)

        with mock.patch.object(dist, "P2POp", broken):
            errors.append(error_text(lambda: trained.gather(None, timeout=60.0)))
        check_same(f"after rank {rank}", trained.gather(None), wanted)
    return errors


class WaitingTest(unittest.TestCase):
    def test_missing_ranks_are_named_by_a_warning_in_the_errors_words(self) -> None:
        by_rank = run_on_ranks(comes_late, WORLD, 1, True)
        for rank in (0, 2):
            lines, (kind, text) = by_rank[rank]
            self.assertEqual(kind, "RankTimeoutError", text)
            (line,) = [line for line in lines if WORDS in line]
            self.assertIn("rank 1 did not arrive within 1 s", line)
            said = line.split("; waiting until")[0]
            self.assertEqual(said.replace("within 1 s", "within 3 s"), text)

    def test_a_rank_that_comes_after_the_warning_is_welcome(self) -> None:
        by_rank = run_on_ranks(comes_late, WORLD, 2, False)
        for rank, (lines, error) in enumerate(by_rank):
            self.assertEqual(error, ("", ""))
            self.assertEqual(len([line for line in lines if "rank 2 " + WORDS in line]), int(rank != 2), lines)

    def test_nothing_is_said_before_half_a_minute(self) -> None:
        self.assertEqual(long_wait._WARN_AFTER, 30.0)


class PostingTest(unittest.TestCase):
    def test_a_round_that_cannot_be_posted_at_once(self) -> None:
        for times in (1, 2):
            by_rank = run_on_ranks(cannot_post, WORLD, times)
            for rank in range(WORLD):
                errors = [rank_errors[rank] for rank_errors in by_rank]
                check_refused(f"{times} times on rank {rank}", errors, "RankError", f"rank {rank}", "nothing left")
