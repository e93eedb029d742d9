"""`load` fills models that were made on the meta device, sharded, and then given memory: tied, renamed and cast too."""

from __future__ import annotations

import tempfile
import unittest
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.compare import Differs, check_same, refused_on_ranks
from kit.local_parts import local_of
from kit.pretrained import build
from kit.wrapping import cpu
from kit.wraps import in_fsdp1, in_fsdp2
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
NAME, PREFIX = "gpt2, tied", "base."
KINDS = ("FSDP2", "FSDP1 flat", "FSDP1 orig")


def on_meta() -> Any:
    with torch.device("meta"):
        return build(NAME)


def materialised(kind: str, *, is_tied: bool = True) -> Any:
    """Sharded on the meta device, and then in memory that nobody has written. In FSDP1, `to_empty` takes tied weights apart."""
    model = on_meta()
    if kind == "FSDP2":
        sharded = in_fsdp2(model)
        sharded.to_empty(device="cpu")
    else:

        def with_memory(module: nn.Module) -> None:
            module.to_empty(device=torch.device("cpu"), recurse=False)
            if is_tied:
                model.tie_weights()

        sharded = in_fsdp1(model, param_init_fn=with_memory, use_orig_params=kind == "FSDP1 orig")
    with torch.no_grad():
        for param in sharded.parameters():
            param.fill_(float("nan"))
    return sharded


def weights_of(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    fsdp_optim.save(folder, model, options=fsdp_optim.SaveOptions(durable=False, progress=False), overwrite=True)
    return load_file(folder / "model.safetensors")


def load_all(root: Path, kind: str) -> None:
    with cpu():
        wanted = load_file(root / "pretrained" / "model.safetensors")
        model = materialised(kind)
        restored = fsdp_optim.load(root / "pretrained", model, options=fsdp_optim.LoadOptions(compare=True))
        check_same("the rest", (restored.missing_keys, restored.unexpected_keys), ((), ()))
        check_same("weights", dict(sorted(weights_of(model, root / "live").items())), dict(sorted(wanted.items())))

        model = materialised(kind)
        load = partial(fsdp_optim.load, root / "renamed", model)
        refused_on_ranks(
            "another dtype",
            partial(load, options=fsdp_optim.LoadOptions(rename={PREFIX: ""})),
            "StateError",
            "bfloat16",
            "cast=True",
        )
        refused_on_ranks(
            "other names", partial(load, options=fsdp_optim.LoadOptions(cast=True)), "StateError", "wte.weight"
        )
        if not all(bool(local_of(param).isnan().all()) for param in model.parameters()):
            raise Differs("a part was loaded")
        load(options=fsdp_optim.LoadOptions(rename={PREFIX: ""}, cast=True, compare=True))
        cast = {name: tensor.bfloat16().float() for name, tensor in sorted(wanted.items())}
        check_same("cast", dict(sorted(weights_of(model, root / "live").items())), cast)

        model = materialised(kind, is_tied=False)
        load = partial(fsdp_optim.load, root / "pretrained", model)
        if kind == "FSDP2":
            load(options=fsdp_optim.LoadOptions(compare=True))
            check_same("both names", local_of(model.lm_head.weight), local_of(model.transformer.wte.weight))
        else:  # nothing may stay uninitialised
            refused_on_ranks("not tied", load, "StateError", "lm_head.weight")


class MetaTest(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_a_model_without_values_is_filled(self, kind: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            build(NAME).save_pretrained(root / "pretrained")
            tensors = load_file(root / "pretrained" / "model.safetensors")
            (root / "renamed").mkdir()
            small = {f"{PREFIX}{name}": tensor.bfloat16() for name, tensor in tensors.items()}
            save_file(small, root / "renamed" / "model.safetensors")
            run_on_ranks(load_all, 2, root, kind)


if __name__ == "__main__":
    unittest.main()
