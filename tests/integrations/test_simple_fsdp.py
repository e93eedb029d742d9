"""torchtitan's SimpleFSDP (`data_parallel` of its graph_trainer experiment), with the real function, and FSDP2's CPU offload."""

from __future__ import annotations

import sys
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import load, save
from kit.compare import check_same
from kit.models import Net
from kit.tables import Table
from kit.torchtitan_cpu import import_torchtitan
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, check_trip, snapshot
from kit.wraps import in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def in_simple_fsdp(model: nn.Module, mode: str = "fully_shard", **options: Any) -> nn.Module:
    import_torchtitan()
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    ranks = dist.get_world_size()
    if mode == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    wrapped: nn.Module = data_parallel(model, mesh, mode=mode, **options)
    return wrapped


WRAPS: dict[str, tuple[Callable[[nn.Module], Any], tuple[int, ...]]] = {
    "SimpleFSDP": (in_simple_fsdp, (3, 2, 1)),
    "SimpleFSDP, replicas": (partial(in_simple_fsdp, mode="replicate"), (2,)),
    "SimpleFSDP, hybrid": (partial(in_simple_fsdp, mode="hybrid_shard"), (4,)),
    "FSDP2, CPU offload": (partial(in_fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)), (3, 2)),
}


def trip(kind: str) -> None:
    check_trip(WRAPS[kind][0])


TRIPS = Table(trip, [(size, kind) for kind, (_, sizes) in WRAPS.items() for size in sizes])


def save_to(path: Path, kind: str) -> None:
    save(path, Trained(WRAPS[kind][0]))


def load_from(path: Path, kind: str) -> None:
    target, alike = Trained(WRAPS[kind][0], steps=1), Trained(WRAPS[kind][0])
    load(path, target, compare=True)
    check_same("loaded", snapshot(target)["values"], snapshot(alike)["values"])
    check_full("loaded", target.gather(None), Oracle().full())
    target.step(range(STEPS, STEPS + 1))
    check_full("trained on", target.gather(None), Oracle(steps=STEPS + 1).full())


def forward_and_back(path: Path) -> None:
    """A forward pass unshards by a parametrization, which a save and a load must not call, and must not disturb."""
    torch.manual_seed(0)
    batch, plain, model = torch.randn(4, 5), Net(), in_simple_fsdp(Net())
    optim = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()
    with CommDebugMode() as calls:
        fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
        fsdp_optim.load(path, plain, options=fsdp_optim.LoadOptions(progress=False))
    check_same("collective calls of DTensors", calls.get_total_counts(), 0)
    check_same("unsharded", plain(batch), model(batch))


@unittest.skipUnless(sys.version_info >= (3, 11), "torchtitan needs Python 3.11")
class SimpleFSDPTest(unittest.TestCase):
    @parameterized.expand(TRIPS.cases)
    def test_every_verb(self, world_size: int, kind: str) -> None:
        TRIPS(world_size, kind)

    @expand(
        soon=[("SimpleFSDP", 3, "SimpleFSDP", 2), ("FSDP2, CPU offload", 2, "FSDP2, CPU offload", 3)],
        later=[
            ("SimpleFSDP, hybrid", 4, "FSDP2, CPU offload", 3),
            ("FSDP2, CPU offload", 3, "SimpleFSDP, hybrid", 4),
            ("SimpleFSDP, replicas", 2, "SimpleFSDP", 4),
        ],
    )
    def test_save_and_load(self, saved: str, ranks: int, loaded: str, later_ranks: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_to, ranks, Path(folder) / "saved", saved)
            run_on_ranks(load_from, later_ranks, Path(folder) / "saved", loaded)

    def test_after_a_forward_pass(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(forward_and_back, 2, Path(folder) / "saved")


if __name__ == "__main__":
    unittest.main()
