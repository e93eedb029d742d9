"""A rank that fails, stops, comes late, dies or does something else: every rank raises, soon, and none hangs.

Every run goes through many failures one after the other, because a group must work again after each.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_same
from kit.groups import (
    NUM_NET_PARAMS,
    Meeting,
    Net,
    Sharded,
    adam,
    check_alike,
    check_gathered,
    error_of,
    frozen_copy,
    names_in,
    nested_net,
    plain_net,
)
from kit.options import as_options
from kit.trained import state_by_name
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import RanksFailed, WorkerDied, fairscale_on_cpu, run_on_ranks
from fsdp_optim.transport.world import world_here

Error = tuple[str, str, float]
WORLD = 3
PATIENCE = 15.0  # seconds; a rank that waits for it has hung
SOON = 7.0  # seconds; on a machine that does much else
SMALL = 128  # bytes in a bucket, so that there are many


# ---------------------------------------------------------------------------------------------- the calls


class Calls:
    """A trained model, and a fresh one, and what is to come of each call."""

    def __init__(self) -> None:
        self.model, self.optim, _ = nested_net()
        self.fresh, self.fresh_optim, _ = nested_net(0)
        self.plain = plain_net()
        self.full = fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, None)
        self.recipient = 1

    def run(self, verb: str, model: Any = None, optim: Any = None, timeout: float = PATIENCE) -> Any:
        """One call with a model and an optimizer that may be broken ones, which plans anew; the iterator is exhausted."""
        world_here().plans.clear()
        model = self.model if model is None else model
        if verb == "gather":
            optim = optim or self.optim
            return fsdp_optim.gather_full_optim_state_dict(
                model, optim, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
            )
        if verb == "iter":
            optim = optim or self.optim
            return dict(
                fsdp_optim.iter_full_optim_state(
                    model, optim, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
                )
            )
        mine = self.full if dist.get_rank() == self.recipient else None
        optim = optim or self.optim
        return fsdp_optim.scatter_full_optim_state_dict(
            model, optim, mine, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
        )

    def check(self, verb: str) -> None:
        """The group still works."""
        found = self.run(verb)
        if verb == "gather":
            check_gathered(found, self.recipient, *self.plain)
        elif verb == "iter":
            state = state_by_name(*self.plain)
            check_same(
                "iterated", found, state if dist.get_rank() == self.recipient else dict.fromkeys(state), in_order=False
            )
        else:
            check_same("scattered", found, frozen_copy(self.optim), in_order=False)


class OtherDict:
    """An optimizer whose state_dict() is another one."""

    def __init__(self, optim: Any, edit: Callable[[Any], Any]) -> None:
        self._optim, self._edit = optim, edit

    @property
    def param_groups(self) -> Any:
        return self._optim.param_groups

    def state_dict(self) -> Any:
        saved = copy.deepcopy(self._optim.state_dict())
        self._edit(saved)
        return saved


# ---------------------------------------------------------------------------------------------- what can be wrong


def no_state(saved: Any) -> None:
    saved["state"].clear()


def one_without_state(saved: Any) -> None:
    del saved["state"][1]


def other_dtype(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].double()


def other_step(saved: Any) -> None:
    saved["state"][1]["step"] += 1


def step_is_a_number(saved: Any) -> None:
    saved["state"][1]["step"] = 3


def cut_short(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"][:-1].clone()


def half_of_the_values(saved: Any) -> None:
    del saved["state"][2]["exp_avg_sq"]


def other_lr(saved: Any) -> None:
    saved["param_groups"][0]["lr"] = 0.5


def unreadable(saved: Any) -> None:
    raise OSError("the disk of this rank is on fire")


def not_a_state_dict(saved: Any) -> None:
    del saved["param_groups"]


WRONG_STATES: list[tuple[Callable[[Any], None], str, list[str]]] = [
    (no_state, "StateError", ["first.weight", "no state"]),
    (one_without_state, "StateError", ["middle.0.weight", "no state"]),
    (other_dtype, "StateError", ["first.weight", "exp_avg", "float32", "float64"]),
    (other_step, "StateError", ["middle.0.weight", "step", "3", "4"]),
    (step_is_a_number, "StateError", ["middle.0.weight", "step"]),
    (cut_short, "StateError", ["exp_avg"]),
    (half_of_the_values, "StateError", ["middle.2.weight", "exp_avg_sq"]),
    (other_lr, "StateError", ["lr", "0.01", "0.5"]),
    (unreadable, "RankError", ["the disk of this rank is on fire"]),
    (not_a_state_dict, "WrapperError", ["param_groups"]),
]
WRONG_FOR_SCATTER = [case for case in WRONG_STATES if case[0] in (unreadable, not_a_state_dict)]


def flat_net() -> tuple[Any, Any]:
    """`Net` in one unit: another nesting."""
    net = Net()
    model = Sharded(net).wrap(net)
    return model, adam(model.parameters())


def other_model() -> tuple[Any, Any]:
    model = FSDP(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    return model, adam(model.parameters())


@fairscale_on_cpu()
def wrong_on_each_rank_in_turn(verb: str) -> list[tuple[str, list[str], Error]]:
    """(expected class, expected words, error) of every case and rank."""
    calls, me, found = Calls(), dist.get_rank(), []
    for edit, kind, words in WRONG_FOR_SCATTER if verb == "scatter" else WRONG_STATES:
        for rank in range(WORLD):
            optim = OtherDict(calls.optim, edit) if rank == me else None
            found.append((kind, [*words, f"rank {rank}"], error_of(lambda: calls.run(verb, optim=optim))))  # noqa: B023
        calls.check(verb)
    for build in (flat_net, other_model):
        model, optim = build()
        _, strange, _ = nested_net()
        for rank in range(WORLD):
            wrong = (model, optim) if rank == me else (None, None)
            found.append(("StateError", [f"rank {rank}"], error_of(lambda: calls.run(verb, *wrong))))  # noqa: B023
        calls.check(verb)
    for rank in range(WORLD):  # the optimizer of another model
        wrong_optim = strange if rank == me else None
        found.append(("WrapperError", [f"rank {rank}"], error_of(lambda: calls.run(verb, optim=wrong_optim))))  # noqa: B023
    calls.check(verb)
    if verb == "scatter":
        full = calls.full
        for edit, kind, words in (
            (no_group, "StateError", ["param_groups"]),
            (cut_short_full, "StateError", ["last.weight", "exp_avg"]),
            (lambda full: None, "StateError", ["None"]),
        ):
            edited = copy.deepcopy(full)
            calls.full = edited if edit(edited) else None
            found.append((kind, words, error_of(lambda: calls.run(verb))))
            calls.full = full
            calls.check(verb)
    return found


def no_group(full: Any) -> bool:
    del full["param_groups"]
    return True


def cut_short_full(full: Any) -> bool:
    full["state"][5]["exp_avg"] = full["state"][5]["exp_avg"][:1]
    return True


# ---------------------------------------------------------------------------------------------- exceptions


class Broken(RuntimeError):
    """The exception that is thrown into the middle of a call."""


class NthCall:
    """Stands for a function, whose `nth` call (from 0) does something else; counts them."""

    def __init__(self, function: Any, nth: int, instead: Callable[[], Any]) -> None:
        self._function, self._nth, self._instead = function, nth, instead
        self.count = 0

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self._nth + 1:
            self._instead()
        return self._function(*args, **kwargs)

    @property
    def reached(self) -> bool:
        return self.count > self._nth


def throw() -> None:
    raise Broken("can't allocate memory, or whatever")


PRIMITIVES: dict[str, list[tuple[Any, str]]] = {
    "memory": [(torch, "empty")],
    "copying": [(torch.Tensor, "copy_"), (torch, "_foreach_copy_")],
    "copying scalars": [(torch.Tensor, "to"), (copy, "deepcopy")],
}


@contextlib.contextmanager
def nth_call(targets: Sequence[tuple[Any, str]], nth: int, instead: Callable[[], Any]) -> Iterator[Any]:
    """The nth call of each of some functions does something else. Gives what says whether it was reached."""
    with contextlib.ExitStack() as stack:
        stand_ins = [NthCall(getattr(owner, name), nth, instead) for owner, name in targets]
        for (owner, name), stand_in in zip(targets, stand_ins, strict=True):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield lambda: any(stand_in.reached for stand_in in stand_ins)


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
    "errors.py",
    "machine.py",
    *(
        f"transport/{name}.py"
        for name in (
            "agree",
            "meeting",
            "turns",
            "reports",
            "base",
            "failure",
            "verdict",
            "world",
            "store_control",
            "rendezvous",
            "job_store",
            "pulse",
            "attempt",
            "stored_verdict",
        )
    ),
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
    with recorder.on():
        trials.calls.run(verb)
    # the first call of one function, the last of the next
    mine = [(*key, (1, count)[index % 2]) for index, (key, count) in enumerate(recorder.seen.items())]
    sites = trials.meeting.tell(mine)
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


@fairscale_on_cpu()
def different_calls() -> list[tuple[str, Error]]:
    calls, me, found = Calls(), dist.get_rank(), []
    model, optim, full = calls.model, calls.optim, calls.full

    def gather(**kwargs: Any) -> Any:
        door: Any = fsdp_optim.fairscale if "collect" in kwargs else fsdp_optim
        return door.gather_full_optim_state_dict(
            model, optim, **as_options(fsdp_optim.CallOptions, **kwargs, timeout=PATIENCE)
        )

    def scatter(**kwargs: Any) -> Any:
        return fsdp_optim.scatter_full_optim_state_dict(
            model, optim, full, **as_options(fsdp_optim.CallOptions, **kwargs, timeout=PATIENCE)
        )

    def iterate(**kwargs: Any) -> Any:
        return list(
            fsdp_optim.iter_full_optim_state(
                model, optim, **as_options(fsdp_optim.CallOptions, **kwargs, timeout=PATIENCE)
            )
        )

    cases: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("gather and scatter", gather, scatter),
        ("gather and iter", gather, iterate),
        ("iter and scatter", iterate, scatter),
        ("gather to 0 and to 1", gather, lambda: gather(recipient_rank=1)),
        ("gather to 0 and to all", gather, lambda: gather(recipient_rank=None)),
        ("iter to 0 and to 2", iterate, lambda: iterate(recipient_rank=2)),
        ("scatter from 0 and from 2", scatter, lambda: scatter(source_rank=2)),
        ("gather of the wrapper's choice and of all", gather, lambda: gather(collect="all")),
        ("gather in buckets of two sizes", lambda: gather(bucket_nbytes=64), lambda: gather(bucket_nbytes=96)),
        ("scatter in buckets of two sizes", lambda: scatter(bucket_nbytes=64), lambda: scatter(bucket_nbytes=96)),
        ("iter in buckets of two sizes", lambda: iterate(bucket_nbytes=64), lambda: iterate(bucket_nbytes=999)),
    ]
    meeting = Meeting()
    for label, most, one in cases:
        for odd in range(WORLD):
            found.append((f"{label}, rank {odd} is the odd one", error_of(one if odd == me else most)))
        after = meeting.tell(error_of(lambda: calls.check("gather")))
        found.append((f"the group works after {label}", after[me]))
        if any(kind for kind, *_ in after):
            break
    return found


@fairscale_on_cpu()
def stop_iterating() -> list[tuple[int, int, Error, Error]]:
    """(rank, how many it took, error, error of the next call): each rank leaves the loop early in turn, at several places."""
    calls, me, meeting, found = Calls(), dist.get_rank(), Meeting(), []
    for rank in range(WORLD):
        for taken in (1, 3, NUM_NET_PARAMS - 2, NUM_NET_PARAMS - 1):

            def loop() -> None:
                iterator = fsdp_optim.iter_full_optim_state(
                    calls.model, calls.optim, options=fsdp_optim.CallOptions(timeout=PATIENCE, bucket_nbytes=SMALL)
                )
                for index, _ in enumerate(iterator, start=1):
                    if me == rank and index == taken:  # noqa: B023
                        break

            error = error_of(loop)
            after = meeting.tell(error_of(lambda: calls.check("iter")))
            found.append((rank, taken, error, after[me]))
            if any(kind for kind, *_ in after):
                return found
    return found


@fairscale_on_cpu()
def stop_without_harm() -> None:
    """Stops that nobody must hear of: all ranks together, after the last parameter, before the first."""
    calls, me = Calls(), dist.get_rank()

    def loop(stop_after: int, bucket_nbytes: int) -> None:
        iterator = fsdp_optim.iter_full_optim_state(
            calls.model, calls.optim, options=fsdp_optim.CallOptions(timeout=PATIENCE, bucket_nbytes=bucket_nbytes)
        )
        for index, _ in enumerate(iterator, start=1):
            if index == stop_after:
                break

    for bucket_nbytes in (SMALL, 1 << 20):
        for taken in (1, 4, NUM_NET_PARAMS):
            start = time.monotonic()
            loop(taken, bucket_nbytes)
            calls.check("iter")
            if time.monotonic() - start > SOON:
                raise AssertionError(f"all stopped after {taken}, and waited for {time.monotonic() - start:.1f} s")
        loop(NUM_NET_PARAMS if me == 1 else -1, bucket_nbytes)  # one rank does not ask whether there are more
        calls.check("iter")
        calls.check("gather")
    fsdp_optim.iter_full_optim_state(
        calls.model, calls.optim, options=fsdp_optim.CallOptions(timeout=PATIENCE)
    )  # never begun
    calls.check("scatter")


@fairscale_on_cpu()
def iterate_and_forget(rank: int, patience: float) -> tuple[list[str], Error]:
    """One rank takes two parameters and then does something else, with the iterator still alive."""
    calls, taken = Calls(), []
    iterator = fsdp_optim.iter_full_optim_state(
        calls.model, calls.optim, options=fsdp_optim.CallOptions(timeout=patience, bucket_nbytes=SMALL)
    )
    if dist.get_rank() == rank:
        taken = [next(iterator)[0], next(iterator)[0]]
        time.sleep(2 * patience)
        return taken, ("", "", 0.0)
    error = error_of(lambda: [taken.append(name) for name, _ in iterator])
    return taken, error


@fairscale_on_cpu()
def come_late(verb: str, late: int, patience: float) -> Error:
    """One rank does not come before the others have given up, then it comes."""
    calls, me = Calls(), dist.get_rank()
    dist.barrier()
    if me == late:
        time.sleep(patience + 1.5)
    return error_of(lambda: calls.run(verb, timeout=patience))


@fairscale_on_cpu()
def die(verb: str, rank: int, nth: int) -> None:
    """One rank's process is gone in the middle of the data's way; the others raise what they were told."""
    calls = Calls()
    dist.barrier()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with nth_call([(dist, "batch_isend_irecv")] if dist.get_rank() == rank else [], nth, kill):
        start = time.monotonic()
        try:
            calls.run(verb)
        except Exception as error:
            error.args = (f"{error} [after {time.monotonic() - start:.1f} s]",)
            raise


class TestWrongOnOneRank(unittest.TestCase):
    """One rank has another value than the others: an error with both, on all ranks, and the next call succeeds."""

    @parameterized.expand([("gather",), ("iter",), ("scatter",)])
    def test_each_rank_in_turn(self, verb: str) -> None:
        for cases in zip(*run_on_ranks(wrong_on_each_rank_in_turn, WORLD, verb), strict=True):
            kind, words, _ = cases[0]
            with self.subTest(kind=kind, words=words):
                check_alike([error for _, _, error in cases], kind, *words, within=SOON)


class TestExceptions(unittest.TestCase):
    """An exception on one rank in the middle of a call is raised on all, with its reason, and then all is well again."""

    def check(self, found: list[tuple[list[str], list[str]]], at_least: int) -> None:
        tried, wrong = found[0]
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


class TestOtherCalls(unittest.TestCase):
    def test_ranks_that_make_different_calls(self) -> None:
        for cases in zip(*run_on_ranks(different_calls, WORLD), strict=True):
            label = cases[0][0]
            with self.subTest(label):
                errors = [error for _, error in cases]
                if label.startswith("the group works"):
                    assert {kind for kind, *_ in errors} == {""}, errors
                else:
                    check_alike(errors, "RankError", "rank", within=SOON)

    def test_a_rank_that_stops_iterating(self) -> None:
        for cases in zip(*run_on_ranks(stop_iterating, WORLD), strict=True):
            rank, taken, *_ = cases[0]
            errors = [error for _, _, error, _ in cases]
            with self.subTest(rank=rank, taken=taken):
                assert errors[rank][0] == "", errors[rank]
                others = [error for r, error in enumerate(errors) if r != rank]
                if taken < NUM_NET_PARAMS - 1 or others[0][0]:  # with the last data on all ranks it may go unnoticed
                    check_alike(others, "RankError", f"rank {rank}", "iterat", within=SOON)
                assert {kind for *_, (kind, _, _) in cases} == {""}, [after for *_, after in cases]

    def test_stops_that_do_no_harm(self) -> None:
        run_on_ranks(stop_without_harm, WORLD)

    def test_a_rank_that_forgets_its_iterator(self) -> None:
        found = run_on_ranks(iterate_and_forget, WORLD, rank=1, patience=2.0)
        for rank, (taken, error) in enumerate(found):
            assert taken[:2] == names_in(plain_net()[0])[:2], (rank, taken)
            if rank != 1:
                check_alike([error], "RankTimeoutError", "rank 1", within=2 + SOON)


class TestTimeouts(unittest.TestCase):
    @expand(soon=[("iter", 2)], later=[("gather", 0), ("scatter", 1)])
    def test_a_rank_that_does_not_come_is_named_and_told_when_it_comes_late(self, verb: str, late: int) -> None:
        found = run_on_ranks(come_late, WORLD, verb, late, patience=2.0)
        others = [error for rank, error in enumerate(found) if rank != late]
        check_alike(others, "RankTimeoutError", f"rank {late}", "2 s", within=2 + SOON)
        assert min(seconds for *_, seconds in others) > 1.9, f"gave up too early: {others}"
        check_alike([found[late]], "RankTimeoutError", f"rank {late}", "late", within=SOON)

    @parameterized.expand([("gather", 0, 2), ("gather", 1, 2), ("scatter", 1, 3), ("scatter", 1, 7)])
    def test_a_rank_that_dies_while_data_moves(self, verb: str, rank: int, nth: int) -> None:
        """Rank 1 is the recipient, or the source."""
        with self.assertRaises(RanksFailed) as caught:
            run_on_ranks(die, WORLD, verb, rank, nth, grace=2 * PATIENCE)
        errors = caught.exception.errors
        assert isinstance(errors.pop(rank), WorkerDied)
        assert len(errors) == WORLD - 1, f"some ranks did not hear of it: {errors}"
        for other, error in errors.items():
            kind = type(error).__name__
            assert kind in ("RankError", "RankTimeoutError"), f"rank {other}: {kind}: {error}"
            assert f"rank {rank}" in str(error), f"rank {other}: {error}"
