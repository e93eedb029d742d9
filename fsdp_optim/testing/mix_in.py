"""The base of the conformance classes. Each conformance class is mixed into a `unittest.TestCase`."""

from __future__ import annotations

import unittest


class MixIn:
    """The parent of mix-ins for a test case. `_case` is the test case, for its assertions."""

    @property
    def _case(self) -> unittest.TestCase:
        if not isinstance(self, unittest.TestCase):
            raise TypeError(f"{type(self).__name__} is a mix-in: inherit from unittest.TestCase too")
        return self
