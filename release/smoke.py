"""Try an installed wheel in a folder that has no sources: `python release/smoke.py`, where fsdp_optim and torch are installed.

It trains a small model on one rank, saves, loads, and calls the command line. fairscale need not be there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fsdp_optim


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 and its optimizer after some steps."""
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for param in model.parameters():  # without a forward, which FSDP2 of torch 2.6 has on GPUs only
            param.grad = torch.ones_like(param)
        optim.step()
    return model, optim


def main() -> None:
    """Raise unless the package works."""
    here = Path(__file__).resolve().parents[1]
    assert here not in Path(fsdp_optim.__file__).resolve().parents, f"not the installed package: {fsdp_optim.__file__}"
    assert importlib.metadata.version("fsdp-optim") == fsdp_optim.__version__
    assert importlib.resources.files(fsdp_optim).joinpath("py.typed").is_file()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model, optim = trained(2)
        with fsdp_optim.CheckpointManager(folder, model, optim, every=1) as manager:
            manager.step(1)
        before = fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name")
        model, optim = trained(1)
        assert fsdp_optim.CheckpointManager(folder, model, optim, every=1).resume() == 1
        after = fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name")
        assert before is not None
        assert after is not None
        for name, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][name][key])), (name, key)
        checkpoint = fsdp_optim.latest(folder)
        subprocess.run([sys.executable, "-m", "fsdp_optim", "verify", str(checkpoint)], check=True, cwd=folder)
    dist.destroy_process_group()
    print(f"fsdp-optim {fsdp_optim.__version__} works with torch {torch.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
