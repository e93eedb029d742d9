"""README.md, the first page: its program runs as printed, is killed, and resumes on other ranks; its figures were measured.

The program runs where fairscale is not installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from kit.folders import InFolder, at
from kit.forked import WITHOUT_FAIRSCALE, Started, start_ranks

import fsdp_optim

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def printed() -> str:
    """The program on the first page."""
    block = re.search(r"^```python[^\n]*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


def never_stopped(last: int) -> dict[int, float]:
    """The loss of each step of the program's training, without ranks and without the library."""
    lines = printed().splitlines()
    begin = lines.index("torch.manual_seed(0)  # the same weights on all ranks")
    setup = [line for line in lines[begin : begin + 4] if "fully_shard" not in line]
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(setup), names)
    model, optim = names["model"], names["optim"]
    losses = {}
    for step in range(1, last + 1):
        batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses[step] = loss.item()
    return losses


def losses_in(text: str) -> dict[int, float]:
    """What the program has printed, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", text, re.MULTILINE)}


class ProgramTest(InFolder):
    """The program as printed: killed at one number of ranks, continued on another, and stopped there by a signal."""

    def setUp(self) -> None:
        super().setUp()
        (self.root / "train.py").write_text(printed())

    def wait_for(self, *, step: int, world_size: int, alive: Callable[[], bool]) -> None:
        """Wait until these ranks have saved that step, or a later one."""
        end = time.monotonic() + 240
        while time.monotonic() < end and alive():
            newest = fsdp_optim.checkpoints(self.root / "run")[:1]
            if newest and newest[0].world_size == world_size and (newest[0].step or 0) >= step:
                return
            time.sleep(0.05)
        self.fail(f"{world_size} ranks did not save step {step}")

    def check(self, before: str, after: str, *, killed: int, resumed: int) -> None:
        """Rank 0 printed each step once, the second run began where the newest checkpoint was, and the losses continue."""
        old, new = losses_in(before), losses_in(after)
        self.assertEqual(list(old), list(range(1, len(old) + 1)))
        resumes = re.findall(r"^resumed from step (\d+) on (\d+) ranks \(saved by (\d+)\)$", after, re.MULTILINE)
        self.assertEqual([tuple(map(int, line)) for line in resumes], [(min(new) - 1, resumed, killed)])
        self.assertNotIn("resumed", before)
        self.assertGreaterEqual(min(new) - 1, 20)
        self.assertEqual(list(new), list(range(min(new), max(new) + 1)))
        expected = never_stopped(max(new))
        for step, loss in [*old.items(), *new.items()]:
            self.assertAlmostEqual(loss, expected[step], delta=2e-6, msg=f"step {step}")
        self.assertEqual(fsdp_optim.checkpoints(self.root / "run")[0].step, max(new))  # the signal had this step saved

    def test_killed_and_resumed_on_other_ranks_without_fairscale(self) -> None:
        """On ranks that have what torchrun gives, in a tenth of torchrun's time."""
        with at(self.root):
            ranks = start_ranks(2, self.root / "train.py", preload=WITHOUT_FAIRSCALE, hidden=["fairscale"])
            try:
                self.wait_for(step=20, world_size=2, alive=partial(all_live, ranks))
            finally:
                for rank in filter(is_live, ranks):
                    os.kill(rank.pid, signal.SIGKILL)
            before = [rank.wait() for rank in ranks]
            self.assertEqual([rank.returncode for rank in before], [-signal.SIGKILL] * 2)
            ranks = start_ranks(3, self.root / "train.py", preload=WITHOUT_FAIRSCALE, hidden=["fairscale"])
            try:
                self.wait_for(step=30, world_size=3, alive=partial(all_live, ranks))
            finally:
                for rank in filter(is_live, ranks[1:2]):
                    os.kill(rank.pid, signal.SIGTERM)
            after = [rank.wait() for rank in ranks]
        self.assertEqual([rank.returncode for rank in after], [0] * 3, after[0].stderr)
        self.assertEqual([rank.stdout for rank in (*before[1:], *after[1:])], [""] * 3)
        self.check(before[0].stdout, after[0].stdout, killed=2, resumed=3)

    @pytest.mark.slow
    def test_killed_and_resumed_on_other_ranks_under_torchrun_without_fairscale(self) -> None:
        texts = []
        for world_size, last, number in ((4, 20, signal.SIGKILL), (3, 30, signal.SIGINT)):
            with (self.root / f"out-{world_size}").open("w") as out:
                job = self.torchrun(world_size, out)
            try:
                self.wait_for(step=last, world_size=world_size, alive=lambda job=job: job.poll() is None)
            finally:
                for child in [*children_of(job.pid), job.pid] if number == signal.SIGKILL else [job.pid]:
                    os.kill(child, number)
                job.wait(120)
            texts.append((self.root / f"out-{world_size}").read_text())
        self.check(*texts, killed=4, resumed=3)

    def torchrun(self, world_size: int, out: TextIO) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        return subprocess.Popen(
            [*command, str(ROOT / "tests" / "kit" / "imports.py"), "fairscale", "train.py"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=out,
            text=True,
        )

    def test_few_lines(self) -> None:
        """The manager takes eight lines of a program, with those that say that it resumed; all others are there without it."""
        code = [line for line in printed().splitlines() if line.strip()]
        self.assertLessEqual(len([line for line in code if "manager" in line or "fsdp_optim" in line]), 8)
        self.assertLessEqual(len(code), 31)
        self.assertLessEqual(max(map(len, code)), 100)  # what a screen shows of a block without scrolling


def is_live(rank: Started) -> bool:
    """Whether a process has not ended."""
    return Path(f"/proc/{rank.pid}").exists()


def all_live(ranks: list[Started]) -> bool:
    """Whether no rank has ended."""
    return all(map(is_live, ranks))


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class FiguresTest(unittest.TestCase):
    def test_the_table_has_what_was_measured(self) -> None:
        rows = {}
        for line in (ROOT / "docs" / "benchmarks.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 6 and cells[0].startswith("big, "):
                rows.setdefault((cells[0], cells[1]), cells)

        def ratio(call: str, who: str, digits: str) -> str:
            return f"{Decimal(rows[call, who][4]).quantize(Decimal(digits), ROUND_HALF_UP)}x"

        save, load = "big, save, 4 ranks", "big, load, 2 to 4 ranks"
        saves = [
            "fsdp_optim, FSDP2",
            "DCP, FSDP2",
            "FSDP1 full state dict + torch.save",
            "fairscale gather + torch.save",
        ]
        loads = ["DCP, FSDP2", "FSDP1 torch.load + optim_state_dict_to_load", "fairscale torch.load + get_shard"]
        saved = [ratio(save, who, "0.1" if number < 2 else "1") for number, who in enumerate(saves)]
        loaded = [ratio(load, who, "0.1") for who in ["fsdp_optim, FSDP2", *loads]]
        loaded[1] += f" ({ratio(load, 'DCP, FSDP2, over state that is there', '0.1')} over state)"
        memory = [f"{rows[save, who][5]} MiB" for who in saves]
        for what, cells in (("save at 4 ranks", saved), ("load at another", loaded), ("most extra memory", memory)):
            line = next(line for line in README.splitlines() if line.startswith(f"| {what}"))
            self.assertEqual([cell.strip() for cell in line.strip("|").split("|")][1:], cells)
        told = " ".join(README.split())  # the first screen has the same figures
        over = loaded[1].replace(" (", ", or ").replace(" over state)", " over existing state")
        for own, dcp, words in ((saved[0], saved[1], "plain write"), (loaded[0], over, "plain read")):
            self.assertIn(f"{words} (DCP: {dcp})", told)
            self.assertRegex(told, rf"{own} (the time|that) of a {words}")
        self.assertIn(f"{memory[0]} of extra memory on a rank (DCP: {memory[1]})", told)


if __name__ == "__main__":
    unittest.main()
