"""A short part of each torture, the same every time. `make soak` runs them for longer, with fresh seeds."""

from __future__ import annotations

import importlib
import unittest

from kit.wrapping import Differs
from parameterized import parameterized
from soak.torture import Torture

SEED = 20251121


class ShortTest(unittest.TestCase):
    @parameterized.expand([("mutations", 250), ("kills", 4), ("faults", 16), ("races", 1), ("rounds", 1)])
    def test_torture(self, name: str, cases: int) -> None:
        torture = Torture(name, SEED, cases=cases, short=True)
        importlib.import_module(f"soak.{name}").run(torture)
        if torture.failures:
            raise Differs("\n".join(torture.failures))
        self.assertGreaterEqual(torture.figures[name], cases)
