"""Every verb and checkpoint over NCCL with everything on GPUs; a small part of the same tables over gloo, on any machine."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_same
from kit.tables import Table
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_optim

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
}


def here() -> torch.device:
    """Where the tensors of this rank are: on its GPU where it sees one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_fsdp2(model: nn.Module) -> Any:
    return in_fsdp2(model.to(here()), init_device_mesh(here().type, (dist.get_world_size(),)))


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "fairscale": lambda model: in_fairscale(model.to(here())),
    "fairscale, mixed precision": lambda model: in_fairscale(model.to(here()), mixed_precision=True),
    "fairscale, params on the CPU": lambda model: in_fairscale(model, mixed_precision=True, move_params_to_cpu=True),
    "FSDP1": lambda model: in_fsdp1(model.to(here()), device_id=here()),
    "FSDP1, original parameters": lambda model: in_fsdp1(model.to(here()), device_id=here(), use_orig_params=True),
    "FSDP2": to_fsdp2,
    "DDP": lambda model: in_ddp(model.to(here())),
}


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return {key: on_host(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def every_verb(wrapping: str, optimizer: str, backend: str) -> None:
    """All on one wrapping; the oracle is the unwrapped model, trained on the same device."""
    if dist.get_backend() != backend:
        raise AssertionError(f"the ranks have {dist.get_backend()}")
    wrap, make = WRAPPINGS[wrapping], OPTIMIZERS[optimizer]
    last, rank = dist.get_world_size() - 1, dist.get_rank()
    with cpu(), tempfile.TemporaryDirectory() as own_folder:
        folder = [own_folder]
        dist.broadcast_object_list(folder, src=0, device=here() if backend == "nccl" else None)
        by_cpu = "CPU" in wrapping
        oracle = Trained((lambda model: model) if by_cpu else lambda model: model.to(here()), make)
        wanted = on_host(oracle.optim.state_dict()["state"])
        trained = Trained(wrap, make)
        full = trained.gather(None, bucket_nbytes=128)
        check_same("gathered to all", full["state"], wanted)
        check_same("gathered to the last", (trained.gather(last) or full)["state"], wanted)
        iterated = fsdp_optim.iter_full_optim_state(
            trained.model, trained.optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=128)
        )
        check_same("iterated", [state for _, state in iterated], list(wanted.values()))
        shards: dict[str, Callable[[Trained], Any]] = {
            "shard": lambda target: target.shard(full),
            "scatter": lambda target: target.scatter(full, last, bucket_nbytes=128),
        }
        for verb, cut in shards.items():
            target = Trained(wrap, make, 0)
            fsdp_optim.load_optim_state_dict(target.optim, cut(target))
            check_same(verb, target.gather(None)["state"], wanted)
        for other in ("FSDP2", wrapping):
            target = Trained(WRAPPINGS[other], make, 0)
            fsdp_optim.transfer_optim_state(trained.model, trained.optim, target.model, target.optim)
            check_same(f"transferred to {other}", target.gather(None)["state"], wanted)
        path = Path(folder[0])
        fsdp_optim.save(
            path / "saved",
            trained.model,
            trained.optim,
            options=fsdp_optim.SaveOptions(durable=False, bucket_nbytes=1000),
        )
        handle = fsdp_optim.async_save(
            path / "later", trained.model, trained.optim, options=fsdp_optim.SaveOptions(durable=False)
        )
        trained.step([7])  # what is written was copied before
        handle.wait()
        for name in ("saved", "later"):
            target = Trained(wrap, make, 0)
            fsdp_optim.load(path / name, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
            check_same(f"loaded what was {name}", target.gather(None)["state"], wanted)
        dist.barrier()
        if rank == 0 and not (path / "saved").exists():
            raise AssertionError("nothing was saved")


def _cases(backend: str, sizes: tuple[int, ...], optimizers: Any) -> list[tuple[Any, ...]]:
    return [
        (size, wrapping, optimizer, backend) for size in sizes for wrapping in WRAPPINGS for optimizer in optimizers
    ]


SMALL = Table(every_verb, *some(_cases("gloo", (2,), ("Adam",)), every=3))
NCCL = Table(every_verb, _cases("nccl", (2, 4), OPTIMIZERS), backend="nccl")


class GlooTest(unittest.TestCase):
    """The tables work: what runs over NCCL elsewhere runs here."""

    @expand(*SMALL.soon_and_later)
    def test_every_verb(self, world_size: int, wrapping: str, optimizer: str, backend: str) -> None:
        SMALL(world_size, wrapping, optimizer, backend)


@pytest.mark.nccl
class NcclTest(unittest.TestCase):
    @parameterized.expand(NCCL.cases)
    def test_every_verb(self, world_size: int, wrapping: str, optimizer: str, backend: str) -> None:
        if torch.cuda.device_count() < world_size and torch.cuda.nccl.version() < (2, 30):
            self.skipTest(f"nccl: {world_size} ranks need as many GPUs before NCCL 2.30")
        NCCL(world_size, wrapping, optimizer, backend)


if __name__ == "__main__":
    unittest.main()
