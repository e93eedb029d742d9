"""Ray Train's own TorchTrainer: a worker is killed, Ray begins anew, and training continues at any number of workers.

Needs `ray[train]`, which is no part of `make venv`, because it has 400 MB: install it elsewhere, and run this file alone there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.compare import check_same
from torch import nn

from fsdp_optim.testing import run_on_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not here")

LAST = 6


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    for layer in (*model, model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def everything(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The weights and the state, on rank 0."""
    import fsdp_optim

    weights = fsdp_optim.gather_full_model_state_dict(model)
    state = fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name")
    return {"weights": weights, "state": state["state"]} if state else {}


def train_one_step(model: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()


def loop(config: dict[str, Any]) -> None:
    """What Ray runs on each worker: the recipe of docs/recipes.md."""
    import ray.train

    import fsdp_optim

    rank, root = ray.train.get_context().get_world_rank(), Path(config["root"])
    model, optim = build()
    with fsdp_optim.CheckpointManager(root / "run", model, optim, every=1, keep_last=3) as manager:
        begun = manager.resume()
        if rank == 0:
            with open(root / "begun", "a") as file:
                file.write(f"{begun}\n")
        for step in range(begun + 1, config["last"] + 1):
            train_one_step(model, optim, step)
            manager.step(step)
            if rank == 1 and step == config["killed_at"] and begun == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    end = everything(model, optim)
    if rank == 0:
        torch.save(end, root / "end")


def trained_by_ray(root: Path, workers: int, last: int, killed_at: int) -> dict[str, Any]:
    """Train with Ray. Returns what rank 0 has at the end."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"root": str(root), "last": last, "killed_at": killed_at},
        torch_config=TorchConfig(backend="gloo", timeout_s=600),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name=f"of-{workers}",
            storage_path=str(root / "of Ray"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    assert trainer.fit().error is None
    return torch.load(root / "end")


def without_ray(last: int) -> dict[str, Any]:
    model, optim = build()
    for step in range(1, last + 1):
        train_one_step(model, optim, step)
    return everything(model, optim)


class RayTest(unittest.TestCase):
    def setUp(self) -> None:
        not_nice = mock.patch.dict(os.environ, {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"})
        not_nice.start()  # Ray gives its workers a niceness of 15, with which they wait behind everything else
        self.addCleanup(not_nice.stop)
        import ray

        paths = [str(Path(__file__).parent), *filter(None, sys.path)]
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
        )
        self.addCleanup(ray.shutdown)

    def test_a_killed_worker_and_another_number_of_workers(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            wanted = run_on_ranks(without_ray, 2, LAST)[0]
            check_same("after the kill", trained_by_ray(root, 2, LAST, 3), wanted)
            check_same("on one worker, which has nothing more to train", trained_by_ray(root, 1, LAST, 0), wanted)
            begun = [int(line) for line in (root / "begun").read_text().split()]
            self.assertEqual((begun[0], begun[2:]), (0, [LAST]))
            self.assertIn(begun[1], (2, 3))  # the save of step 3 was in the background when the worker was killed


if __name__ == "__main__":
    unittest.main()
