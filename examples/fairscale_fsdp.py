"""Train under fairscale's FSDP, and resume at any number of ranks: from one file with the full state, or from a checkpoint.

    pip install '.[fairscale]'    # in a clone of the repository
    torchrun --nproc-per-node 2 examples/fairscale_fsdp.py --file full.pt --last 20
    torchrun --nproc-per-node 3 examples/fairscale_fsdp.py --file full.pt --last 40           # continues from step 20
    torchrun --nproc-per-node 2 examples/fairscale_fsdp.py --root run --last 20               # without gathering anything

`--file` is what fairscale's own methods do, with the same names: one rank gets the full state and writes it.
With `--root` each rank writes and reads its own part. It runs on CPUs too, where fairscale by itself does not.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP  # fairscale's class, with two methods of this library
from fsdp_optim.testing import fairscale_on_cpu


def save_file(path: str, step: int, model: FSDP, optim: torch.optim.Optimizer) -> None:
    """One file with the full weights and the full optimizer state, which a plain model and its optimizer load too."""
    weights = model.state_dict()  # both lines by all ranks
    full = model.gather_full_optim_state_dict(optim, recipient_rank=0)
    if full is not None:  # on rank 0
        torch.save({"step": step, "model": weights, "optim": full}, path)
    dist.barrier()  # the file is there


def load_file(path: str, model: FSDP, optim: torch.optim.Optimizer) -> int:
    """Load this rank's part of the file, at any world size. Returns the step; 0 where there is no file."""
    if not os.path.exists(path):
        return 0
    saved = torch.load(path, mmap=True)
    model.load_state_dict(saved["model"])
    fsdp_optim.load_optim_state_dict(optim, model.get_shard_from_optim_state_dict(saved["optim"]))
    return int(saved["step"])


def train(model: nn.Module, optim: torch.optim.Optimizer, step: int, device: torch.device) -> None:
    """One step on this rank's own batch."""
    torch.manual_seed(1000 * step + dist.get_rank())
    batch = torch.randn(32, 16, device=device)
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    optim.zero_grad()
    loss.backward()
    optim.step()


def main(arguments: list[str] | None = None) -> int:
    """Train up to a step; returns the step that was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--file", help="one file with the full state, which all ranks can read")
    where.add_argument("--root", help="a folder for checkpoints that all ranks share, or a URL")
    parser.add_argument("--last", type=int, default=20, help="the number of the last step")
    asked = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")

    with fairscale_on_cpu():  # does nothing where there are GPUs
        torch.manual_seed(0)  # the same weights on all ranks
        inner = FSDP(nn.Linear(64, 64).to(device))
        model = FSDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), inner, nn.GELU(), nn.Linear(64, 1)).to(device))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if asked.file:
            first = load_file(asked.file, model, optim)
            for step in range(first + 1, asked.last + 1):
                train(model, optim, step, device)
            save_file(asked.file, asked.last, model, optim)
        else:
            with fsdp_optim.CheckpointManager(asked.root, model, optim, every=10, keep_last=2) as manager:
                first = manager.resume()
                for step in range(first + 1, asked.last + 1):
                    train(model, optim, step, device)
                    manager.step(step)
    if dist.get_rank() == 0:
        print(f"trained from step {first} to step {asked.last}", flush=True)
    return asked.last


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
