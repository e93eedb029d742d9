"""The golden checkpoint of version 4 of the format: with tensors in trees of `state=`.

`PYTHONPATH=tests python tests/checkpoint/test_golden_trees.py` makes it, once. Those of other versions are in test_golden.py and
test_golden_weights.py.
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

GOLDEN = Path(__file__).parents[1] / "data" / "golden-4"

GOLDEN_SHA256 = "f6f43125b5d0b3f8f5aef88ba5755f45c76be2ebe9dd46f3505efcb0e148da26"
CHANGES = ("created_ns", "token", "checksum", "xxh3_64", "sequence")  # in the manifest, whenever something is saved


def trees(*, filled: bool) -> dict[str, Any]:
    def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(count) / 4 if filled else torch.zeros(count)).to(dtype)

    return {
        "ema": {"shadow": {"0.weight": numbers(6).reshape(2, 3), "0.bias": numbers(2, torch.bfloat16)}, "decay": 0.5},
        "listed": [numbers(3, torch.int64), (numbers(1), "text")],
    }


def made(*, filled: bool) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).reshape(param.shape) / 4 if filled else torch.zeros(()))
    return model


def save(path: Path) -> None:
    state = trees(filled=True) | {"own": fsdp_optim.per_rank(torch.ones(2))}
    fsdp_optim.save(path, made(filled=True), state=state, step=7)


class GoldenTest(unittest.TestCase):
    def test_it_is_still_what_it_was(self) -> None:
        check_kept(GOLDEN, GOLDEN_SHA256, 4)

    def test_it_is_loaded(self) -> None:
        model, into, wanted = made(filled=False), trees(filled=False), trees(filled=True)
        result = fsdp_optim.load(GOLDEN, model, state={**into, "own": fsdp_optim.per_rank(None)})
        check_same("weights", dict(model.state_dict()), dict(made(filled=True).state_dict()))
        check_same("filled in place", into["ema"]["shadow"], wanted["ema"]["shadow"])
        check_same("in the result", dict(result.state), {**wanted, "own": torch.ones(2)})

    def test_it_is_written_alike_today(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "golden-4"
            save(path)
            check_written_alike(path, GOLDEN, CHANGES)


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make(GOLDEN, save)}"')
