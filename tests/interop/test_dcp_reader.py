"""Folders of torch.distributed.checkpoint, written by torch in the layouts of several trainers, load into every wrapper.

What is loaded is compared, bit for bit, with the same wrapper that has trained itself.
"""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoints import Whole, load_trained, two_groups
from kit.dcp import HAVE_TRAIN_STATE, LAYOUTS, TRAIN_STATE
from kit.wrapping import OfModel, Trained, check_same, cpu

from fsdp_optim.testing import run_on_ranks

TWO_GROUPS = {"make": OfModel(two_groups), "model": Whole}

# What writes, its world size, the layout, what loads.
SAVES = [
    ("FSDP2", 2, "nested"),
    ("FSDP2", 2, "flattened"),
    ("FSDP2", 4, "torchtitan"),
    ("FSDP2", 2, "two threads"),
    ("FSDP2", 2, "app"),
    ("FSDP2", 2, "accelerate"),
    ("FSDP2", 2, "lightning parallel"),
    ("FSDP2", 4, "OLMo-core"),
    ("FSDP2", 2, "without ranks"),
    ("HSDP", 4, "nested"),
    ("FSDP2 x TP", 4, "torchtitan"),
    ("FSDP2 x TP", 2, "nested"),
    ("FSDP1 flat", 2, "FSDP1"),
    ("FSDP1 orig", 4, "FSDP1"),
    ("FSDP1 orig", 2, "nested"),
    ("FSDP1 orig", 2, "accelerate"),
    ("FSDP1 flat", 2, "lightning FSDP"),
    ("DDP", 2, "nested"),
    ("DDP", 4, "own calls"),
    ("plain", 1, "own calls"),
]


def save_all(saves: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    with cpu():
        for path, wrapper, layout, kwargs in saves:
            LAYOUTS[layout](Trained(wrapper, **kwargs), Path(path))


def load_all(loads: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    found = []
    for path, wrapper, kwargs in loads:
        try:
            found.append(load_trained(Path(path), wrapper, kwargs, check="bitwise"))
        except Exception as error:
            raise AssertionError(f"{path} into {wrapper}: {error}") from error
    return found


TARGETS = ("FSDP2", "FSDP1 flat", "FSDP1 orig", "fairscale flat", "plain", "fairscale non-flat")


class LayoutsTest(unittest.TestCase):
    root: str

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = folder.name
        for world in (1, 2, 4):
            saves = [(f"{cls.root}/{i}", w, layout, TWO_GROUPS) for i, (w, n, layout) in enumerate(SAVES) if n == world]
            run_on_ranks(save_all, world, saves)

    def test_every_layout_loads(self) -> None:
        """Each at one world size into one wrapper."""
        self.check(lambda number, world: number % 3 == world - 1)

    @pytest.mark.slow
    def test_every_layout_loads_at_the_other_world_sizes(self) -> None:
        self.check(lambda number, world: number % 3 != world - 1)

    def check(self, is_met: Callable[[int, int], bool]) -> None:
        for world in (1, 2, 3):
            numbers = [number for number in range(len(SAVES)) if is_met(number, world)]
            wrappers = [TARGETS[(number // 3 + world) % len(TARGETS)] for number in numbers]
            loads = [(f"{self.root}/{n}", wrapper, TWO_GROUPS) for n, wrapper in zip(numbers, wrappers, strict=True)]
            for found in run_on_ranks(load_all, world, loads):
                for number, one in zip(numbers, found, strict=True):
                    layout = SAVES[number][2]
                    if layout in HAVE_TRAIN_STATE:
                        check_same(layout, dict(sorted(one["extra"]["train_state"].items())), TRAIN_STATE)


if __name__ == "__main__":
    unittest.main()
