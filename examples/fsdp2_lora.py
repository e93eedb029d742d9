"""Train LoRA adapters of a frozen model in FSDP2, and resume at any number of ranks from folders that PEFT opens.

    pip install '.[peft]'    # in a clone of the repository
    torchrun --nproc-per-node 2 examples/fsdp2_lora.py --root adapters --last 20
    torchrun --nproc-per-node 4 examples/fsdp2_lora.py --root adapters --last 40    # continues from step 20

It runs on CPUs too. Each folder has the adapters, their config and the state of the optimizer, and not the base:
`PeftModel.from_pretrained(base, "adapters/step-20")` opens it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_optim.integrations import peft as fsdp_peft


def base_model() -> nn.Module:
    """The model that stays as it is: the same on all ranks, and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def main(arguments: list[str] | None = None) -> int:
    """Train up to a step; returns the step that was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a folder that all ranks share, or a URL")
    parser.add_argument("--last", type=int, default=20, help="the number of the last step")
    parser.add_argument("--every", type=int, default=10, help="save every so many steps")
    asked = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")

    model = get_peft_model(base_model(), LoraConfig(r=4, target_modules=["0", "2"], modules_to_save=["4"])).to(device)
    for layer in model.get_base_model():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    restored = fsdp_peft.resume(asked.root, model, optim)
    first = restored.step or 0 if restored is not None else 0
    torch.manual_seed(1000 * first + rank)
    for step in range(first + 1, asked.last + 1):
        batch = torch.randn(32, 16, device=device)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % asked.every == 0 or step == asked.last:
            handle = fsdp_peft.async_save(f"{asked.root}/step-{step}", model, optim, step=step, overwrite=True)
    if asked.last > first:
        handle.wait()
    if rank == 0:
        print(f"trained from step {first} to step {asked.last}", flush=True)
    return asked.last


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
