"""The golden checkpoint of version 5 of the format: several models, each in a folder, and a value of the trainer.

`PYTHONPATH=tests python tests/checkpoint/test_golden_models.py` makes it, once. Those of other versions are in test_golden.py,
test_golden_weights.py and test_golden_trees.py.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import torch
from kit.checkpoint_format import all_bytes, read_manifest
from kit.compare import check_same
from kit.golden import check_kept, make, without
from kit.several import Net, content, numbers, plain

import fsdp_optim

GOLDEN = Path(__file__).parents[1] / "data" / "golden-5"

GOLDEN_SHA256 = "27a1f15deec90f6b989ccc29b555c95725da6a5b548b350670519e242c32708c"
CHANGES = ("created_ns", "token", "checksum", "xxh3_64", "sequence")  # in the manifest, whenever something is saved
NAMES = ("actor", "critic", "ema")


class Momentum(torch.optim.Optimizer):
    """An optimizer of this file's own, so that no version of torch changes what it keeps."""

    def __init__(self, model: Net) -> None:
        super().__init__(
            [{"params": [model.inner.weight, model.outer.weight]}, {"params": [model.inner.bias]}], {"lr": 0.5}
        )


def made(*, filled: bool) -> tuple[dict[str, Net], dict[str, Momentum]]:
    models = {name: plain(name, filled) for name in NAMES}
    optims = {name: Momentum(models[name]) for name in NAMES[:2]}
    for number, (name, optim) in enumerate(optims.items() if filled else ()):
        optim.param_groups[1]["lr"] = 0.25 * (1 + number)
        for param in models[name].parameters():
            optim.state[param] = {"momentum": numbers(param, number + 0.5), "step": torch.tensor(3.0 + number)}
    return models, optims


def save(path: Path) -> None:
    models, optims = made(filled=True)
    state = {"n": 3, "tree": {"x": torch.arange(4.0)}}
    fsdp_optim.save(path, models, optims, state=state, step=7, options=fsdp_optim.SaveOptions(max_file_size=500))


class GoldenTest(unittest.TestCase):
    def test_it_is_still_what_it_was(self) -> None:
        check_kept(GOLDEN, GOLDEN_SHA256, 5)

    def test_it_is_loaded(self) -> None:
        models, optims = made(filled=False)
        result = fsdp_optim.load(GOLDEN, models, optims, state={"n": 0, "tree": {"x": torch.zeros(4)}})
        right, right_optims = made(filled=True)
        for name in NAMES:
            check_same(name, content(models[name], optims.get(name)), content(right[name], right_optims.get(name)))
        check_same("in the result", dict(result.state), {"n": 3, "tree": {"x": torch.arange(4.0)}})

    def test_it_is_written_alike_today(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "golden-5"
            save(path)
            check_same("manifest", without(CHANGES, read_manifest(path)), without(CHANGES, read_manifest(GOLDEN)))
            files, golden = all_bytes(path), all_bytes(GOLDEN)
            check_same("names", sorted(files), sorted(golden))
            for name in files:
                if name.endswith((".safetensors", ".sums")):
                    check_same(name, files[name], golden[name])


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make(GOLDEN, save)}"')
