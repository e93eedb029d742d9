"""Of several files of weights in one folder, `load` reads those that `from_pretrained` of the real transformers reads."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, refused
from kit.folders import SharedFolder
from kit.pretrained import SIZES, transformers
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
SMALL = 3000  # bytes of one file, where a model is split


def llama(seed: int) -> Any:
    package = transformers()
    torch.default_generator.manual_seed(seed)
    model = package.LlamaForCausalLM(package.LlamaConfig(**SIZES, num_key_value_heads=1))
    model.units = ("model.layers.0", "model.layers.1", "")
    return model


def whole(place: Path, seed: int) -> None:
    llama(seed).save_pretrained(place)


def split(place: Path, seed: int) -> None:
    llama(seed).save_pretrained(place, max_shard_size=SMALL)


def one_bin(place: Path, seed: int) -> None:
    torch.save(llama(seed).state_dict(), place / "pytorch_model.bin")


def split_bin(place: Path, seed: int) -> None:
    """As transformers before 5 wrote it."""
    state = llama(seed).state_dict()
    files = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in state if files[name] == file}, place / file)
    (place / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def other(place: Path, seed: int) -> None:
    """safetensors that transformers does not look for."""
    whole(place / "new", seed)
    os.replace(place / "new" / "model.safetensors", place / "consolidated.safetensors")


def optimizer(place: Path, seed: int) -> None:
    """Beside the weights, as in the folder of a Trainer."""
    model = llama(seed)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save(optim.state_dict(), place / "optimizer.pt")


def by_config(place: Path, seed: int) -> None:
    """The config names the file."""
    other(place, seed)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "transformers_weights": "consolidated.safetensors"}))


# What is written one after the other, each with its seed, and the seed of what `from_pretrained` reads.
CASES: dict[str, tuple[tuple[Callable[[Path, int], None], ...], int]] = {
    "split, then whole": ((split, whole), 2),
    "whole, then split": ((whole, split), 1),
    "split, whole, then split": ((split, whole, split), 2),
    "whole and a bin": ((whole, one_bin), 1),
    "split and a bin": ((split, one_bin), 1),
    "bins of both kinds": ((split_bin, one_bin), 2),
    "a bin, then bins": ((one_bin, split_bin), 1),
    "others and a bin": ((other, one_bin), 2),
    "others and bins": ((other, split_bin), 2),
    "others and split": ((split, other), 1),
    "by config": ((whole, by_config), 2),
    "by config, and split": ((split, by_config), 2),
    "by config, and an optimizer": ((whole, by_config, optimizer), 2),
    "split, then whole, and an optimizer": ((split, whole, optimizer), 2),
    "whole, then split, and an optimizer": ((whole, split, optimizer), 1),
    "bins of both kinds, and an optimizer": ((split_bin, one_bin, optimizer), 2),
}


def read_all(root: Path) -> None:
    """On two ranks: the same as `from_pretrained`, which reads the files of the seed that the table says."""
    package = transformers()
    for name, (_, seed) in CASES.items():
        wanted = package.LlamaForCausalLM.from_pretrained(root / name).state_dict()
        check_same(f"{name}: transformers", dict(wanted), dict(llama(seed).state_dict()))
        with cpu():
            model = WRAPPERS["FSDP2"](llama(9))
            fsdp_optim.load(root / name, model, options=fsdp_optim.LoadOptions(progress=False))
        weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None) or {}
        check_same(name, dict(sorted(weights.items())), dict(sorted(wanted.items())))


def write_distributed(root: Path) -> None:
    """On two ranks: what `save_pretrained(..., distributed_checkpoint=True)` writes of a model on a mesh."""
    from transformers.distributed import checkpoint

    model = llama(5)
    with cpu():
        checkpoint._save_model_checkpoint_distributed(WRAPPERS["FSDP2"](model), root / "distributed")
    if dist.get_rank() == 0:
        model.config.save_pretrained(root / "distributed")


def read_distributed(root: Path) -> None:
    """On three ranks."""
    with cpu():
        model = WRAPPERS["FSDP2"](llama(9))
        restored = fsdp_optim.load(root / "distributed", model, options=fsdp_optim.LoadOptions(progress=False))
    weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None) or {}
    check_same("nothing else", (restored.missing_keys, restored.unexpected_keys), ((), ()))
    check_same("distributed", dict(sorted(weights.items())), dict(sorted(llama(5).state_dict().items())))


def warn(root: Path) -> list[str]:
    """On two ranks: the lines about two sets of weights, of each rank."""
    lines: list[str] = []
    log = logging.getLogger("fsdp_optim")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        places = ("whole, then split", "split, then whole", "others and split", "whole, then split, and an optimizer")
        for name in places:
            fsdp_optim.load(
                root / name, llama(9), options=fsdp_optim.LoadOptions(progress=False, process_group=dist.group.WORLD)
            )
    finally:
        log.removeHandler(handler)
    return [line for line in lines if "each with weights" in line]


class OrderOfFilesTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        for name, (writers, _) in CASES.items():
            place = cls.root / name
            place.mkdir()
            llama(0).config.save_pretrained(place)
            for number, write in enumerate(writers):
                write(place, number + 1)

    def test_as_from_pretrained(self) -> None:
        run_on_ranks(read_all, 2, self.root)

    def test_the_distributed_checkpoint_of_transformers(self) -> None:
        run_on_ranks(write_distributed, 2, self.root)
        run_on_ranks(read_distributed, 3, self.root)

    def test_two_sets_of_weights_are_named_once(self) -> None:
        first, second = run_on_ranks(warn, 2, self.root)
        self.assertEqual((len(first), second), (2, []))
        self.assertIn("has model.safetensors and model.safetensors.index.json, each with weights", first[0])
        self.assertIn(f"load {self.root / 'whole, then split' / 'model.safetensors.index.json'}", first[0])

    @parameterized.expand([("whole, then split", 2), ("split, whole, then split", 3)])
    def test_the_path_of_the_index_reads_the_others(self, name: str, seed: int) -> None:
        model = llama(9)
        fsdp_optim.load(
            self.root / name / "model.safetensors.index.json", model, options=fsdp_optim.LoadOptions(progress=False)
        )
        check_same(name, dict(model.state_dict()), dict(llama(seed).state_dict()))

    def test_converted(self) -> None:
        for name, (_, seed) in CASES.items():
            if "optimizer" not in name:
                new = self.root / "converted"
                fsdp_optim.convert(
                    self.root / name, new, options=fsdp_optim.ConvertOptions(progress=False), overwrite=True
                )
                model = llama(9)
                fsdp_optim.load(new, model, options=fsdp_optim.LoadOptions(progress=False))
                check_same(name, dict(model.state_dict()), dict(llama(seed).state_dict()))

    def test_a_config_that_names_no_file(self) -> None:
        """Or a file outside: it does not count, and transformers raises an error of its own."""
        place = self.own_folder() / "model"
        shutil.copytree(self.root / "whole and a bin", place)
        config = json.loads((place / "config.json").read_text())
        for named in ("none.safetensors", "../x.safetensors", 3, None):
            (place / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
            model = llama(9)
            fsdp_optim.load(place, model, options=fsdp_optim.LoadOptions(progress=False))
            check_same("by the usual name", dict(model.state_dict()), dict(llama(1).state_dict()))
        (place / "model.safetensors").unlink()
        shutil.copy(self.root / "others and a bin" / "consolidated.safetensors", place / "a.safetensors")
        (place / "pytorch_model.bin").unlink()
        shutil.copy(place / "a.safetensors", place / "b.safetensors")
        refused(
            partial(fsdp_optim.load, place, llama(9)), CheckpointError, "a.safetensors, b.safetensors", "give the path"
        )
