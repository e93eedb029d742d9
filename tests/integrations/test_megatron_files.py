"""Checkpoints in Megatron's own layout, in which the layers are an axis of a tensor, read through Views."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from kit.compare import check_same
from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions, View
from fsdp_optim.testing import run_on_ranks

LAYERS, WIDTH, GROUPS, QUERIES, SIZE, HIDDEN = 3, 6, 2, 2, 3, 4
QKV, FC1 = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc1.weight"
VIEWS = [
    View(
        QKV,
        "l (g (q + k + v) d) c",
        {f"decoder.layers.{{l}}.self_attention.{part}.weight": f"(g {part} d) c" for part in "qkv"},
        q=QUERIES,
        k=1,
        v=1,
        d=SIZE,
    ),
    View(FC1, "l (gate + up) c", {f"decoder.layers.{{l}}.mlp.{part}.weight": f"{part} c" for part in ("gate", "up")}),
]


def stored() -> dict[str, torch.Tensor]:
    """The tensors of a file, as Megatron's torch_dist format names them: one for all layers."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(LAYERS, GROUPS * (QUERIES + 2) * SIZE, WIDTH, generator=generator)
    return {QKV: qkv, FC1: torch.randn(LAYERS, 2 * HIDDEN, WIDTH, generator=generator)}


def wanted() -> dict[str, torch.Tensor]:
    """The weights of each layer, cut by hand."""
    files, parts = stored(), dict[str, torch.Tensor]()
    for layer in range(LAYERS):
        rows = files[QKV][layer].view(GROUPS, QUERIES + 2, SIZE, WIDTH)
        at = f"decoder.layers.{layer}"
        parts[f"{at}.self_attention.q.weight"] = rows[:, :QUERIES].reshape(-1, WIDTH)
        parts[f"{at}.self_attention.k.weight"] = rows[:, QUERIES].reshape(-1, WIDTH)
        parts[f"{at}.self_attention.v.weight"] = rows[:, QUERIES + 1].reshape(-1, WIDTH)
        parts[f"{at}.mlp.gate.weight"], parts[f"{at}.mlp.up.weight"] = files[FC1][layer].chunk(2)
    return parts


def apart() -> Any:
    """A model whose parameters are the parts."""
    root = nn.Module()
    for name, value in wanted().items():
        *path, last = name.split(".")
        module = root
        for text in path:
            if text not in module._modules:
                module.add_module(text, nn.Module())
            module = module.get_submodule(text)
        module.register_parameter(last, nn.Parameter(torch.zeros_like(value)))
    return root


def loaded(folder: str) -> None:
    """On one rank: each weight of a sharded model from the tensor of all layers."""
    from torch.distributed.fsdp import fully_shard

    model = apart()
    for layer in model.decoder.layers.children():
        fully_shard(layer)
    fully_shard(model)
    fsdp_optim.load(folder, model, options=LoadOptions(views=VIEWS, compare=True, progress=False))
    gathered = fsdp_optim.gather_full_model_state_dict(model, None)
    check_same("weights", dict(sorted(gathered.items())), dict(sorted(wanted().items())))


class TestLayersInOneTensor(unittest.TestCase):
    def test_a_file_of_dcp(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch_dcp.save(stored(), checkpoint_id=folder, no_dist=True)
            run_on_ranks(loaded, 1, folder)
            run_on_ranks(loaded, 2, folder)
