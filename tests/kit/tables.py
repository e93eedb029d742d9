"""A table of cases that need ranks: the cases of one world size share a world, and each case is reported by itself.

    TRIPS = Table(trip, [(3, "FSDP1 flat"), (3, "FSDP2"), (4, "HSDP")])  # world size, then the arguments of `trip`

    class TripTest(unittest.TestCase):
        @parameterized.expand(TRIPS.cases)
        def test_trip(self, world_size: int, wrapper: str) -> None:
            TRIPS(world_size, wrapper)  # as run_on_ranks(trip, world_size, wrapper): one result per rank, or its error

What DTensor has learnt about an operation is forgotten with its world, and costs much to find out again. The table of a size runs
when the first of its cases is asked for, whatever the order of the tests; where `make test` has few cases of a file, each of them
runs alone.
"""

from __future__ import annotations

import functools
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from fsdp_optim.testing import RanksFailed, run_on_ranks
from kit import quick

Case = tuple[Any, ...]
"""(world size, arguments)"""


class CaseFailed(AssertionError):
    """One or more ranks raised in one case; the message has every rank's traceback."""


@dataclass
class _Outcome:
    """The outcome of one case on one rank."""

    value: Any = None
    text: str = ""


class Table:
    """Call it with a case to have that case's results by rank.

    In a world in which a case has failed no other case is run: the rest get a world of their own. Where a world came to
    an end from which no rank could report, every case of it that is left runs alone. `patience`: seconds that a rank which
    has failed in a case waits for the others to end it. `options` are those of `run_on_ranks`. `later`: cases of slow tests,
    which run in worlds of their own: `@expand(*table.soon_and_later)`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cases: Iterable[Case],
        later: Iterable[Case] = (),
        patience: float = 20.0,
        **options: Any,
    ) -> None:
        self.soon_and_later = (list(cases), list(later))
        self.cases = [*self.soon_and_later[0], *self.soon_and_later[1]]
        self._fn = fn
        self._patience = patience
        self._options = options
        self._each_alone = quick.has_few(Path(sys._getframe(1).f_code.co_filename))  # the file that makes the table
        self._found: dict[int, list[_Outcome] | BaseException] = {}  # by the case's place in `cases`

    def __call__(self, *case: Any) -> list[Any]:
        """The results of this case by rank; raises the case's error."""
        number = self.cases.index(case)
        if number not in self._found:
            group = self.soon_and_later[number >= len(self.soon_and_later[0])]
            beside = [i for i, other in enumerate(self.cases) if other[0] == case[0] and other in group]
            self._run([number] if self._each_alone else [i for i in beside if i not in self._found])
        outcomes = self._found[number]
        if isinstance(outcomes, BaseException):
            raise outcomes
        texts = [outcome.text for outcome in outcomes]
        if any(texts):
            words = [f"rank {rank} of {case[0]}:\n{text}" for rank, text in enumerate(texts) if text]
            fn = self._fn.func if isinstance(self._fn, functools.partial) else self._fn
            name = getattr(fn, "__qualname__", repr(fn))
            raise CaseFailed(f"{name}{case[1:]}:\n" + "\n".join(words))
        return [outcome.value for outcome in outcomes]

    def _run(self, numbers: Sequence[int]) -> None:
        """Run these cases, which have one world size, until each has its outcome."""
        while numbers:
            world_size = self.cases[numbers[0]][0]
            options = {"timeout": 120.0 + 5.0 * len(numbers), **self._options}
            given = [self.cases[number][1:] for number in numbers]
            try:
                by_rank = run_on_ranks(run_cases, world_size, self._fn, given, self._patience, **options)
            except (RanksFailed, TimeoutError) as error:
                self._run_alone(numbers, error)
                return
            done = len(by_rank[0])
            for place, number in enumerate(numbers[:done]):
                self._found[number] = [outcomes[place] for outcomes in by_rank]
            numbers = numbers[done:]

    def _run_alone(self, numbers: Sequence[int], error: BaseException) -> None:
        """Each case in a world of its own. If all of them pass, then all of them have failed: together they do not."""
        for number in numbers:
            try:
                values = run_on_ranks(self._fn, *self.cases[number], **self._options)
                self._found[number] = [_Outcome(value) for value in values]
            except (RanksFailed, TimeoutError) as own:
                self._found[number] = own
        if not any(isinstance(self._found[number], BaseException) for number in numbers):
            self._found.update(dict.fromkeys(numbers, error))


def each(fn: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> None:
    """All cases in one world, on one rank: `run_on_ranks(each, 3, partial(resume, root), cases)`. An error names its case."""
    for args in cases:
        try:
            fn(*args)
        except Exception as error:
            raise CaseFailed(f"{args}: {type(error).__name__}: {error}") from error


def run_cases(fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]], patience: float) -> list[_Outcome]:
    """On one rank: the outcomes of the cases up to the first that fails on any rank, that one included."""
    store = dist.distributed_c10d._get_default_store()
    outcomes = []
    for number, args in enumerate(cases):
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        try:
            outcomes.append(_Outcome(fn(*args)))
        except Exception:
            outcomes.append(_Outcome(text=traceback.format_exc()))
            store.set(f"table/{number}/failed", "")
        if store.add(f"table/{number}/through", 1) == dist.get_world_size():
            store.set(f"table/{number}/all", "")
        if outcomes[-1].text:
            _wait_for_the_others(store, number, outcomes[-1].text, patience)
        else:
            store.wait([f"table/{number}/all"])
        if store.check([f"table/{number}/failed"]):
            break
    return outcomes


def _wait_for_the_others(store: Any, number: int, text: str, patience: float) -> None:
    try:
        store.wait([f"table/{number}/all"], timedelta(seconds=patience))
    except RuntimeError:
        raise CaseFailed(f"case {number}: failed here, and others are not through with it:\n{text}") from None
