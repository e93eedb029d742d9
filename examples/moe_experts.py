"""Train a mixture of experts on sub-groups, and resume on any number of ranks: each rank has some experts of a stacked tensor.

    torchrun --nproc-per-node 4 examples/moe_experts.py --root checkpoints --last 100
    torchrun --nproc-per-node 2 examples/moe_experts.py --root checkpoints --last 200    # other experts on each rank
    torchrun --nproc-per-node 1 examples/moe_experts.py --root checkpoints --last 300    # all experts on one rank

On four ranks the experts are halved over two groups (expert parallel), and FSDP2 shards each half over the two ranks of its
group (expert data parallel); everything else is sharded over all ranks. The checkpoint has one tensor of all experts.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_optim

NUM_EXPERTS, WIDTH = 8, 16


class Experts(nn.Module):
    """The experts [first, stop) of a layer, stacked: up has the shape [experts, width, inner width]."""

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        self.first, self.stop = first, stop
        generator = torch.Generator().manual_seed(1)
        up = torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.up, self.down = nn.Parameter(up[first:stop].clone()), nn.Parameter(down[first:stop].clone())
        fsdp_optim.declare_slice(self, "up", global_shape=up.shape, offset=(first, 0, 0))
        fsdp_optim.declare_slice(self, "down", global_shape=down.shape, offset=(first, 0, 0))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what the experts of this rank make of x. `weights`: of every token, by expert."""
        mine = weights[:, self.first : self.stop]
        inner = nn.functional.gelu(torch.einsum("tw,ewi->tei", x, self.up))
        return (torch.einsum("tei,eiw->tew", inner, self.down) * mine[..., None]).sum(1)


class Moe(nn.Module):
    """A router and experts. Each token goes to its best two experts; the groups of ranks add up what their experts make."""

    def __init__(self, first: int, stop: int, across: dist.ProcessGroup) -> None:
        super().__init__()
        self.across = across
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Experts(first, stop)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(2).indices
        chosen = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
        made = self.experts(x, Shared.apply(chosen, self.across))
        return self.head(x + Summed.apply(made, self.across))


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total


class Summed(torch.autograd.Function):
    """The sum over a group of ranks. Every rank of the group gets the whole sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(torch.autograd.Function):
    """A value that all ranks of a group have. Each rank computes a part of the result from it, so the gradients add up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


def main(arguments: list[str] | None = None) -> int:
    """Train up to a step; returns the step from which the run continued."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a folder that all ranks share, or a URL")
    parser.add_argument("--last", type=int, default=100, help="the number of the last step")
    parser.add_argument("--every", type=int, default=50, help="save every so many steps")
    asked = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device_type = "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    groups = 2 if world % 2 == 0 else 1  # of ranks with different experts
    grid = init_device_mesh(device_type, (groups, world // groups), mesh_dim_names=("ep", "edp"))
    place, per_group = grid["ep"].get_local_rank(), NUM_EXPERTS // groups
    torch.manual_seed(0)  # the same weights on all ranks
    model = Moe(place * per_group, (place + 1) * per_group, grid["ep"].get_group()).to(device_type)
    fully_shard(model.experts, mesh=grid["edp"])
    fully_shard(model, mesh=init_device_mesh(device_type, (world,)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with fsdp_optim.CheckpointManager(asked.root, model, optim, every=asked.every, keep_last=2) as manager:
        first = manager.resume()
        for step in range(first + 1, asked.last + 1):
            # The ranks of one expert parallel group see the same tokens, the ranks of one data parallel group others.
            seed = 1000 * step + grid["edp"].get_local_rank()
            batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            manager.step(step)
        manager.save(asked.last)
    if rank == 0:
        print(f"trained from step {first} to step {asked.last} with {per_group} experts a group", flush=True)
    return first


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
