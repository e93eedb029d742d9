"""What the conformance classes have in common: each is mixed into a `unittest.TestCase`."""

from __future__ import annotations

import unittest


class MixIn:
    """Parent of a mix-in for a test case, which it makes its assertions with."""

    @property
    def _case(self) -> unittest.TestCase:
        if not isinstance(self, unittest.TestCase):
            raise TypeError(f"{type(self).__name__} is a mix-in: inherit from unittest.TestCase too")
        return self
