"""A short part of each torture, the same every time. `make soak` runs them for longer, with fresh seeds."""

from __future__ import annotations

import importlib
import unittest

from kit.cases import expand
from kit.compare import Differs
from soak.torture import Torture

SEED = 20251121


class ShortTest(unittest.TestCase):
    @expand(
        soon=[("mutations", 150), ("faults", 16), ("rounds", 1)],
        later=[
            ("kills", 4),
            ("races", 1),
        ],  # test_checkpoint_kill.py and test_checkpoint_replaced.py have a few in `make test-all`
    )
    def test_torture(self, name: str, cases: int) -> None:
        torture = Torture(name, SEED, cases=cases, short=True)
        importlib.import_module(f"soak.{name}").run(torture)
        if torture.failures:
            raise Differs("\n".join(torture.failures))
        self.assertGreaterEqual(torture.figures[name], cases)
