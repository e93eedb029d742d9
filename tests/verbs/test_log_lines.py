"""The log lines of calls: each comes from one rank, and gives the seconds and the MB/s."""

from __future__ import annotations

import re
import tempfile
import time
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import Differs
from kit.log_texts import lines_said
from kit.models import Net
from kit.optimizers import adam
from kit.options import as_options
from kit.retention import path_of_step, save_managed
from kit.wraps import in_fsdp2

import fsdp_optim
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.testing import run_on_ranks

Lines = dict[str, list[str]]


def lines_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of a call, and the lines that it logs on this rank."""
    with lines_said() as lines:
        return call(), lines


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model = in_fsdp2(Net())
    optim = adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


def slowly(write: Callable[..., None]) -> Callable[..., None]:
    def slow(self: RankWriter, extents: Any) -> None:
        time.sleep(0.5)
        write(self, extents)

    return slow


def calls(folder: str) -> Lines:
    """The lines of this rank by call."""
    model, optim = trained()
    quiet: dict[str, Any] = {"durable": False, "progress": False}
    by_call: Lines = {}
    full, by_call["gather"] = lines_of(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=1))
    everywhere = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None)
    _, by_call["shard"] = lines_of(lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, everywhere))
    _, by_call["scatter"] = lines_of(
        lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full, source_rank=1)
    )
    _, by_call["save"] = lines_of(
        lambda: fsdp_optim.save(f"{folder}/1", model, optim, **as_options(fsdp_optim.SaveOptions, **quiet))
    )

    def in_background() -> None:
        with mock.patch.object(RankWriter, "write", slowly(RankWriter.write)):
            save_managed(f"{folder}/run", 2, model, optim, keep_last=1)

    save_managed(f"{folder}/run", 1, model, optim, keep_last=1)
    _, by_call["async_save"] = lines_of(in_background)
    optim.param_groups[0]["lr"] = 0.5
    _, by_call["load"] = lines_of(
        lambda: fsdp_optim.load(
            path_of_step(f"{folder}/run", 2), model, optim, options=fsdp_optim.LoadOptions(progress=False)
        )
    )
    dist.barrier()
    return by_call


MOVED = r"[\d.]+ \w?B in [\d.]+ s \([\d.]+ \w?B/s\)"
SPEED = r", in \d+\.\d\d s, \d+ MB/s; "


class LogTest(unittest.TestCase):
    by_rank: list[Lines]

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cls.by_rank = run_on_ranks(calls, 2, folder)

    def check(self, call: str, rank: int, *patterns: str) -> None:
        """Exactly these lines, on this rank; none on the other one."""
        lines = self.by_rank[rank][call]
        self.assertEqual(len(lines), len(patterns), lines)
        for pattern in patterns:
            if not any(re.search(pattern, line) for line in lines):
                raise Differs(f"{call}: no line has {pattern!r}: {lines}")
        self.assertEqual(self.by_rank[1 - rank][call], [])

    def test_a_gather_is_logged_by_the_recipient(self) -> None:
        nbytes = 8 * sum(param.numel() for param in Net().parameters())
        self.check("gather", 1, rf"^gathered the optimizer state of .*tensors, {nbytes} bytes on rank 1{SPEED}")

    def test_others_are_logged_by_the_lowest_rank(self) -> None:
        self.check("shard", 0, rf"^cut the optimizer state of .* bytes on rank 0{SPEED}without state: none")
        self.check("scatter", 0, rf"^delivered the optimizer state of .* bytes on rank 0{SPEED}without state: none")
        self.check("save", 0, rf"^saved .*1: {MOVED}, \d+ tensors, 2 ranks$")

    def test_a_wait_and_a_deletion(self) -> None:
        self.check(
            "async_save",
            0,
            r"^waited \d+\.\d\d s for the save of .*2$",
            r"^removed .*1: ",
            rf"^saved .*2: {MOVED}, .*; training waited ",
        )

    def test_changed_hyperparameters(self) -> None:
        changed = r"^hyperparameters that this load changed \(old -> new\): .*lr.*0\.5 -> 0\.01"
        self.check("load", 0, changed, rf"^loaded .*2: 2 ranks, FSDP2, {MOVED}, ")


if __name__ == "__main__":
    unittest.main()
