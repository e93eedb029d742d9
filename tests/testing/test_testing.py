"""fsdp_optim.testing: fairscale FSDP trains on CPU as plain torch does; ranks report every way to fail."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from kit import scripts
from parameterized import parameterized
from torch import Tensor, nn

from fsdp_optim.errors import RankTimeoutError
from fsdp_optim.testing import (
    RankPool,
    RanksFailed,
    RemoteError,
    WorkerDied,
    fairscale_on_cpu,
    forget_fairscale_groups,
    run_on_ranks,
)
from fsdp_optim.testing import ranks as ranks

BATCH = 12  # divisible by every world size below


def blocks() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def nested(model: nn.Sequential, **kwargs: Any) -> nn.Module:
    """One unit for each of the first two Linears, one (the root) for the rest."""
    from fairscale.nn import FullyShardedDataParallel

    class Subclass(FullyShardedDataParallel):  # type: ignore[misc]
        """A wrapper of a user's own must work as well."""

    inner = [FullyShardedDataParallel(model[0], **kwargs), model[1], Subclass(model[2], **kwargs), *model[3:]]
    return Subclass(nn.Sequential(*inner), **kwargs)


def train(
    model: nn.Module, steps: int, rank: int = 0, world_size: int = 1, micro_batches: int = 1
) -> dict[str, Tensor]:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # unlike Adam, sees the gradient's scale
    for step in range(steps):
        data = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))
        optim.zero_grad()
        for part in data.chunk(world_size)[rank].chunk(micro_batches):
            (model(part).float().pow(2).mean() / micro_batches).backward()
        optim.step()
    return {name: value.float() for name, value in model.state_dict().items()}


def train_sharded(steps: int, micro_batches: int = 1, **kwargs: Any) -> dict[str, Tensor]:
    with fairscale_on_cpu(), fairscale_on_cpu():
        return train(nested(blocks(), **kwargs), steps, dist.get_rank(), dist.get_world_size(), micro_batches)


def clipped_norm_sharded() -> float:
    with fairscale_on_cpu():
        model = nested(blocks())
        data = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0))
        model(data.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean().backward()
        norm = model.clip_grad_norm_(0.01)
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    squares = grads.pow(2).sum()
    dist.all_reduce(squares)
    return float(norm), float(squares.sqrt())  # type: ignore[return-value]


def no_sync_gradients() -> list[Tensor]:
    """The gradient shards of two passes, the first of which is not reduced."""
    with fairscale_on_cpu():
        model = nested(blocks())
        data = torch.ones(2, 5)
        with model.no_sync():
            model(data).sum().backward()
        model(data).sum().backward()
        both = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(data).sum().backward()
        return [a - 2 * p.grad for a, p in zip(both, model.parameters(), strict=True)]


def train_on_halves() -> list[int]:
    """An inner unit on half of the ranks; the world size that each unit sees."""
    from fairscale.nn import FullyShardedDataParallel

    with fairscale_on_cpu():
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        inner = FullyShardedDataParallel(nn.Linear(5, 5), process_group=halves[dist.get_rank() // 2])
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 3)))
        train(model, 2, dist.get_rank(), dist.get_world_size())
        return [inner.world_size, model.world_size]


class TestFairscaleOnCpu(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{name}_on_{world_size}", kwargs, world_size, tolerance)
            for name, kwargs, tolerance, world_sizes in [
                ("plain", {}, 1e-6, (1, 2, 3, 4)),
                ("unflattened", {"flatten_parameters": False}, 1e-6, (3,)),
                ("bucket_cap_of_the_gpu", {"bucket_cap_mb": 25}, 1e-6, (4,)),
                ("kept_full", {"reshard_after_forward": False}, 1e-6, (2,)),
                ("offloaded", {"move_params_to_cpu": True}, 1e-6, (4,)),
                ("offloaded_fp16", {"move_params_to_cpu": True, "mixed_precision": True}, 5e-4, (1, 3)),
                ("fp16_reduced_in_fp32", {"mixed_precision": True, "fp32_reduce_scatter": True}, 5e-4, (1, 2)),
            ]
            for world_size in world_sizes
        ]
    )
    def test_trains_as_plain_torch_does(
        self, name: str, kwargs: dict[str, Any], world_size: int, tolerance: float
    ) -> None:
        expected = train(blocks(), steps=3)
        untrained = blocks().state_dict()
        for state in run_on_ranks(train_sharded, world_size, 3, **kwargs):
            self.assertEqual(list(state), list(expected))
            for key in expected:
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=tolerance)
                self.assertGreater(float((state[key] - untrained[key]).abs().max()), 10 * tolerance)

    def test_low_precision_communication(self) -> None:
        expected = train(blocks(), steps=3)
        [state, _] = run_on_ranks(train_sharded, 2, 3, mixed_precision=True)
        for key in expected:
            torch.testing.assert_close(state[key], expected[key], rtol=0, atol=5e-4)

    def test_gradients_accumulate(self) -> None:
        expected = train(blocks(), steps=2)
        for kwargs in ({}, {"move_params_to_cpu": True}):
            [state, _] = run_on_ranks(train_sharded, 2, 2, 3, **kwargs)
            for key in expected:
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=1e-6)

    def test_gradients_accumulate_without_reduction(self) -> None:
        for differences in run_on_ranks(no_sync_gradients, 2):
            for difference in differences:
                self.assertEqual(float(difference.abs().max()), 0.0)

    def test_clip_grad_norm(self) -> None:
        model = blocks()
        model(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0))).pow(2).mean().backward()
        expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        for norm, clipped in run_on_ranks(clipped_norm_sharded, 3):
            self.assertAlmostEqual(norm, expected, places=5)
            self.assertAlmostEqual(clipped, 0.01, places=5)

    def test_units_on_a_part_of_the_ranks(self) -> None:
        self.assertEqual(run_on_ranks(train_on_halves, 4), [[2, 4]] * 4)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the context changes nothing")
    def test_everything_is_put_back(self) -> None:
        from fairscale.nn import FullyShardedDataParallel as Wrapper
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

        def patched() -> list[object]:
            cuda = [torch.cuda.current_stream, torch.cuda.stream, torch.cuda.synchronize]
            tensor = [torch.Tensor.record_stream, torch.Tensor.pin_memory, torch.Tensor.cuda]
            return [*cuda, *tensor, module._get_default_cuda_device, Wrapper._setup_streams, Wrapper.clip_grad_norm_]

        before = patched()
        with fairscale_on_cpu():
            with fairscale_on_cpu():
                within = patched()
            self.assertEqual(patched(), within)  # leaving the inner one changes nothing
        with pytest.raises(KeyError), fairscale_on_cpu():
            raise KeyError
        self.assertEqual(patched(), before)
        self.assertEqual([a is b for a, b in zip(within, before, strict=True)].count(True), 1)  # Tensor.cuda stays
        self.assertNotIn("record_stream", vars(torch.Tensor))

    def test_forgets_dead_groups(self) -> None:
        from fairscale.internal.parallel import get_process_group_cached

        get_process_group_cached._global_group_cache = {"default": "dead"}
        forget_fairscale_groups()
        forget_fairscale_groups()
        self.assertFalse(hasattr(get_process_group_cached, "_global_group_cache"))

    def test_import_loads_neither_fairscale_nor_pytest(self) -> None:
        code = "import sys, fsdp_optim.testing; print([m for m in ('fairscale', 'pytest') if m in sys.modules])"
        self.assertEqual(scripts.run(code, preload=("fsdp_optim.testing",)).stdout.strip(), "[]")


def rank_and_size() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


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

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


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
        start = time.monotonic()
        second = [pid for *_, pid in run_on_ranks(rank_and_size, 2)]
        self.assertEqual(second, first[:2])
        self.assertLess(time.monotonic() - start, 1.0)
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
    """Each of these must end within seconds, and leave a pool that works."""

    def setUp(self) -> None:
        run_on_ranks(rank_and_size, 3)  # starting processes is not what is timed here
        self.start = time.monotonic()

    def tearDown(self) -> None:
        self.assertEqual([result[:2] for result in run_on_ranks(rank_and_size, 3)], [(0, 3), (1, 3), (2, 3)])

    def assert_within(self, seconds: float) -> None:
        self.assertLess(time.monotonic() - self.start, seconds)

    def test_one_rank_raises(self) -> None:
        with pytest.raises(RanksFailed, match=r"fail: rank 1 of 3 failed") as failure:
            run_on_ranks(fail, 3, [1], "value")
        self.assert_within(5.0)
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
        self.assert_within(6.0)
        self.assertIsInstance(failure.value.errors[0], ValueError)
        self.assertEqual(sorted(failure.value.errors), [0, 1, 2])

    def test_ranks_that_do_not_notice_are_killed_after_the_grace(self) -> None:
        with pytest.raises(RanksFailed, match="after another rank failed") as failure:
            run_on_ranks(fail_while_others_sleep, 3, [2], "value", grace=1.5)
        self.assert_within(6.0)
        self.assertIsInstance(failure.value.errors[2], ValueError)
        self.assertIsInstance(failure.value.errors[0], RankTimeoutError)

    @parameterized.expand([("exit", 3), ("kill", -9)])
    def test_a_rank_dies(self, how: str, exit_code: int) -> None:
        with pytest.raises(RanksFailed, match=f"exit code {exit_code}") as failure:
            run_on_ranks(fail, 3, [1], how)
        self.assert_within(5.0)
        error = failure.value.errors[1]
        self.assertIsInstance(error, WorkerDied)
        self.assertEqual(getattr(error, "exit_code", None), exit_code)

    def test_a_rank_dies_while_others_wait(self) -> None:
        with pytest.raises(RanksFailed) as failure:
            run_on_ranks(fail_while_others_wait, 3, [1], "kill")
        self.assert_within(6.0)
        self.assertIsInstance(failure.value.errors[1], WorkerDied)

    def test_a_rank_dies_and_its_child_lives_on(self) -> None:
        with pytest.raises(RanksFailed) as failure:
            run_on_ranks(fail, 2, [1], "leave a child")
        self.assert_within(5.0)
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
        self.assert_within(6.0)
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


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Beside(nn.Module):
    """Parameters of its own, beside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.own = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.own.T  # type: ignore[no-any-return]


def run_a_model(kind: str, world: int) -> tuple[int, int]:
    """Wrap a model and run it twice; this process, and the number of its threads beforehand."""
    before = threads()
    with fairscale_on_cpu():
        if kind == "torch_dtensor":
            gather_rows(3 + world)
        else:
            model = _wrapped(kind)
            model(torch.ones(2, 5))
            last = model(torch.ones(2, 5))
            if kind == "fairscale_trained":
                last.sum().backward()
    return os.getpid(), before


def _wrapped(kind: str) -> nn.Module:
    if kind in ("fairscale", "fairscale_trained"):
        return nested(blocks())
    from fairscale.nn import FullyShardedDataParallel as Fairscale
    from torch.distributed.fsdp import FullyShardedDataParallel as Torch

    def wrap(module: nn.Module) -> nn.Module:
        if kind == "fairscale_beside":
            return Fairscale(module)  # type: ignore[no-any-return]
        return Torch(module, use_orig_params=kind == "torch_orig", device_id=torch.device("cpu"))

    model = Beside().requires_grad_(kind != "torch_frozen")
    model.inner = wrap(model.inner)  # type: ignore[assignment]
    return wrap(model)


def gather_rows(num_rows: int) -> None:
    """DTensor caches how each shape is gathered, and on which mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_tensor(torch.ones(num_rows, 2), mesh, [Shard(0)]).full_tensor()


class TestRankPool(unittest.TestCase):
    @parameterized.expand(
        [
            *("fairscale", "fairscale_trained", "fairscale_beside"),
            *("torch_flat", "torch_orig", "torch_frozen", "torch_dtensor"),
        ]
    )
    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
    def test_models_and_their_groups_end_with_their_world(self, kind: str) -> None:
        """Each process group has threads; models make cycles that are partly in C++, and DTensor has caches."""
        first, second, *_, last = (run_on_ranks(run_a_model, 2, kind, world) for world in range(5))
        for (pid, after), (same_pid, before) in zip(last, second, strict=True):
            self.assertEqual(pid, same_pid)  # the worker was not replaced
            self.assertLess(after, before + 3, f"first {first}, then {second}, and after three more worlds {last}")

    def test_closing_ends_the_workers(self) -> None:
        with RankPool() as pool:
            self.assertEqual(pool.pids(), [])  # nothing is started before the first call
            pids = [pid for *_, pid in pool.run(rank_and_size, 2)]
            self.assertEqual(pool.pids(), pids)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(RuntimeError, match="closed"):
            pool.run(rank_and_size, 1)
        pool.close()

    def test_scripts_can_run_their_own_functions_and_leave_nobody_behind(self) -> None:
        result = run_script(
            "import multiprocessing, os\n"
            "from fsdp_optim.testing import run_on_ranks\n"
            "locks = []  # a worker that does not end by itself leaks them, and Python complains\n"
            "def pid(): locks.append(multiprocessing.Lock()); return os.getpid()\n"
            "if __name__ == '__main__': print(*run_on_ranks(pid, 2))\n"
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        for pid in result.stdout.split():
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)

    def test_a_worker_that_ends_while_it_starts(self) -> None:
        """As one does that imports a script without a main guard, and would start ranks itself."""
        with mock.patch.object(ranks, "worker_main", sys.exit), RankPool() as pool:
            with pytest.raises(
                WorkerDied, match=r"ended while starting.* A script that starts ranks needs `if __name__"
            ):
                pool.run(rank_and_size, 1)
            self.assertEqual(pool.pids(), [])

    @pytest.mark.slow
    def test_a_script_without_main_guard_is_told_so(self) -> None:
        result = run_script("from fsdp_optim.testing import run_on_ranks\ndef one(): return 1\nrun_on_ranks(one, 1)\n")
        self.assertEqual(result.returncode, 1)
        self.assertIn("A script that starts ranks needs `if __name__", result.stderr.splitlines()[-1])

    def test_workers_have_the_callers_variables_of_their_start(self) -> None:
        """The server that forks the workers has started earlier, with other variables."""
        run_on_ranks(os.getpid, 1)
        with mock.patch.dict(os.environ, {"FSDP_OPTIM_TEST": "new"}), RankPool() as pool:
            self.assertEqual(pool.run(os.getenv, 2, "FSDP_OPTIM_TEST"), ["new"] * 2)
        with RankPool() as pool:
            self.assertEqual(pool.run(os.getenv, 1, "FSDP_OPTIM_TEST"), [None])

    def test_workers_do_not_outlive_a_killed_caller(self) -> None:
        result = run_script(
            "import multiprocessing, os, signal, time\n"
            "from fsdp_optim.testing import run_on_ranks\n"
            "def kill_caller():\n"
            "    os.write(1, f'{os.getpid()}\\n{os.getppid()}\\n'.encode())\n"  # and what they were forked from
            "    time.sleep(1)\n"
            "    os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)\n"
            "    time.sleep(1000)\n"
            "if __name__ == '__main__': run_on_ranks(kill_caller, 2)\n"
        )
        self.assertEqual(result.returncode, -signal.SIGKILL)
        self.assertEqual(len(result.stdout.split()), 4)
        end = time.monotonic() + 10
        for pid in result.stdout.split():
            while is_running(int(pid)):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.05)


def run_script(text: str) -> scripts.Started:
    """The server of its pool has imported no more than it must."""
    light = "import fsdp_optim.testing.ranks as ranks\nranks._ALWAYS = ranks._ALWAYS[:1]\n"
    return scripts.run(light + text, timeout=180, preload=("fsdp_optim.testing",))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        if not Path("/proc/self/stat").exists():
            return True
        # A process whose parent is gone may stay listed as a zombie; it may also end between these lines.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
