"""While a call makes many objects, Python's garbage collector looks less often; afterwards it does as before."""

from __future__ import annotations

import gc
import unittest
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_optim.boundary.collector import fewer_collections
from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.errors import StateError


@contextmanager
def thresholds(*numbers: int) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*numbers)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class CollectorTest(unittest.TestCase):
    def test_a_public_call_and_what_follows_it(self) -> None:
        inside = []

        @public
        def call(fails: bool) -> None:
            inside.append(gc.get_threshold()[0])
            if fails:
                raise StateError("no state")

        with thresholds(700, 10, 10):
            call(False)
            self.assertEqual(gc.get_threshold(), (700, 10, 10))
            with self.assertRaises(StateError):
                call(True)
            self.assertEqual(gc.get_threshold(), (700, 10, 10))
        self.assertTrue(all(number > 100_000 for number in inside), inside)

    def test_calls_inside_each_other(self) -> None:
        with thresholds(700, 10, 10):
            with fewer_collections():
                many = gc.get_threshold()
                with fewer_collections():
                    self.assertEqual(gc.get_threshold(), many)
                self.assertEqual(gc.get_threshold(), many)
            self.assertEqual(gc.get_threshold(), (700, 10, 10))

    def test_what_a_user_has_chosen_stays(self) -> None:
        for chosen in ((0, 10, 10), (1_000_000, 5, 5)):  # off, and rarer than ours
            with thresholds(*chosen), fewer_collections():
                self.assertEqual(gc.get_threshold(), chosen)

    def test_cycles_are_still_freed(self) -> None:
        class Cycle:
            num_alive = 0

            def __init__(self) -> None:
                self.itself = self
                Cycle.num_alive += 1

            def __del__(self) -> None:
                Cycle.num_alive -= 1

        with thresholds(700, 10, 10), fewer_collections():
            for _ in range(1_200_000):
                Cycle()
            self.assertLess(Cycle.num_alive, 1_000_000)
