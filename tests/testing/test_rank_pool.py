"""fsdp_optim.testing: the ranks of a pool serve one call after the other as new ones would."""

from __future__ import annotations

import os
import signal
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit import scripts
from kit.testing_ranks import blocks, nested, rank_and_size
from parameterized import parameterized
from torch import Tensor, nn

from fsdp_optim.testing import (
    RankPool,
    WorkerDied,
    fairscale_on_cpu,
    ranks,
    run_on_ranks,
)


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
