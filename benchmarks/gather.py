"""Gather to rank 0: fsdp_optim beside the wrapper's own way and beside plain send/recv of the same bytes.

    python benchmarks/gather.py [--rounds 5] [--worlds 2 4] [--models big small shapes] [--wrappers fairscale FSDP2 FSDP1]

Three models with Adam state in fp32: `big`, 12 blocks with 100 M parameters; `small`, 400 equal units with 5 M parameters; and
`shapes`, 400 units of as many shapes with 5 M parameters, which share no plan. The contestants run in turn in the same
processes. `plain send/recv` moves every rank's state to rank 0 in 64 MiB messages, into fresh memory, and unpacks nothing.
Extra memory is the highest resident size during the call, over that before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from measure import Series, run_in_turn, table

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks
from fsdp_optim.transport.world import world_here

BUCKET = 64 << 20


def blocks_of(kind: str) -> list[nn.Module]:
    """One module for each FSDP unit."""
    if kind == "big":
        return [nn.Sequential(nn.Linear(1443, 2886), nn.Linear(2886, 1443)) for _ in range(12)]
    if kind == "small":
        return [nn.Sequential(nn.Linear(111, 111)) for _ in range(400)]
    return [
        nn.Sequential(nn.Linear(64 + i % 97, 4 * (5 + i % 53))) for i in range(400)
    ]  # each rank has as much of each


def in_fairscale(blocks: list[nn.Module]) -> nn.Module:
    return FullyShardedDataParallel(nn.Sequential(*(FullyShardedDataParallel(block) for block in blocks)))


def in_fsdp1(blocks: list[nn.Module]) -> nn.Module:
    def wrap(module: nn.Module) -> nn.Module:
        return TorchFSDP(module, use_orig_params=True, device_id=torch.device("cpu"))

    return wrap(nn.Sequential(*map(wrap, blocks)))


def in_fsdp2(blocks: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(fully_shard(block, mesh=mesh) for block in blocks))
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "fairscale": in_fairscale,
    "FSDP1": in_fsdp1,
    "FSDP2": in_fsdp2,
}


def contest(kind: str, wrapper: str, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    with fairscale_on_cpu():
        model = WRAPPERS[wrapper](blocks_of(kind))
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.rand_like(param)
        optim.step()
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):
                module._lazy_init()
        contestants: dict[str, Callable[[], object]] = {
            "fsdp_optim": lambda: fsdp_optim.gather_full_optim_state_dict(model, optim),
            "fsdp_optim, planned anew": lambda: gather_without_plans(model, optim),
            "plain send/recv": lambda: send_and_receive(optim),
        }
        if wrapper == "fairscale":
            contestants["fairscale"] = lambda: fairscale_gather(model, optim)
        elif wrapper == "FSDP2":
            contestants["torch"] = lambda: torch_gather(model, optim)
        return run_in_turn(contestants, rounds)


def gather_without_plans(model: nn.Module, optim: torch.optim.Optimizer) -> object:
    """A gather as the first call makes it, without the plans that earlier calls have left."""
    world_here().plans.clear()
    return fsdp_optim.gather_full_optim_state_dict(model, optim)


def torch_gather(model: nn.Module, optim: torch.optim.Optimizer) -> object:
    """torch's own way for FSDP2."""
    return get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def fairscale_gather(model: nn.Module, optim: torch.optim.Optimizer) -> object:
    """fairscale's own method; it turns the live `step` tensors into numbers, which is put right afterwards."""
    steps = {param: state["step"] for param, state in optim.state.items()}
    full = super(FullyShardedDataParallel, model).gather_full_optim_state_dict(optim)  # type: ignore[misc]
    for param, step in steps.items():
        optim.state[param]["step"] = step
    return full


def send_and_receive(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The floor: rank 0 gets every rank's moments in large messages, in memory that nobody has touched before."""
    states = (state[name] for state in optim.state.values() for name in ("exp_avg", "exp_avg_sq"))
    mine = [(state.to_local() if isinstance(state, DTensor) else state).flatten() for state in states]
    if dist.get_rank() != 0:
        for bucket in buckets(mine):
            dist.send(bucket, 0)
        return []
    received = [tensor.clone() for tensor in mine]
    total = sum(tensor.numel() for tensor in mine)
    limit = BUCKET // 4
    for rank in range(1, dist.get_world_size()):
        for first in range(0, total, limit):
            fresh = torch.empty(min(limit, total - first))
            dist.recv(fresh, rank)
            received.append(fresh)
    return received


def buckets(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in pieces of at most 64 MiB. Joining them is the sender's only copy."""
    return list(torch.cat(tensors).split(BUCKET // 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["big", "small", "shapes"])
    parser.add_argument("--wrappers", nargs="+", default=["fairscale", "FSDP2", "FSDP1"], choices=list(WRAPPERS))
    options = parser.parse_args()
    rows = []
    for kind, wrapper in ((kind, wrapper) for kind in options.models for wrapper in options.wrappers):
        for world_size in options.worlds:
            by_rank = run_on_ranks(contest, world_size, kind, wrapper, options.rounds, timeout=900.0)
            ours = by_rank[0]["fsdp_optim"].median
            for name, series in by_rank[0].items():
                others = max(rank[name].median_mib for rank in by_rank[1:])
                rows.append(
                    (
                        f"{kind}, {wrapper}, {world_size} ranks",
                        name,
                        f"{series.median:.3f}",
                        f"{min(series.seconds):.3f} to {max(series.seconds):.3f}",
                        f"{series.median / ours:.2f}",
                        f"{series.median_mib:.0f}",
                        f"{others:.0f}",
                    )
                )
    header = ("model", "who", "median s", "range s", "time / ours", "rank 0 extra MiB", "others' extra MiB")
    print(table(header, rows))


if __name__ == "__main__":
    main()
