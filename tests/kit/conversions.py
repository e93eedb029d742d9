"""A checkpoint to convert, and the parts of the result that are compared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fsdp_optim
from kit.checkpoint_format import all_bytes
from kit.compare import check_same
from kit.options import state_for

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
    fsdp_optim.save(
        path,
        model,
        optim,
        state=state_for(extra),
        step=seed + 1,
        options=fsdp_optim.SaveOptions(durable=False, progress=False),
        overwrite=True,
    )


def data_of(path: Path) -> dict[str, bytes]:
    """The bytes of all files but the manifest, which has the time and the token of its save."""
    contents = all_bytes(path)
    del contents["fsdp_optim.json"]
    return contents


def check_converted(path: Path, wanted: Path) -> None:
    """Raise unless two conversions have the same files, and nothing is beside the first one."""
    check_same("files", data_of(path), data_of(wanted))
    check_same(
        "beside it",
        [sibling.name for sibling in path.parent.iterdir() if sibling.name.startswith(path.name)],
        [path.name],
    )
    fsdp_optim.load(path)
