"""Ranks that make different calls, stop iterating, come late or die: every rank raises in time."""

from __future__ import annotations

import os
import signal
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from kit.cases import expand
from kit.failing_ranks import PATIENCE, SMALL, SOON, WORLD, Calls, Error, nth_call
from kit.groups import (
    NUM_NET_PARAMS,
    Meeting,
    check_alike,
    error_of,
    names_in,
    plain_net,
)
from kit.options import as_options
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import RanksFailed, WorkerDied, fairscale_on_cpu, run_on_ranks


@fairscale_on_cpu()
def different_calls() -> list[tuple[str, Error]]:
    calls, me, errors = Calls(), dist.get_rank(), []
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
    for label, most, odd_call in cases:
        for odd in range(WORLD):
            errors.append((f"{label}, rank {odd} is the odd one", error_of(odd_call if odd == me else most)))
        after = meeting.tell(error_of(lambda: calls.check("gather")))
        errors.append((f"the group works after {label}", after[me]))
        if any(kind for kind, *_ in after):
            break
    return errors


@fairscale_on_cpu()
def stop_iterating() -> list[tuple[int, int, Error, Error]]:
    """(rank, how many it took, error, error of the next call): each rank leaves the loop early in turn, at several places."""
    calls, me, meeting, results = Calls(), dist.get_rank(), Meeting(), []
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
            results.append((rank, taken, error, after[me]))
            if any(kind for kind, *_ in after):
                return results
    return results


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
        by_rank = run_on_ranks(iterate_and_forget, WORLD, rank=1, patience=2.0)
        for rank, (taken, error) in enumerate(by_rank):
            assert taken[:2] == names_in(plain_net()[0])[:2], (rank, taken)
            if rank != 1:
                check_alike([error], "RankTimeoutError", "rank 1", within=2 + SOON)


class TestTimeouts(unittest.TestCase):
    @expand(soon=[("iter", 2)], later=[("gather", 0), ("scatter", 1)])
    def test_a_rank_that_does_not_come_is_named_and_told_when_it_comes_late(self, verb: str, late: int) -> None:
        errors = run_on_ranks(come_late, WORLD, verb, late, patience=2.0)
        others = [error for rank, error in enumerate(errors) if rank != late]
        check_alike(others, "RankTimeoutError", f"rank {late}", "2 s", within=2 + SOON)
        assert min(seconds for *_, seconds in others) > 1.9, f"gave up too early: {others}"
        check_alike([errors[late]], "RankTimeoutError", f"rank {late}", "late", within=SOON)

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
