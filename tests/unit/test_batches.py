"""Batches keep the order, contain every item once, and fit the limit, except for a single larger item."""

from __future__ import annotations

import itertools
import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_optim.tensors.memory import in_batches


class BatchesTest(unittest.TestCase):
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 12)), st.integers(1, 20))
    def test_as_much_as_fits(self, sizes: list[int], most: int) -> None:
        items = list(enumerate(sizes))
        batches = list(in_batches(items, lambda item: item[1], most))
        self.assertEqual([item for batch in batches for item in batch], items)
        for batch, following in itertools.pairwise(batches):
            self.assertGreater(sum(size for _, size in batch) + following[0][1], most, "the next one would have fitted")
        for batch in batches:
            self.assertTrue(batch)
            self.assertTrue(len(batch) == 1 or sum(size for _, size in batch) <= most)

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 3)), st.integers(1, 20))
    def test_what_does_not_join_begins_a_batch(self, items: list[int], most: int) -> None:
        batches = list(in_batches(items, lambda item: 1, most, lambda previous, other: previous <= other))
        self.assertEqual([item for batch in batches for item in batch], items)
        for batch in batches:
            self.assertEqual(batch, sorted(batch))
        for batch, following in itertools.pairwise(batches):
            self.assertTrue(len(batch) == most or batch[-1] > following[0])

    def test_nothing_is_taken_ahead_of_a_batch_but_one(self) -> None:
        """Items may be large, so the second batch is made after the first was used."""
        taken: list[int] = []
        items = (taken.append(number) or number for number in range(6))  # type: ignore[func-returns-value]
        first = next(in_batches(items, lambda item: 1, 2))
        self.assertEqual((first, taken), ([0, 1], [0, 1, 2]))


if __name__ == "__main__":
    unittest.main()
