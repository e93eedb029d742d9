"""A table of cases reports each of them by itself, also where one fails, and where one takes its world with it."""

from __future__ import annotations

import functools
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.tables import CaseFailed, Table

from fsdp_optim.testing import RanksFailed


def rank_and(what: Any) -> tuple[int, int, Any]:
    return dist.get_rank(), dist.get_world_size(), what


def may_fail(how: str) -> tuple[str, float, int]:
    """The case, a random number, and the process."""
    if how == "rank 1" and dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    if how == "rank 1, others wait":
        if dist.get_rank() == 1:
            raise ValueError("broken on purpose, others wait")
        dist.barrier()
    if how == "all":
        raise ValueError("broken everywhere")
    return how, float(torch.rand(())), os.getpid()


def leaves(folder: str, name: str) -> None:
    Path(folder, name).touch()


class TablesTest(unittest.TestCase):
    def test_every_case_has_its_results_by_rank_in_any_order(self) -> None:
        table = Table(rank_and, [(2, "a"), (3, "b"), (2, ["c"])])
        self.assertEqual(table(2, ["c"]), [(0, 2, ["c"]), (1, 2, ["c"])])
        self.assertEqual(table(3, "b"), [(0, 3, "b"), (1, 3, "b"), (2, 3, "b")])
        self.assertEqual(table(2, "a"), [(0, 2, "a"), (1, 2, "a")])
        with pytest.raises(ValueError, match="not in list"):
            table(3, "a")

    def test_where_few_cases_are_wanted_each_runs_alone(self) -> None:
        for is_few, expected in ((False, ["a", "b"]), (True, ["a"])):
            with tempfile.TemporaryDirectory() as folder, mock.patch("kit.quick.has_few", return_value=is_few):
                table = Table(functools.partial(leaves, folder), [(2, "a"), (2, "b"), (3, "c")])
                table(2, "a")
                self.assertEqual(sorted(os.listdir(folder)), expected)

    def test_a_case_that_fails_is_the_only_one_that_fails(self) -> None:
        table = Table(may_fail, [(2, "first"), (2, "rank 1"), (2, "second"), (2, "all"), (2, "third")])
        runs = [table(2, name) for name in ("first", "second", "third")]
        self.assertEqual(
            [[how for how, *_ in by_rank] for by_rank in runs], [[n] * 2 for n in ("first", "second", "third")]
        )
        self.assertEqual(len({number for by_rank in runs for _, number, _ in by_rank}), 1)  # each starts from one seed
        with pytest.raises(CaseFailed, match=r"rank 1 of 2:(?s:.*)broken on purpose") as caught:
            table(2, "rank 1")
        self.assertNotIn("rank 0 of 2", str(caught.value))
        with pytest.raises(CaseFailed, match=r"rank 0 of 2:(?s:.*)rank 1 of 2:(?s:.*)broken everywhere"):
            table(2, "all")

    def test_a_case_that_leaves_the_others_waiting(self) -> None:
        cases = [(2, "first"), (2, "rank 1, others wait"), (2, "second")]
        table = Table(may_fail, cases, patience=0.5, grace=2.0)
        for name in ("second", "first"):
            self.assertEqual([how for how, *_ in table(2, name)], [name] * 2)
        with pytest.raises(RanksFailed, match="broken on purpose, others wait"):
            table(2, "rank 1, others wait")
