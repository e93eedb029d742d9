"""Whose the ids of an optimizer's dict are, by sizes alone, compared with trying every way."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_optim.foreign.per_rank.id_order import live_of_ids


def every_way(groups: Sequence[Sequence[int]], sizes: Sequence[int], known: Mapping[int, int]) -> list[dict[int, int]]:
    """Every way to give the places of `sizes` to ids: those of a group ascend, no place is given twice, and known sizes fit."""
    ids = [key for group in groups for key in group]
    ways = []
    for places in itertools.permutations(range(len(sizes)), len(ids)):
        way = dict(zip(ids, places, strict=True))
        ascends = all(way[a] < way[b] for group in groups for a, b in itertools.pairwise(group))
        if ascends and all(known.get(key, sizes[place]) == sizes[place] for key, place in way.items()):
            ways.append(way)
    return ways


class IdOrderTest(unittest.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_an_answer_is_the_only_one(self, data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        num = data.draw(st.integers(1, len(sizes)))
        owner = data.draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
        groups = [[key for key in range(num) if owner[key] == group] for group in sorted(set(owner))]
        known = {key: size for key in range(num) if (size := data.draw(st.integers(0, 3)))}

        def fits(key: Any, place: int) -> bool:
            return known.get(key, sizes[place]) == sizes[place]

        ways = every_way(groups, sizes, known)
        answer = live_of_ids(groups, len(sizes), fits)
        self.assertEqual(answer, ways[0] if len(ways) == 1 else None)

    def test_all_parameters_in_one_group_are_in_the_models_order(self) -> None:
        self.assertEqual(live_of_ids([[0, 1, 2]], 3, lambda key, place: True), {0: 0, 1: 1, 2: 2})
        self.assertIsNone(live_of_ids([[0, 1, 2]], 3, lambda key, place: key != 1))

    def test_many_equal_parameters_end_quickly(self) -> None:
        groups = [list(range(first, first + 300)) for first in range(0, 1200, 300)]
        self.assertIsNone(live_of_ids(groups, 1300, lambda key, place: True))


if __name__ == "__main__":
    unittest.main()
