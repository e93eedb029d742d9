"""fsdp_optim.testing: run_on_ranks gives what ranks return, raises what they raise, and leaves no process behind."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import unittest
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from kit.testing_ranks import rank_and_size
from parameterized import parameterized
from torch import Tensor

from fsdp_optim import RankTimeoutError
from fsdp_optim.testing import (
    RankPool,
    RanksFailed,
    RemoteError,
    WorkerDied,
    run_on_ranks,
)


def sum_of_ranks(offset: int, *, scale: float) -> Tensor:
    total = torch.tensor(float(dist.get_rank() + offset)) * scale
    dist.all_reduce(total)
    return total


def random_numbers() -> tuple[float, float]:
    return float(torch.rand(())), float(numpy.random.rand())


def cached_group_size() -> int:
    from fairscale.internal.parallel import get_process_group_cached

    return get_process_group_cached().size()  # type: ignore[no-any-return]


def tensors_and_pid() -> tuple[dict[str, Tensor], int]:
    return {"rank": torch.full((1000, 100), float(dist.get_rank())), "half": torch.ones(3).half()}, os.getpid()


class Unreadable(Exception):
    """Can be pickled, but not read: its arguments are not those of its parent."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unwritable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def fail(ranks: list[int], how: str) -> str:
    """Fail on `ranks` as told; the others wait for everybody in a barrier, unless all is well."""
    if dist.get_rank() in ranks:
        if how == "value":
            raise ValueError(f"no such value on rank {dist.get_rank()}")
        if how == "unreadable":
            raise Unreadable(1, 2)
        if how == "unwritable":
            raise Unwritable("secret")
        if how == "leave a child" and os.fork() == 0:
            time.sleep(10)
        if how in ("exit", "leave a child"):
            os._exit(3)
        if how == "sys.exit":
            sys.exit("enough")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleep":
            time.sleep(1000)
        if how == "lambda":
            return lambda: None  # type: ignore[return-value]
    return "well"


def fail_while_others_wait(ranks: list[int], how: str) -> None:
    fail(ranks, how)
    dist.barrier()


def fail_while_others_sleep(ranks: list[int], how: str) -> None:
    fail(ranks, how)
    time.sleep(1000)


def write_to_path(name: str) -> tuple[str, bool]:
    return os.getcwd(), name in sys.path


class TestRunOnRanks(unittest.TestCase):
    def test_worlds_of_different_sizes_in_sequence(self) -> None:
        for world_size in (2, 4, 1, 3, 2):
            results = run_on_ranks(rank_and_size, world_size)
            self.assertEqual([result[:2] for result in results], [(rank, world_size) for rank in range(world_size)])

    def test_arguments_and_collectives(self) -> None:
        self.assertEqual([float(x) for x in run_on_ranks(sum_of_ranks, 3, 10, scale=2.0)], [66.0] * 3)
        self.assertEqual([float(x) for x in run_on_ranks(functools.partial(sum_of_ranks, scale=1.0), 2, 0)], [1.0] * 2)

    def test_workers_live_on(self) -> None:
        first = [pid for *_, pid in run_on_ranks(rank_and_size, 3)]
        second = [pid for *_, pid in run_on_ranks(rank_and_size, 2)]
        self.assertEqual(second, first[:2])
        self.assertNotIn(os.getpid(), first)

    def test_fairscale_sees_the_new_world(self) -> None:
        for world_size in (2, 3, 2):
            self.assertEqual(run_on_ranks(cached_group_size, world_size), [world_size] * world_size)

    def test_same_seed_on_every_rank_in_every_call(self) -> None:
        results = run_on_ranks(random_numbers, 2) + run_on_ranks(random_numbers, 2)
        self.assertEqual(len(set(results)), 1)

    def test_tensors_come_by_value(self) -> None:
        with RankPool() as pool:
            results = pool.run(tensors_and_pid, 2)
        for rank, (tensors, _) in enumerate(results):  # the workers are gone by now
            self.assertEqual(tensors["rank"].unique().tolist(), [float(rank)])
            self.assertFalse(tensors["rank"].is_shared())
            self.assertEqual(tensors["half"].dtype, torch.float16)

    def test_path_and_directory_are_the_callers(self) -> None:
        before, path = os.getcwd(), "/no/such/folder"
        try:
            os.chdir("/")
            sys.path.append(path)
            self.assertEqual(run_on_ranks(write_to_path, 1, path), [("/", True)])
        finally:
            os.chdir(before)
            sys.path.remove(path)
        self.assertEqual(run_on_ranks(write_to_path, 1, path), [(before, False)])

    def test_wrong_world_size(self) -> None:
        with pytest.raises(ValueError, match="at least 1, not 0"):
            run_on_ranks(rank_and_size, 0)

    def test_functions_must_be_importable(self) -> None:
        with pytest.raises(Exception, match="lambda"):
            run_on_ranks(lambda: None, 1)


class TestFailures(unittest.TestCase):
    """Each of these must end long before the timeout of the call, and leave a pool that works."""

    def setUp(self) -> None:
        run_on_ranks(rank_and_size, 3)  # starting processes is not what is timed here
        self.start = time.monotonic()

    def tearDown(self) -> None:
        self.assertEqual([result[:2] for result in run_on_ranks(rank_and_size, 3)], [(0, 3), (1, 3), (2, 3)])

    def assert_soon(self) -> None:
        self.assertLess(time.monotonic() - self.start, 60.0)  # the timeout is 120 s

    def test_one_rank_raises(self) -> None:
        with pytest.raises(RanksFailed, match=r"fail: rank 1 of 3 failed") as failure:
            run_on_ranks(fail, 3, [1], "value")
        self.assert_soon()
        self.assertIsInstance(failure.value, RuntimeError)
        self.assertEqual(list(failure.value.errors), [1])
        self.assertIsInstance(failure.value.errors[1], ValueError)
        self.assertEqual(failure.value.errors[1].args, ("no such value on rank 1",))
        text = str(failure.value)
        self.assertIn("Traceback (most recent call last)", text)
        self.assertIn("in fail\n", text)
        self.assertIn("--- ranks 0, 2:\nreturned 'well'", text)

    def test_all_ranks_raise(self) -> None:
        pids = [pid for *_, pid in run_on_ranks(rank_and_size, 3)]
        with pytest.raises(RanksFailed, match="ranks 0, 1, 2 of 3 failed") as failure:
            run_on_ranks(fail, 3, [0, 1, 2], "value")
        for rank in range(3):
            self.assertIn(f"no such value on rank {rank}", str(failure.value))
        self.assertEqual(pids, [pid for *_, pid in run_on_ranks(rank_and_size, 3)])  # nobody had to be killed

    def test_ranks_that_wait_for_the_failed_one_get_an_error(self) -> None:
        with pytest.raises(RanksFailed) as failure:
            run_on_ranks(fail_while_others_wait, 3, [0], "value")
        self.assert_soon()
        self.assertIsInstance(failure.value.errors[0], ValueError)
        self.assertEqual(sorted(failure.value.errors), [0, 1, 2])

    def test_ranks_that_do_not_notice_are_killed_after_the_grace(self) -> None:
        with pytest.raises(RanksFailed, match="after another rank failed") as failure:
            run_on_ranks(fail_while_others_sleep, 3, [2], "value", grace=1.5)
        self.assert_soon()
        self.assertIsInstance(failure.value.errors[2], ValueError)
        self.assertIsInstance(failure.value.errors[0], RankTimeoutError)

    @parameterized.expand([("exit", 3), ("kill", -9)])
    def test_a_rank_dies(self, how: str, exit_code: int) -> None:
        with pytest.raises(RanksFailed, match=f"exit code {exit_code}") as failure:
            run_on_ranks(fail, 3, [1], how)
        self.assert_soon()
        error = failure.value.errors[1]
        self.assertIsInstance(error, WorkerDied)
        self.assertEqual(getattr(error, "exit_code", None), exit_code)

    def test_a_rank_dies_while_others_wait(self) -> None:
        with pytest.raises(RanksFailed) as failure:
            run_on_ranks(fail_while_others_wait, 3, [1], "kill")
        self.assert_soon()
        self.assertIsInstance(failure.value.errors[1], WorkerDied)

    def test_a_rank_dies_and_its_child_lives_on(self) -> None:
        with pytest.raises(RanksFailed) as failure:
            run_on_ranks(fail, 2, [1], "leave a child")
        self.assert_soon()
        self.assertIsInstance(failure.value.errors[1], WorkerDied)

    def test_a_rank_exits(self) -> None:
        with pytest.raises(RanksFailed, match="enough") as failure:
            run_on_ranks(fail, 2, [0], "sys.exit")
        self.assertIsInstance(failure.value.errors[0], SystemExit)

    @parameterized.expand(["unreadable", "unwritable"])
    def test_errors_that_cannot_be_pickled(self, how: str) -> None:
        with pytest.raises(RanksFailed, match=f"Un{how[2:]}") as failure:
            run_on_ranks(fail, 2, [0], how)
        error = failure.value.errors[0]
        assert isinstance(error, RemoteError)
        self.assertEqual(error.type_name, f"Un{how[2:]}")
        self.assertIn("1 and 2" if how == "unreadable" else "secret", str(error))

    def test_results_that_cannot_be_pickled(self) -> None:
        with pytest.raises(RanksFailed, match="lambda"):
            run_on_ranks(fail, 2, [0], "lambda")

    def test_timeout_names_the_ranks_and_says_what_the_others_did(self) -> None:
        with pytest.raises(TimeoutError, match=r"rank 1 of 3 did not finish within 1 s") as failure:
            run_on_ranks(fail, 3, [1], "sleep", timeout=1.0)
        self.assert_soon()
        self.assertIn("--- ranks 0, 2:\nreturned 'well'", str(failure.value))

    def test_timeout_replaces_only_the_stuck_worker(self) -> None:
        before = [pid for *_, pid in run_on_ranks(rank_and_size, 3)]
        with pytest.raises(RankTimeoutError):
            run_on_ranks(fail, 3, [2], "sleep", timeout=0.5)
        after = [pid for *_, pid in run_on_ranks(rank_and_size, 3)]
        self.assertEqual(after[:2], before[:2])
        self.assertNotEqual(after[2], before[2])
        with pytest.raises(ProcessLookupError):
            os.kill(before[2], 0)


def devices_and_sum() -> tuple[int, Tensor]:
    total = torch.full((3,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(total)
    return torch.cuda.current_device(), total.cpu()


@pytest.mark.nccl
class TestRanksOnGpus(unittest.TestCase):
    def test_each_rank_has_its_gpu(self) -> None:
        count = torch.cuda.device_count()
        for rank, (device, total) in enumerate(run_on_ranks(devices_and_sum, count, backend="nccl")):
            self.assertEqual(device, rank)
            self.assertEqual(total.tolist(), [count * (count + 1) / 2] * 3)

    def test_gloo_ranks_see_no_gpu(self) -> None:
        self.assertEqual(run_on_ranks(torch.cuda.is_available, 2), [False, False])
