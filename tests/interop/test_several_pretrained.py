"""Folders of several models are those of transformers: from_pretrained opens each, with equal outputs."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.pretrained import build, tensors_of, transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.plugins import OwnFormat
from fsdp_optim.testing import run_on_ranks

MODELS = {"actor": "llama, tied", "critic": "bert", "ema": "llama, tied"}
SMALL = 12_000  # bytes of one file, so that some are split
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def changed(name: str) -> Any:
    """The model of a name, with values of its own."""
    model = build(MODELS[name])
    generator = torch.Generator().manual_seed(sorted(MODELS).index(name))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.empty(param.shape).normal_(0, 0.1, generator=generator).to(param.dtype))
    return model


def save_all(root: Path) -> None:
    live, beside = {}, []
    for name in MODELS:
        model = changed(name)
        beside.append((f"{name}/config.json", model.config.to_json_string().encode()))
        for path in model.units if name == "actor" else ():
            fully_shard(model.get_submodule(path))
        live[name] = model if name == "actor" else nn.parallel.DistributedDataParallel(model)
    optims = {name: torch.optim.AdamW(live[name].parameters(), lr=0.1) for name in ("actor", "critic")}
    for number, small in enumerate((SMALL, 4_000_000_000)):
        options = fsdp_optim.SaveOptions(durable=False, progress=False, max_file_size=small)
        fsdp_optim.save(root / f"{number}", live, optims, format=OwnFormat(beside=tuple(beside)), options=options)


class PretrainedTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    def test_each_folder_is_opened(self) -> None:
        package = transformers()
        classes = {"critic": package.AutoModelForSequenceClassification}
        for number in range(2):
            indexes = [path.parent.name for path in (self.root / f"{number}").glob("*/model.safetensors.index.json")]
            self.assertEqual(bool(indexes), number == 0)
            for name in MODELS:
                folder = self.root / f"{number}" / name
                loaded, info = classes.get(name, package.AutoModelForCausalLM).from_pretrained(
                    str(folder), output_loading_info=True, local_files_only=True
                )
                self.assertEqual([list(value) for value in info.values() if value], [])
                expected = changed(name)
                check_same(f"{number} {name}", tensors_of(loaded), tensors_of(expected))
                torch.testing.assert_close(outputs(loaded), outputs(expected), rtol=1e-5, atol=1e-6)

    def test_load_takes_a_folder_of_one(self) -> None:
        model = build(MODELS["actor"])
        fsdp_optim.load(self.root / "0" / "actor", model, options=fsdp_optim.LoadOptions(compare=True))
        check_same("tensors", tensors_of(model), tensors_of(changed("actor")))


if __name__ == "__main__":
    unittest.main()
