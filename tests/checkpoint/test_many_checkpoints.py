"""A folder of many checkpoints: a save lists it a few times, and looks into each checkpoint once."""

from __future__ import annotations

import os
import shutil
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kit.catalogs import CatalogTest, save, sequence_of
from kit.checkpoint_format import MANIFEST
from kit.managed import Run, steps_in

NUM = 40


@contextmanager
def counted(root: Path) -> Iterator[Counter[str]]:
    """A context that counts the listings of a folder, and how often each of its checkpoints is opened."""
    counts: Counter[str] = Counter()
    real_open, real_listdir, real_scandir = os.open, os.listdir, os.scandir

    def note(path: Any) -> None:
        if isinstance(path, int):
            return
        if Path(path) == root:
            counts["listings"] += 1

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if not isinstance(path, int) and Path(path).parent == root:
            counts[Path(path).name] += 1
        return real_open(path, *args, **kwargs)

    def listed(path: Any = ".") -> list[str]:
        note(path)
        return real_listdir(path)

    def scanned(path: Any = ".") -> Any:
        note(path)
        return real_scandir(path)

    with (
        mock.patch.object(os, "open", opened),
        mock.patch.object(os, "listdir", listed),
        mock.patch.object(os, "scandir", scanned),
    ):
        yield counts


class ManyTest(CatalogTest):
    def others(self, counts: Counter[str], new: str) -> list[int]:
        return [number for name, number in counts.items() if name != "listings" and new not in name]

    def test_a_save(self) -> None:
        save(self.root / "step-0", step=0)
        for step in range(1, NUM):
            shutil.copytree(self.root / "step-0", self.root / f"step-{step}")
        with counted(self.root) as counts:
            save(self.root / "step-new", step=NUM)
        self.assertEqual(self.others(counts, "step-new"), [1] * NUM)
        self.assertLessEqual(counts["listings"], 16)
        self.assertEqual(sequence_of(self.root / "step-new"), 2)

    def test_a_managers_saves(self) -> None:
        """The first save of a run looks into all, and each later one at what is new."""
        run = Run(self.root, "plain", every=1000)
        with run.manager:
            for step in range(1, 9):
                run.manager.save(step)
                run.manager.wait()
        run = Run(self.root, "plain", every=1000)
        with run.manager:
            run.manager.resume()
            for step, wanted in ((11, [1] * 8), (12, [1]), (13, [1])):
                with counted(self.root) as counts:
                    run.manager.save(step)
                    run.manager.wait()
                self.assertEqual(self.others(counts, f"step-{step:08}"), wanted, step)
                self.assertLessEqual(counts["listings"], 16)
        self.assertEqual(steps_in(self.root)[:3], [13, 12, 11])

    def test_what_has_changed_is_looked_at_again(self) -> None:
        """One that another save has replaced, damaged or removed since the run looked."""
        run = Run(self.root, "plain", every=1000)
        with run.manager:
            for step in (1, 2, 3):
                run.manager.save(step)
                run.manager.wait()
            (self.root / "step-00000002" / MANIFEST).write_bytes(b"{}")
            shutil.rmtree(self.root / "step-00000001")
            run.manager.save(4)
            run.manager.wait()
            run.manager.save(5)
            run.manager.wait()
        self.assertEqual(sequence_of(self.root / "step-00000005"), 5)
        self.assertEqual(steps_in(self.root)[:3], [5, 4, 3])


if __name__ == "__main__":
    unittest.main()
