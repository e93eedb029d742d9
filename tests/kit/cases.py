"""Long tables of cases: `make test-all` runs some of them, `make test-long` runs the rest.

class TripTest(unittest.TestCase):
    @expand(*some(list(itertools.product(WRAPPERS, OPTIMIZERS)), every=4))
    def test_trip(self, wrapper: str, optimizer: str) -> None: ...
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from parameterized import parameterized

Case = Any
"""A tuple of arguments, or one argument."""


def some(cases: Iterable[Case], every: int, first: int = 0) -> tuple[list[Case], list[Case]]:
    """Every n-th case, n being `every`, from the `first` on, and the others.

    `every`: a number that shares no factor with the length of an inner axis, so that every value of each axis is met.
    """
    listed = list(cases)
    return listed[first::every], [case for number, case in enumerate(listed) if number % every != first]


def those(cases: Iterable[Case], soon: Callable[..., bool]) -> tuple[list[Case], list[Case]]:
    """The cases whose arguments are wanted soon, and the others."""
    listed = list(cases)
    return [case for case in listed if soon(*case)], [case for case in listed if not soon(*case)]


def expand(soon: Sequence[Case], later: Sequence[Case]) -> Callable[[Callable[..., None]], None]:
    """A test for each case, as `parameterized.expand` makes them; those of `later` are marked `slow`."""

    def decorate(function: Callable[..., None]) -> None:
        body = sys._getframe(1).f_locals  # the class's
        for number, case in enumerate([*soon, *later]):
            args = case if isinstance(case, tuple) else (case,)
            words = [parameterized.to_safe_name(word) for word in args[:1] if isinstance(word, str)]
            name = "_".join([function.__name__, f"{number:02}", *words])
            test = _with(function, args, name)
            body[name] = test if number < len(soon) else pytest.mark.slow(test)

    return decorate


def _with(function: Callable[..., None], args: tuple[Any, ...], name: str) -> Callable[..., None]:
    @functools.wraps(function)
    def test(self: Any) -> None:
        function(self, *args)

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would ask fixtures for its arguments
    test.__name__ = name
    return test


def case_name(function: Callable[..., None], number: str, param: Any) -> str:
    """For parameterized: all arguments in the name of the test, so that -k finds them."""
    return parameterized.to_safe_name("_".join([function.__name__, number, *map(str, param.args)]))


FACTOR = float(os.environ.get("EXAMPLES", "0.5"))


def examples(number: int) -> settings:
    """A decorator that sets the number of random examples of a test, times EXAMPLES."""
    return settings(max_examples=max(int(number * FACTOR), 10), deadline=None, database=None)
