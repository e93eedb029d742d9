"""A checkpoint to convert, and the parts of the result that are compared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fsdp_optim
from kit.checkpoint_format import all_bytes
from kit.compare import check_same

MEMORY = 16 << 20


def save_some(path: Path, *, num_layers: int = 4, width: int = 512, seed: int = 0) -> None:
    """Save a model with Adam: with 4 layers of 512, 12 MiB in 7 units of tensors that begin and end anywhere."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width + index) for index in range(num_layers)))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    extra = {"seed": seed, "history": torch.arange(3)}
    fsdp_optim.save(path, model, optim, extra=extra, step=seed + 1, durable=False, overwrite=True, progress=False)


def data_of(path: Path) -> dict[str, bytes]:
    """The bytes of all files but the manifest, which has the time and the token of its save."""
    found = all_bytes(path)
    del found["fsdp_optim.json"]
    return found


def check_converted(path: Path, wanted: Path) -> None:
    """Raise unless two conversions have the same files, and nothing is beside the first one."""
    check_same("files", data_of(path), data_of(wanted))
    check_same("beside it", [one.name for one in path.parent.iterdir() if one.name.startswith(path.name)], [path.name])
    fsdp_optim.load(path)
