"""README.md, the first page: its lines run as printed, where fairscale is not installed, and its figures were measured."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import unittest
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from kit.checkpoints import InFolder
from kit.folders import at
from kit.forked import WITHOUT_FAIRSCALE, launch

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def run_at(folder: str, file: str) -> int:
    """Run a program on this rank; returns the number of its last step."""
    with at(folder):
        return int(runpy.run_path(file)["step"])


def printed() -> str:
    """The program on the first page."""
    found = re.search(r"^```python[^\n]*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


class LinesTest(InFolder):
    def test_run_as_printed_without_fairscale(self) -> None:
        """On ranks that have what torchrun gives, in a tenth of torchrun's time."""
        (self.root / "train.py").write_text(printed())
        with at(self.root):
            done = launch(2, self.root / "train.py", preload=WITHOUT_FAIRSCALE, hidden=["fairscale"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_run()

    @pytest.mark.slow
    def test_run_as_printed_under_torchrun_without_fairscale(self) -> None:
        (self.root / "train.py").write_text(printed())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(
            [*command, str(ROOT / "tests" / "kit" / "hidden.py"), "fairscale", "train.py"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_run()

    def check_run(self) -> None:
        """The run is as the page says; then train again, on other ranks, and 10 steps more."""
        found = fsdp_optim.checkpoints(self.root / "run")
        self.assertEqual([(one.step, one.world_size) for one in found], [(20, 2), (10, 2)])
        longer = printed().replace("21)", "31)")
        self.assertNotEqual(longer, printed())
        (self.root / "longer.py").write_text(longer)
        self.assertEqual(run_on_ranks(run_at, 3, str(self.root), "longer.py"), [30, 30, 30])
        self.assertEqual(fsdp_optim.checkpoints(self.root / "run")[0].world_size, 3)

    def test_six_lines(self) -> None:
        """The manager takes six lines of a program; all others are there without it."""
        code = [line for line in printed().splitlines() if line.strip()]
        self.assertEqual(len([line for line in code if "manager" in line or "fsdp_optim" in line]), 5)
        self.assertLessEqual(len(code), 16)


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


if __name__ == "__main__":
    unittest.main()
