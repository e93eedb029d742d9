"""The golden checkpoint of version 3 of the format: with some of the weights, cast as they were saved.

`PYTHONPATH=tests python tests/checkpoint/test_golden_weights.py` makes it, once. That of version 2 is in test_golden.py.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same
from kit.golden import check_kept, check_written_alike, make
from torch import nn

import fsdp_optim

GOLDEN = Path(__file__).parents[1] / "data" / "golden-3"
GOLDEN_SHA256 = "80275df0990693ec2413ac236557c8c69e6bacc8acfb44b736a55234a109f6c4"
CHANGES = ("created_ns", "token", "checksum", "xxh3_64", "sequence")  # in the manifest, whenever something is saved


class Frozen(nn.Module):
    """A frozen weight with two names, one that trains, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 2, bias=False)
        self.same = self.base
        self.adapter = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor([1, 2]))


class Momentum(torch.optim.Optimizer):
    """An optimizer of this file's own, so that no version of torch changes what it keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})


def made(*, filled: bool) -> tuple[Frozen, Momentum]:
    model = Frozen()
    model.base.requires_grad_(False)
    optim = Momentum(list(model.adapter.parameters()))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).reshape(param.shape) / 4 if filled else torch.zeros(()))
        for param in model.adapter.parameters():
            optim.state[param] = {"exp_avg": param / 3 if filled else torch.zeros_like(param)}
    if not filled:
        model.count.zero_()  # type: ignore[operator,union-attr]
    return model, optim


def save(path: Path) -> None:
    model, optim = made(filled=True)
    fsdp_optim.save(
        path, model, optim, weights="trainable", options=fsdp_optim.SaveOptions(weights_dtype=torch.bfloat16), step=7
    )


class GoldenTest(unittest.TestCase):
    def test_it_is_still_what_it_was(self) -> None:
        check_kept(GOLDEN, GOLDEN_SHA256, 3)

    def test_it_is_loaded(self) -> None:
        wanted, wanted_optim = made(filled=True)
        model, optim = made(filled=False)
        fsdp_optim.load(
            GOLDEN, model, optim, weights="trainable", options=fsdp_optim.LoadOptions(cast=True, compare=True)
        )
        base = torch.zeros_like(wanted.base.weight)
        right = {**wanted.state_dict(), "base.weight": base, "same.weight": base}  # quarters, which bf16 has
        check_same("weights", dict(model.state_dict()), right)
        for param, other in zip(model.adapter.parameters(), wanted.adapter.parameters(), strict=True):
            check_same("state", dict(optim.state[param]), dict(wanted_optim.state[other]))

    def test_it_is_written_alike_today(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "golden-3"
            save(path)
            check_written_alike(path, GOLDEN, CHANGES)


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make(GOLDEN, save)}"')
