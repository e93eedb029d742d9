"""inspect(html=...): the areas of the map are as large as the bytes, fill it, and the page fetches nothing."""

from __future__ import annotations

import itertools
import re

import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.folders import SharedFolder
from torch import nn

import fsdp_optim
from fsdp_optim.offline.pages.inspect_page import Area, nbytes_by_layer, squares

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)


class InspectPageTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        layers = nn.ModuleList([nn.Linear(10, 20 + number) for number in range(3)])
        cls.model = nn.ModuleDict({"layers": layers, "head<&": nn.Linear(5, 5, bias=False)})
        optim = torch.optim.Adam(cls.model.parameters())
        for param in cls.model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        fsdp_optim.save(cls.root / "a", cls.model, optim, step=4, options=QUICK)

    def test_bytes_by_layer(self) -> None:
        summary = fsdp_optim.inspect(self.root / "a")
        by_layer = nbytes_by_layer(summary)
        self.assertEqual(sum(sum(by_kind.values()) for by_kind in by_layer.values()), summary.nbytes)
        for number in range(3):
            nbytes = 4 * 11 * (20 + number)
            wanted = {"weights": nbytes, "exp_avg": nbytes, "exp_avg_sq": nbytes, "step": 8}
            self.assertEqual(by_layer[f"layers.{number}"], wanted)

    def test_the_page(self) -> None:
        file = self.own_folder() / "page.html"
        fsdp_optim.inspect(self.root / "a", html=file)
        text = file.read_text()
        numbers = [tuple(map(float, sizes)) for sizes in re.findall(r"width:([\d.]+)%;height:([\d.]+)%\"", text)]
        self.assertEqual(len(numbers), 4 * 4)
        self.assertAlmostEqual(sum(width * height for width, height in numbers), 100 * 100, delta=1)
        for piece in ("layers.1: exp_avg, 924 B", "head&lt;&amp;", "step 4", "prefers-color-scheme: dark"):
            self.assertIn(piece, text)
        for piece in ("http:", "https:", "<script", "<link", "url(", "@import", "head<"):
            self.assertNotIn(piece, text)

    @given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
    def test_areas_are_as_large_as_their_sizes(self, sizes: list[int]) -> None:
        sizes = sorted(sizes, reverse=True)
        areas = squares(sizes, Area(3, 5, 40, 90))
        self.assertEqual(len(areas), len(sizes))
        for size, area in zip(sizes, areas, strict=True):
            wanted = 40 * 90 * size / sum(sizes) if sum(sizes) else 0
            self.assertAlmostEqual(area.width * area.height, wanted, delta=1e-6)
            self.assertGreaterEqual(min(area.left - 3, area.top - 5), -1e-9)
            self.assertLessEqual(max(area.left + area.width - 43, area.top + area.height - 95), 1e-6)
        for a, b in itertools.combinations(areas, 2):
            common = [
                min(x + size_x, y + size_y) - max(x, y)
                for x, size_x, y, size_y in ((a.left, a.width, b.left, b.width), (a.top, a.height, b.top, b.height))
            ]
            self.assertLessEqual(min(common), 1e-6)
