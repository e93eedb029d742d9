"""Train with FSDP2, save in the background, resume at any number of ranks, and stop well when the job is preempted.

    torchrun --nproc-per-node 2 examples/fsdp2_manager.py --root checkpoints --last 200
    torchrun --nproc-per-node 4 examples/fsdp2_manager.py --root checkpoints --last 400    # continues from step 200

It runs on CPUs too. Press Ctrl-C, or send SIGTERM to a rank: all ranks save the same step and stop.
"""

from __future__ import annotations

import argparse
import logging
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_optim


def main(arguments: list[str] | None = None) -> int:
    """Train up to a step; returns the step that was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a folder that all ranks share, or a URL")
    parser.add_argument("--last", type=int, default=200, help="the number of the last step")
    parser.add_argument("--every", type=int, default=50, help="save every so many steps")
    asked = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000)
    torch.manual_seed(1 + rank)  # other data, and other dropout, on each rank

    with fsdp_optim.CheckpointManager(
        asked.root,
        model,
        optim,
        state={"scheduler": scheduler},
        every=asked.every,
        keep_last=2,
        keep_best=1,
        options=fsdp_optim.ManagerOptions(signals=[signal.SIGTERM, signal.SIGINT]),
    ) as manager:
        step = manager.resume()  # 0 where there is nothing
        first = step
        for step in range(first + 1, asked.last + 1):
            batch = torch.randn(32, 16, device=device)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            scheduler.step()
            manager.step(step, metric=loss.item() if step % asked.every == 0 else None)
            if manager.should_stop:
                break
        else:
            manager.save(step)  # nothing, if the last step was saved already
    if rank == 0:
        print(f"trained from step {first} to step {step}", flush=True)
    return step


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fsdp_optim").setLevel(logging.WARNING)
    main()
    dist.destroy_process_group()
