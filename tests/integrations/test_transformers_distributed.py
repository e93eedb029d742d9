"""transformers' own distributed models: saved by its own calls, and resumed on other meshes, to the bit."""

from __future__ import annotations

import contextlib
import os
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, gathered_state, refused, refused_on_ranks
from kit.optimizers import step_by_values
from kit.pretrained import build, transformers
from parameterized import parameterized
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.integrations import transformers as plugin
from fsdp_optim.integrations.common.needed import MissingNameError
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
QUIET = {"save_options": fsdp_optim.SaveOptions(durable=False, progress=False)}
MESHES = {"FSDP2": (1, 2), "TP": (2, 1), "both": (2, 2), "three": (1, 3), "none": (1, 1)}
"""(tp_size, fsdp_size); llama has 2 heads."""


@contextlib.contextmanager
def enabled(on: bool = True) -> Iterator[None]:
    local = {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, local):
        if on:
            plugin.enable(**QUIET)
        try:
            yield
        finally:
            plugin.disable()


def opened(folder: Path, mesh: str) -> Any:
    """`from_pretrained` on a mesh."""
    from transformers.distributed import DistributedConfig

    tp, fsdp = MESHES[mesh]
    config = None if mesh == "none" else DistributedConfig(tp_size=tp, fsdp_size=fsdp)
    return transformers().AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def save(hub: Path, root: Path, mesh: str, on: bool, same: bool) -> dict[str, Any]:
    """Train two steps, and save by transformers' own calls. `same`: the optimizer into the folder of the weights."""
    with enabled(on):
        from transformers.distributed import save_optimizer_distributed

        model = opened(hub, mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(2):
            step_by_values(model, optim, number)
        for _ in range(2):  # the second save replaces the first
            model.save_pretrained(root / "model", distributed_checkpoint=True)
            save_optimizer_distributed(model, optim, str(root / ("model" if same else "optim")))
        return gathered_state(model, optim)


def load(root: Path, mesh: str, same: bool) -> dict[str, Any]:
    with enabled():
        from transformers.distributed import load_optimizer_distributed

        model = opened(root / "model", mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=0.5)
        load_optimizer_distributed(model, optim, str(root / ("model" if same else "optim")))
        check_same("lr", optim.param_groups[0]["lr"], 0.01)
        return gathered_state(model, optim)


def load_in_place(root: Path, mesh: str, seed: Path) -> dict[str, Any]:
    with enabled():
        from transformers.distributed.checkpoint import _load_model_checkpoint_distributed

        model = opened(seed, mesh)
        _load_model_checkpoint_distributed(model, root / "model")
        return {"weights": dict(sorted(fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None).items()))}


def mistaken(hub: Path, root: Path) -> None:
    with enabled():
        from transformers.distributed import save_optimizer_distributed

        model = opened(hub, "FSDP2")
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step_by_values(model, optim, 0)
        save_optimizer_distributed(model, optim, str(root / "here"))
        refused_on_ranks(
            "the optimizer first",
            lambda: model.save_pretrained(root / "here", distributed_checkpoint=True),
            "CheckpointError",
            "save_optimizer_distributed after",
        )
        check_same("untouched", fsdp_optim.inspect(root / "here").has_optim, True)


class DistributedTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.hub = self.root / "hub"
        build("llama").save_pretrained(self.hub)

    @parameterized.expand(
        [
            ("FSDP2", 2, "three", 3, False),
            ("FSDP2", 2, "TP", 2, True),
            ("TP", 2, "FSDP2", 2, False),
            ("both", 4, "FSDP2", 2, True),
            ("FSDP2", 2, "both", 4, False),
        ]
    )
    def test_a_run_resumes_on_another_mesh(self, saved: str, num: int, loaded: str, ranks: int, same: bool) -> None:
        wanted = run_on_ranks(save, num, self.hub, self.root, saved, True, same)[0]
        states = run_on_ranks(load, ranks, self.root, loaded, same)
        for state in states:
            check_same("resumed", state, wanted)
        stored = load_file(self.root / "model" / "model.safetensors")
        check_same("the file", dict(sorted(stored.items())), wanted["weights"])
        self.assertTrue((self.root / "model" / "config.json").exists())
        whole = transformers().AutoModelForCausalLM.from_pretrained(self.root / "model")
        check_same("without ranks", dict(sorted(whole.state_dict().items())), wanted["weights"])

    def test_what_transformers_has_written_is_read(self) -> None:
        wanted = run_on_ranks(save, 2, self.hub, self.root, "FSDP2", False, False)[0]
        for state in run_on_ranks(load_in_place, 3, self.root, "three", self.hub):
            check_same("in place", state["weights"], wanted["weights"])
        for state in run_on_ranks(load, 2, self.root, "FSDP2", False):
            check_same("resumed", state, wanted)

    def test_weights_do_not_replace_an_optimizer(self) -> None:
        run_on_ranks(mistaken, 2, self.hub, self.root)

    def test_a_version_without_a_name_is_refused(self) -> None:
        package = transformers()
        checkpoint = __import__("transformers.distributed.checkpoint", fromlist=["x"])
        before = checkpoint.save_optimizer_distributed
        del checkpoint.save_optimizer_distributed
        try:
            refused(plugin.enable, MissingNameError, "save_optimizer_distributed", package.__version__)
        finally:
            checkpoint.save_optimizer_distributed = before


if __name__ == "__main__":
    unittest.main()
