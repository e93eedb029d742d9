"""An exception anywhere in a call on one rank: every rank raises, and nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.failing_ranks import PATIENCE, SOON, WORLD, Calls, Error, nth_call
from kit.groups import (
    Meeting,
    check_alike,
    error_of,
    nested_net,
)
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

# ---------------------------------------------------------------------------------------------- exceptions


class Broken(RuntimeError):
    """The exception that is thrown into the middle of a call."""


def throw() -> None:
    raise Broken("can't allocate memory, or whatever")


PRIMITIVES: dict[str, list[tuple[Any, str]]] = {
    "memory": [(torch, "empty")],
    "copying": [(torch.Tensor, "copy_"), (torch, "_foreach_copy_")],
    "copying scalars": [(torch.Tensor, "to"), (copy, "deepcopy"), (torch, "unbind_copy")],
}


class Trials:
    """The calls that are tried with a failing rank, and the faults of their results. The same on all ranks."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.calls = Calls()
        self.meeting = Meeting()
        self.tried: list[str] = []
        self.wrong: list[str] = []
        self.goes_on = True

    def probe(self, label: str, rank: int, error: Error) -> None:
        """All ranks must have raised what `rank` had thrown into it, soon."""
        self.tried.append(label)
        try:
            check_alike(self.meeting.tell(error), "RankError", f"rank {rank}", "Broken", within=SOON)
        except AssertionError as wrong:
            self.wrong.append(f"{label}: {wrong}")
        if self.wrong or len(self.tried) % 8 == 1:
            self.check_that_it_works()

    def check_that_it_works(self) -> None:
        after = self.meeting.tell(error_of(lambda: self.calls.check(self.verb)))
        if any(kind for kind, *_ in after):
            self.wrong.append(f"{self.tried[-1]}: and afterwards the group does not work: {after}")
        self.goes_on = self.goes_on and len(self.wrong) < 10 and not any(kind for kind, *_ in after)


@fairscale_on_cpu()
def broken_on_each_rank_in_turn(verb: str, what: str) -> tuple[list[str], list[str]]:
    """Every call of a primitive fails once, on every rank, until there are no more such calls. (tried, wrong)."""
    trials = Trials(verb)
    for rank in range(WORLD):
        nth = 0
        while trials.goes_on and nth < 200:
            with nth_call(PRIMITIVES[what] if dist.get_rank() == rank else [], nth, throw) as reached:
                error = error_of(lambda: trials.calls.run(verb))
            if not trials.meeting.tell(reached())[rank]:
                break
            trials.probe(f"{what}, call {nth} on rank {rank}", rank, error)
            nth += 1 if nth < 6 else 7  # the first ones, then some
    if trials.goes_on:
        trials.check_that_it_works()
    return trials.tried, trials.wrong


LIBRARY = str(Path(fsdp_optim.__file__).parent) + os.sep

# What tells the others of a failure cannot itself fail.
NOT_BROKEN = (
    *("errors.py", "machine.py", "wire.py", "boundary/collector.py"),
    *(f"transport/{name}.py" for name in ("agree", "meeting", "turns", "base", "failure", "verdict", "world")),
    *(f"transport/{name}.py" for name in ("store_control", "stored_verdict", "stored_contents", "stored_meeting")),
    *(f"transport/{name}.py" for name in ("tree", "long_wait")),
    *(f"transport/job/{name}.py" for name in ("job_store", "pulse")),
)

# What catches the failure of a step, or of a call, cannot itself fail either, nor what enters torch's modes around a call, nor
# what posts messages, each of whose steps is guarded.
GUARDS = ("collective_call", "ordinary_tensors", "_each_ordinary", "_post")


class Tracer:
    """Sees every call of a function of the library on this rank; throws at one of them.

    It begins when the rank has found out which ranks to meet: before that nobody can be told of anything.
    """

    def __init__(self, at: tuple[str, int, int] | None = None) -> None:
        self.at = at
        self.seen: dict[tuple[str, int], int] = {}
        self._begun = False

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(LIBRARY) or file[len(LIBRARY) :] in NOT_BROKEN:
            return
        if not self._begun or code.co_name.startswith("<") or code.co_name in GUARDS:
            self._begun = self._begun or code.co_name == "agree_on_state"
            return
        key = (f"{file[len(LIBRARY) :]}:{code.co_name}", code.co_firstlineno)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.at == (*key, self.seen[key]):
            raise Broken(f"thrown into call {self.seen[key]} of {key[0]}")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


@fairscale_on_cpu()
def broken_in_functions(verb: str, first: int, every: int) -> tuple[list[str], list[str]]:
    """An exception thrown into the first or the last call of functions that a rank runs, one rank after another.

    `every`, `first`: take every n-th function, from the `first` on.
    """
    trials = Trials(verb)
    recorder = Tracer()
    trials.calls.run(verb)  # what is made once, and kept, is not run again
    with recorder.on():
        trials.calls.run(verb)
    # the first call of one function, the last of the next
    own_sites = [(*key, (1, count)[index % 2]) for index, (key, count) in enumerate(recorder.seen.items())]
    sites = trials.meeting.tell(own_sites)
    for index in range(first, max(map(len, sites)), every):
        rank = index // every % WORLD
        for site in sites[rank][index : index + 1] if trials.goes_on else []:
            with Tracer(site).on() if rank == dist.get_rank() else contextlib.nullcontext():
                error = error_of(lambda: trials.calls.run(verb))
            trials.probe(f"call {site[2]} of {site[0]} on rank {rank}", rank, error)
    if trials.goes_on:
        trials.check_that_it_works()
    return trials.tried, trials.wrong


class Uncopyable:
    """A hyperparameter that can be compared and not copied; every rank has one, but only a recipient copies it."""

    def __init__(self) -> None:
        self.name = "handle"

    def __deepcopy__(self, memo: Any) -> Any:
        raise Broken("this cannot be copied")


@fairscale_on_cpu()
def uncopyable_on_the_recipient() -> Error:
    model, optim, _ = nested_net()
    optim.param_groups[0]["handle"] = Uncopyable()
    return error_of(
        lambda: fsdp_optim.gather_full_optim_state_dict(
            model, optim, 1, options=fsdp_optim.CallOptions(timeout=PATIENCE)
        )
    )


# ---------------------------------------------------------------------------------------------- other calls, and stops


class TestExceptions(unittest.TestCase):
    """An exception on one rank in the middle of a call is raised on all, with its reason, and then all is well again."""

    def test_what_is_not_broken_is_there(self) -> None:
        assert not [name for name in NOT_BROKEN if not Path(LIBRARY, name).is_file()]

    def check(self, by_rank: list[tuple[list[str], list[str]]], at_least: int) -> None:
        tried, wrong = by_rank[0]
        assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong)
        assert len(tried) >= at_least, f"only {len(tried)} failures were tried: {tried}"

    @expand(*some([(verb, what) for verb in ("gather", "iter", "scatter") for what in PRIMITIVES], every=4))
    def test_every_primitive_on_each_rank_in_turn(self, verb: str, what: str) -> None:
        self.check(run_on_ranks(broken_on_each_rank_in_turn, WORLD, verb, what), WORLD)

    @parameterized.expand([("gather", 0), ("iter", 2), ("scatter", 4)])
    def test_every_sixth_function_of_the_library(self, verb: str, first: int) -> None:
        """Another sixth for each verb: most functions are those of all verbs."""
        self.check(run_on_ranks(broken_in_functions, WORLD, verb, first, 6), 6)

    @parameterized.expand([("gather",), ("iter",), ("scatter",)])
    @pytest.mark.slow
    def test_every_function_of_the_library(self, verb: str) -> None:
        self.check(run_on_ranks(broken_in_functions, WORLD, verb, 0, 1), 40)

    def test_what_only_the_recipient_does_at_the_end(self) -> None:
        check_alike(run_on_ranks(uncopyable_on_the_recipient, WORLD), "RankError", "this cannot be copied", "rank")
