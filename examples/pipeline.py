"""Train in a pipeline with two virtual stages on each rank, and resume in a pipeline of any other length, or without one.

    torchrun --nproc-per-node 2 examples/pipeline.py --root checkpoints --last 100
    torchrun --nproc-per-node 4 examples/pipeline.py --root checkpoints --last 200    # other stages, from step 100 on
    torchrun --nproc-per-node 1 examples/pipeline.py --root checkpoints --last 300    # no pipeline at all

The checkpoint of all stages is that of the complete model: `from_pretrained`, `safetensors` and the last command open it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import fsdp_optim

NUM_LAYERS, WIDTH, MICROBATCHES = 8, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stage is a pruned copy of the model: its parameters keep the names that they have in the complete model."""

    def __init__(self) -> None:
        super().__init__()
        self.inward: nn.Module | None = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(NUM_LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x) if self.inward is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def stage_of(model: Model, index: int, num_stages: int) -> Model:
    """One stage of the model."""
    stage = copy.deepcopy(model)
    mine = range(index * NUM_LAYERS // num_stages, (index + 1) * NUM_LAYERS // num_stages)
    for number in range(NUM_LAYERS):
        if number not in mine:
            del stage.layers[str(number)]
    if index > 0:
        stage.inward = None
    if index < num_stages - 1:
        stage.head = None
    return stage


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def without_pipeline(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """The same training on one rank."""

    def step(batch: Tensor, target: Tensor) -> None:
        loss_of(model(batch), target).backward()

    return step


def by_schedule(stages: list[Model], indices: list[int], num_stages: int, device: torch.device) -> Callable[..., None]:
    """One training step of all ranks by torch's interleaved schedule."""
    parts = [PipelineStage(stage, i, num_stages, device) for stage, i in zip(stages, indices, strict=True)]
    schedule = ScheduleInterleaved1F1B(parts, MICROBATCHES, loss_fn=loss_of)  # type: ignore[arg-type]
    has_first, has_last = 0 in indices, num_stages - 1 in indices

    def step(batch: Tensor, target: Tensor) -> None:
        given = {"target": target} if has_last else {}
        schedule.step(*([batch] if has_first else []), **given)

    return step


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
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same weights on all ranks
    model = Model().to(device)
    if world > 1:
        indices = [rank, rank + world]  # two virtual stages
        stages = [stage_of(model, index, 2 * world) for index in indices]
        train = by_schedule(stages, indices, 2 * world, device)
    else:
        stages, train = [model], without_pipeline(model)
    optims = [torch.optim.AdamW(stage.parameters(), lr=1e-3) for stage in stages]

    with fsdp_optim.CheckpointManager(asked.root, stages, optims, every=asked.every, keep_last=2) as manager:
        first = manager.resume()
        for step in range(first + 1, asked.last + 1):
            batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).to(device)
            train(batch, batch.sum(1, keepdim=True))
            for optim in optims:
                optim.step()
                optim.zero_grad()
            manager.step(step)
        manager.save(asked.last)
    if rank == 0:
        print(f"trained from step {first} to step {asked.last} in {len(stages) * world} stages", flush=True)
    return first


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
