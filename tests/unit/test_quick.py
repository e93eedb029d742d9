"""Which tests are quick: of several lines of the list that fit, the longest counts."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from unittest import mock

from kit import quick
from parameterized import parameterized

LIST = """
# a comment
faults
+ faults/test_b::BTest::test_few
faults/test_b::BTest::test_few_03
storage/test_c
verbs/test_d::DTest::test_slow
"""


class QuickTest(unittest.TestCase):
    def setUp(self) -> None:
        file = mock.Mock(read_text=lambda: LIST)
        for patch in (
            mock.patch.object(quick, "LIST", file),
            mock.patch.object(quick, "listed", quick.listed.__wrapped__),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        quick._rules_of.cache_clear()
        self.addCleanup(quick._rules_of.cache_clear)

    @parameterized.expand(
        [
            ("faults/test_a.py", "ATest::test_one", False),
            ("faults/test_b.py", "BTest::test_many", False),
            ("faults/test_b.py", "BTest::test_few_01", True),
            ("faults/test_b.py", "BTest::test_few_03", False),
            ("storage/test_c.py", "test_one", False),
            ("storage/test_cd.py", "test_one", True),
            ("verbs/test_d.py", "DTest::test_slow_00", False),
            ("verbs/test_d.py", "DTest::test_quick", True),
            ("unit/test_new.py", "test_one", True),
        ]
    )
    def test_a_test(self, file: str, name: str, expected: bool) -> None:
        self.assertIs(quick.is_quick(quick.TESTS / file, f"tests/{file}::{name}"), expected)

    @parameterized.expand(
        [
            (".", False),
            ("faults", False),
            ("faults/test_a.py", True),
            ("faults/test_b.py", False),
            ("storage", False),
            ("storage/test_c.py", True),
            ("verbs/test_d.py", False),
            ("unit", False),
        ]
    )
    def test_a_file_or_a_folder(self, name: str, expected: bool) -> None:
        self.assertIs(quick.is_left_out(quick.TESTS / name), expected)

    @parameterized.expand([("faults/test_b.py", True), ("verbs/test_d.py", False), ("unit/test_new.py", False)])
    def test_a_file_of_which_few_stay(self, name: str, expected: bool) -> None:
        with mock.patch.dict("os.environ", {quick.ASKED: "1"}):
            self.assertIs(quick.has_few(quick.TESTS / name), expected)
        with mock.patch.dict("os.environ"):
            os.environ.pop(quick.ASKED, None)
            self.assertFalse(quick.has_few(quick.TESTS / name))

    def test_what_is_elsewhere(self) -> None:
        self.assertFalse(quick.is_left_out(Path("/elsewhere/test_a.py")))
