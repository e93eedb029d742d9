"""Parameters and buffers that torch conjugates or negates when they are read are saved, loaded and scattered as all others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.compare import check_same
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Rotary(nn.Module):
    """`lazy`: which view of `freqs` it has: "conj", "neg" or a parameter that is one."""

    def __init__(self, lazy: str, number: float = 0.0) -> None:
        super().__init__()
        angles = torch.arange(4.0) + number
        freqs = torch.polar(torch.ones(4), angles)
        self.weight = nn.Parameter(torch.full((3,), number))
        self.register_buffer("freqs", freqs)
        if lazy == "parameter":
            self.inverse = nn.Parameter(freqs.clone().conj())
        else:
            self.register_buffer("inverse", freqs.clone().conj() if lazy == "conj" else freqs.clone().conj().imag)
        self.last = nn.Parameter(torch.full((2,), number))


def check(lazy: str, folder: str) -> None:
    source, wanted = Rotary(lazy, 0.5), Rotary(lazy, 0.5).state_dict()
    assert source.inverse.is_conj() or source.inverse.is_neg()
    options: Any = {"process_group": torch.distributed.group.WORLD} if torch.distributed.is_initialized() else {}
    fsdp_optim.save(folder, source, options=fsdp_optim.SaveOptions(**options))
    target = Rotary(lazy)
    fsdp_optim.load(folder, target, options=fsdp_optim.LoadOptions(**options, compare=True))
    check_same("loaded", dict(target.state_dict()), dict(wanted))
    assert target.inverse.is_conj() or target.inverse.is_neg()  # the tensor that the model had
    call = fsdp_optim.CallOptions(**options)
    full = fsdp_optim.gather_full_model_state_dict(source, None, options=call)
    target = Rotary(lazy)
    fsdp_optim.scatter_full_model_state_dict(target, full, options=call)
    check_same("scattered", dict(target.state_dict()), dict(wanted))


@pytest.mark.parametrize("lazy", ["conj", "neg", "parameter"])
def test_lazy_views(lazy: str, tmp_path: Path) -> None:
    check(lazy, str(tmp_path / "a"))


def on_ranks(folder: str) -> None:
    for lazy in ("conj", "neg", "parameter"):
        check(lazy, f"{folder}/{lazy}")


def test_lazy_views_on_ranks() -> None:
    run_on_ranks(on_ranks, 2, tempfile.mkdtemp())
