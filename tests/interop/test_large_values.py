"""Values of modules are a part of the model, so that files of other libraries are read with them, however large they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp_optim

NUMEL = (64 << 20) // 4 + 5  # more bytes than are read of a value of the trainer


class Scales(nn.Module):
    def __init__(self, numel: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scales = torch.arange(numel, dtype=torch.float32)

    def get_extra_state(self) -> Any:
        return {"scales": self.scales}

    def set_extra_state(self, state: Any) -> None:
        self.scales = state["scales"]


def saved_as(form: str, path: Path) -> None:
    model = nn.Sequential(Scales(NUMEL))
    options = fsdp_optim.SaveOptions(durable=False, progress=False)
    if form == "dcp of torch":
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    elif form == "torch.save":
        torch.save(model.state_dict(), path)
    elif form == "dcp":
        fsdp_optim.save(path, model, format="dcp", options=options)
    else:
        fsdp_optim.save(path.with_name("own"), model, options=options)
        fsdp_optim.convert(path.with_name("own"), path, format="torch")


@pytest.mark.parametrize("form", ["dcp", "dcp of torch", "torch", "torch.save"])
def test_extra_state(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("saved.pt" if form.startswith("torch") else "saved")
    saved_as(form, path)
    model = nn.Sequential(Scales())
    fsdp_optim.load(path, model)
    assert torch.equal(model[0].scales, torch.arange(NUMEL, dtype=torch.float32))


def test_a_small_file_that_would_fill_the_memory(tmp_path: Path) -> None:
    """Tensors that are views of one tensor in a file are tensors of their own in memory."""
    model = nn.Sequential(Scales())
    views = [torch.zeros(1 << 20).view(1 << 10, 1 << 10)]
    views += [views[0].view(-1, 1 << 9) for _ in range(40)]
    torch.save({**model.state_dict(), "0._extra_state": {"scales": views}}, tmp_path / "saved.pt")
    with pytest.raises(fsdp_optim.CheckpointError, match=r"0\._extra_state has tensors of 171966464 bytes"):
        fsdp_optim.load(tmp_path / "saved.pt", model)
