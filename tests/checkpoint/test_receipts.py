"""What the library says of itself: one line for each save, load and resume, of the lowest rank, with figures that are right."""

from __future__ import annotations

import re
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import forked
from kit.compare import check_same
from kit.folders import InFolder
from kit.log_texts import lines_said
from kit.managed import Run
from kit.models import Net
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

PATH = [Path(__file__).parents[1]]
IN = r"in \d+(\.\d+)? s \([\d.]+ [kMG]?B/s\)"


def resume_and_save(root: Path, wrapper: str, alike: bool) -> list[str]:
    with lines_said() as lines:
        run = Run(root, wrapper, every=10, alike=alike)
        with run.manager:
            step = run.manager.resume()
            run.steps([step + 1])
            run.manager.save(step + 1)
    told = ("saved ", "resumed ", "loaded ", "rolled ", "the checkpoint has")
    return [line for line in lines if line.startswith(told) or " new: " in line]


def tensors_in(run_of: Path) -> tuple[int, int]:
    """The number and the bytes of the tensors of a checkpoint, as `inspect` lists them, one by one."""
    summary = fsdp_optim.inspect(run_of)
    tensors = [
        value
        for value in [
            *summary.model.values(),
            *summary.trees.values(),
            *(v for values in summary.state.values() for v in values.values()),
        ]
        if isinstance(value, fsdp_optim.TensorInfo)
    ]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


class ReceiptTest(InFolder):
    @parameterized.expand(
        [
            ("FSDP2", 2, "HSDP", 4, "2 -> 4 ranks, FSDP2 -> HSDP"),
            ("DDP", 3, "FSDP1 orig", 2, "3 -> 2 ranks, DDP -> FSDP1"),
            ("FSDP1 flat", 2, "FSDP2", 2, "2 ranks, FSDP1 -> FSDP2"),
            ("FSDP2", 2, "plain", 1, "2 -> 1 rank, FSDP2 -> no wrapper"),
            ("plain", 1, "DDP", 2, "1 -> 2 ranks, DDP"),
        ]
    )
    def test_a_run_that_changes_its_ranks(self, wrapper: str, size: int, then: str, then_size: int, ranks: str) -> None:
        first, *others = run_on_ranks(resume_and_save, size, self.root, wrapper, False)
        self.assertFalse(any(others), others)
        num = f"{size} rank{'s' if size > 1 else ''}"
        self.assertEqual(len(first), 1, first)  # one line for one save
        self.assertRegex(
            first[0],
            rf"^saved \S+/step-00000001: \d+ k?B {IN}, \d+ tensors, {num}; training waited [\d.]+ s",
        )
        resumed, *others = run_on_ranks(resume_and_save, then_size, self.root, then, False)
        self.assertFalse(any(others), others)
        num_tensors, _ = tensors_in(self.root / "step-00000001")
        same = min(size, then_size)
        line = next(line for line in resumed if line.startswith("resumed"))
        self.assertRegex(
            line,
            rf"^resumed {re.escape(str(self.root))}/step-00000001: {re.escape(ranks)}, [\d.]+ k?B {IN}, \d+ tensors verified, "
            rf"random states of {same} rank{'s' if same > 1 else ''}, scheduler, scaler, average, loader restored$",
        )
        number = re.search(r"(\d+) tensors", line)
        assert number is not None
        self.assertEqual(int(number[1]), num_tensors)
        self.assertIn(f", {num_tensors} tensors, ", first[0])
        grown = then_size > size
        self.assertEqual([" new: " in text for text in resumed].count(True), int(grown), resumed)
        self.assertEqual(len(resumed), 2 + grown, resumed)
        if grown:
            self.assertIn("keep" if then_size > size + 1 else "keeps", resumed[0])
            self.assertIn("own state['loader'] and random states", resumed[0])

    def test_values_that_all_ranks_share_make_no_rank_new(self) -> None:
        run_on_ranks(resume_and_save, 2, self.root, "FSDP2", True)
        resumed = run_on_ranks(resume_and_save, 3, self.root, "FSDP2", True)[0]
        new = [line for line in resumed if " new: " in line]
        self.assertEqual(len(new), 1)
        self.assertRegex(new[0], r"rank 2 is new: it keeps its own random states; seed it$")

    def test_bytes_and_tensors(self) -> None:
        """Each element counts once, however many ranks need it."""
        by_rank = run_on_ranks(load_weights, 3, self.root / "a")
        size, num = 4 * (250 * 200 + 200), 2
        self.assertEqual([len(lines) for lines in by_rank], [2, 0, 0])
        saved, loaded = by_rank[0]
        self.assertRegex(saved, rf"^saved \S+: {size / 1000:.0f} kB {IN}, {num} tensors, 3 ranks$")
        self.assertRegex(loaded, rf"^loaded \S+: 3 ranks, DDP, {size / 1000:.0f} kB {IN}, {num} tensors$")

    def test_in_a_process_without_logging(self) -> None:
        """On stderr; and off by the variable, by the level, or left to the application's handler."""
        code = PROGRAM.format(root=str(self.root / "run"), setup="")
        done = forked.run(code, preload=forked.TRAINING, path=PATH)
        self.assertEqual(done.returncode, 0, done.stderr)
        begins = [line.partition(":")[0] for line in done.stderr.splitlines()]
        at = [f"{self.root}/run/step-0000000{step}" for step in (2, 4)]
        told = [f"{self.root}/run has no checkpoint", f"saved {at[0]}", f"saved {at[1]}", f"resumed {at[1]}"]
        self.assertEqual(begins, [*told, f"rolled back to {at[0]}"])
        for number, setup in enumerate(
            (
                "import os; os.environ['FSDP_OPTIM_QUIET'] = '1'",
                "import logging; logging.getLogger('fsdp_optim').setLevel(logging.WARNING)",
                "import logging; logging.basicConfig()",
            )
        ):
            code = PROGRAM.format(root=str(self.root / f"{number}"), setup=setup)
            done = forked.run(code, preload=forked.TRAINING, path=PATH)
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = done.stderr.splitlines()
            self.assertEqual((len(lines), "from scratch" in lines[0]), (1, True), done.stderr)


PROGRAM = """
{setup}
from kit.managed import Run
from kit.models import Net
for last in (5, None):
    run = Run({root!r}, 'plain', every=2)
    with run.manager:
        step = run.manager.resume()
        if last is None:
            run.manager.rollback(2)
        else:
            run.steps(range(step + 1, last))
"""


def load_weights(path: Path) -> list[str]:
    model = WRAPPERS["DDP"](nn.Linear(250, 200))
    with lines_said() as lines:
        fsdp_optim.save(path, model, options=fsdp_optim.SaveOptions(durable=False, checksums=False))
        fsdp_optim.load(path, model)
    check_same("ranks", dist.get_world_size(), 3)
    return lines


def wrappers_of(name: str) -> Any:
    from fsdp_optim.adapters import ModelReader

    return ModelReader(WRAPPERS[name](Net())).wrappers


NAMES = {
    "FSDP2": "FSDP2",
    "HSDP": "HSDP",
    "FSDP2 x TP": "FSDP2 and sharded DTensors",
    "FSDP1 flat": "FSDP1",
    "FSDP1 orig": "FSDP1",
    "fairscale flat": "fairscale FSDP",
    "DDP": "DDP",
    "plain": "",
}


def equal_net() -> Net:
    """A network with the same weights on all ranks."""
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    return net


def loads_of_all_pairs(root: Path) -> dict[tuple[str, str], list[str]]:
    """What this rank says when a model in each wrapper loads what a model in each wrapper saved."""
    said = {}
    group = dist.group.WORLD
    for wrapper in NAMES:
        saving = fsdp_optim.SaveOptions(durable=False, process_group=group)
        fsdp_optim.save(root / wrapper, WRAPPERS[wrapper](equal_net()), options=saving)
    for then in NAMES:
        model = WRAPPERS[then](Net())
        for wrapper in NAMES:
            with lines_said() as lines:
                fsdp_optim.load(root / wrapper, model, options=fsdp_optim.LoadOptions(process_group=group))
            said[wrapper, then] = lines
    return said


class NamesTest(unittest.TestCase):
    def test_all_pairs_of_wrappers(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, *others = run_on_ranks(loads_of_all_pairs, 4, Path(folder))
        self.assertEqual([line for said in others for lines in said.values() for line in lines], [])
        self.assertEqual(len(first), len(NAMES) ** 2)
        for (wrapper, then), lines in first.items():
            before, now = NAMES[wrapper], NAMES[then]
            changed = f", {before} -> {now or 'no wrapper'}" if before not in ("", now) else f", {now}" if now else ""
            with self.subTest(wrapper, then=then):
                self.assertEqual(len(lines), 1, lines)
                self.assertRegex(
                    lines[0], rf"^loaded \S.*: 4 ranks{re.escape(changed)}, [\d.]+ k?B {IN}, \d+ tensors verified$"
                )

    @parameterized.expand(NAMES.items())
    def test_wrappers_have_the_names_that_users_give_them(self, wrapper: str, name: str) -> None:
        self.assertEqual(run_on_ranks(wrappers_of, 4, wrapper), [name] * 4)


if __name__ == "__main__":
    unittest.main()
