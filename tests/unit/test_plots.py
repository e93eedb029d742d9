"""The pictures in docs/plots are those of the tables in docs/benchmarks.md, and a figure that changes changes a picture."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from pathlib import Path
from types import ModuleType


def script(path: Path) -> ModuleType:
    """benchmarks/ has scripts, not modules, and an installed package has the same name."""
    spec = importlib.util.spec_from_file_location("plots_of_benchmarks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plots = script(Path(__file__).parents[2] / "benchmarks" / "plots.py")
PAGE = (plots.DOCS / "benchmarks.md").read_text(encoding="utf-8")


class TestPlots(unittest.TestCase):
    def test_the_pictures_are_those_of_the_page(self) -> None:
        pictures = {file.name: file.read_text(encoding="utf-8") for file in (plots.DOCS / "plots").iterdir()}
        self.assertEqual(pictures, plots.pictures(PAGE), "run: python benchmarks/plots.py")

    def test_the_page_shows_each_of_them(self) -> None:
        for plot in plots.PLOTS:
            self.assertEqual(PAGE.count(f"](plots/{plot.file})"), 1, plot.file)

    def test_every_figure_of_the_rows_is_in_the_picture(self) -> None:
        for plot in plots.PLOTS:
            rows = plots.rows_of(plot, PAGE)
            global_state = plots.drawn(plot, rows)
            self.assertGreater(len(rows), 2, plot.file)
            for who, figure in rows:
                self.assertIn(f">{figure} {plot.unit}</text>", global_state)
                changed = plots.drawn(plot, [(label, "123.0" if label == who else other) for label, other in rows])
                self.assertNotEqual(changed, global_state)

    def test_bars_are_proportional(self) -> None:
        global_state = plots.drawn(plots.PLOTS[0], [("fsdp_optim", "1"), ("other", "4")])
        full = plots.WIDTH - plots.LABELS - 90
        self.assertIn(f'width="{full:.1f}"', global_state)
        self.assertIn(f'width="{full / 4:.1f}"', global_state)

    def test_a_row_that_is_gone_is_named(self) -> None:
        with self.assertRaisesRegex(ValueError, "no row 'big, fairscale, 4 ranks' below 'Gather'"):
            plots.pictures(PAGE.replace("big, fairscale, 4 ranks", "big, fairscale, five ranks"))


if __name__ == "__main__":
    unittest.main()
