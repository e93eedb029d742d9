"""Tables of checksums: what ranks wrote, put together and looked up."""

from __future__ import annotations

import itertools
import random
import unittest
from typing import Any

from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.formats.base.checksums import MAGIC, rows_from, rows_of
from fsdp_optim.plugins import join_tables


class TableTest(unittest.TestCase):
    """The segments of all ranks are put together to one table, whatever they wrote in which order."""

    def parts(self, borders: list[int], num: int) -> list[Any]:
        rng = random.Random(0)
        rows = [(start, stop, rng.getrandbits(64)) for start, stop in itertools.pairwise(borders)]
        rng.shuffle(rows)
        return [rows_of(rows[first::num]) for first in range(num)]

    def test_any_cut(self) -> None:
        rng = random.Random(1)
        for num in (1, 2, 3, 17):
            borders = sorted({0, 1 << 63, *(rng.randrange(1 << 63) for _ in range(100))})
            parts = self.parts(borders, num)
            joined = join_tables("file", parts, borders[-1])
            wanted = sorted((int(end), int(digest)) for part in parts for _, end, digest in part)
            joined_rows = list(zip(joined.ends.tolist(), joined.hashes.tolist(), strict=True))
            check_same("rows", joined_rows, wanted)
            check_same(
                "through bytes", [rows_from(part.tobytes()).tolist() for part in parts], [p.tolist() for p in parts]
            )

    def test_nothing(self) -> None:
        check_same("rows", join_tables("file", [], 0).encoded(), MAGIC)
        check_same("rows", join_tables("file", [rows_of(()), rows_of(())], 0).encoded(), MAGIC)

    @parameterized.expand(
        (
            ("the first", [(4, 8)], 8, r"\[0, 4\) were written by no rank"),
            ("one between", [(0, 4), (5, 8)], 8, r"\[4, 5\) were written by no rank"),
            ("the last", [(0, 4)], 8, r"\[4, 8\) were written by no rank"),
            ("all", [], 8, r"\[0, 8\) were written by no rank"),
            ("twice", [(0, 4), (0, 4), (4, 8)], 8, r"\[0, 4\) were written by two ranks"),
            ("a part twice", [(0, 4), (3, 8)], 8, r"\[3, 4\) were written by two ranks"),
            ("beyond the end", [(0, 9)], 8, r"\[8, 9\) were written by two ranks"),
        )
    )
    def test_what_does_not_cover(self, _: str, ranges: list[tuple[int, int]], nbytes: int, words: str) -> None:
        parts = [rows_of([(start, stop, 7)]) for start, stop in reversed(ranges)]
        with self.assertRaisesRegex(CheckpointError, words):
            join_tables("file", parts, nbytes)

    def test_a_window(self) -> None:
        """The segments of any range, one at a time."""
        borders = [0, 3, 4, 9, 10]
        sums = join_tables("file", self.parts(borders, 2), borders[-1])
        hashes = sums.hashes.tolist()
        for start in range(10):
            for stop in range(start + 1, 11):
                touched = [i for i in range(4) if borders[i] < stop and start < borders[i + 1]]
                window = sums.segments_in(start, stop)
                wanted = [borders[touched[0]], *(borders[i + 1] for i in touched)]
                check_same(
                    f"[{start}, {stop})", (window.borders, window.hashes), (wanted, [hashes[i] for i in touched])
                )


if __name__ == "__main__":
    unittest.main()
