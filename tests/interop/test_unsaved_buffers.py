"""Buffers with persistent=False are in no checkpoint: a load names those that a model from the meta device has not filled."""

from __future__ import annotations

import logging
import re
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.compare import Differs, check_same, refused_on_ranks
from kit.log_texts import log_texts
from kit.pretrained import build
from kit.wrapping import cpu
from kit.wraps import in_fsdp1, in_fsdp2
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
LLAMA, ROTARY = "llama", "model.rotary_emb"
KINDS = ("FSDP2", "FSDP1 flat", "FSDP1 orig", "plain")
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


def materialised(kind: str, name: str = LLAMA) -> Any:
    """Made on the meta device, sharded, and then in memory that nobody has written: every value is NaN."""
    with torch.device("meta"):
        model = build(name)
    if kind.startswith("FSDP1"):

        def with_memory(module: nn.Module) -> None:
            module.to_empty(device=torch.device("cpu"), recurse=False)

        sharded = in_fsdp1(model, param_init_fn=with_memory, use_orig_params=kind == "FSDP1 orig")
    else:
        sharded = in_fsdp2(model) if kind == "FSDP2" else model
        sharded.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*sharded.parameters(), *sharded.buffers()):
            tensor.fill_(float("nan"))
    return sharded


def as_documented(model: nn.Module) -> None:
    """Run the lines between to_empty() and the load in docs/interop.md."""
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    lines = re.search(r"^model\.to_empty\(device=device\)\n(.+?)^fsdp_optim\.load", page, re.MULTILINE | re.DOTALL)
    if lines is None:
        raise Differs("docs/interop.md does not have the lines")
    exec(lines[1], {"model": model})


def load_llama(root: Path, kind: str) -> None:
    tokens = torch.tensor(TOKENS)
    with cpu(), torch.no_grad():
        wanted = build(LLAMA)(tokens).logits
        model = materialised(kind)
        with log_texts(logging.WARNING) as texts:
            fsdp_optim.load(root, model, options=fsdp_optim.LoadOptions(compare=True))
        named = [f"{ROTARY}.inv_freq" in text and f"{ROTARY}.original_inv_freq" in text for text in texts]
        check_same("one warning, with both buffers and what to do", (named, "to_empty()" in texts[0]), ([True], True))
        if torch.equal(model(tokens).logits, wanted):  # some kernels of attention make zeros of NaN
            raise Differs("the case does not need the buffers")
        model = materialised(kind)
        as_documented(model)
        with log_texts(logging.WARNING) as texts:
            fsdp_optim.load(root, model, options=fsdp_optim.LoadOptions(compare=True))
        check_same("warnings", texts, [])
        check_same("logits", model(tokens).logits, wanted)


class Table(nn.Module):
    """A model with buffers that are in no checkpoint, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("table", 1.0 / torch.arange(1, 9), persistent=False)
        self.register_buffer("cache", torch.zeros(8), persistent=False)
        self.register_buffer("places", torch.arange(8), persistent=False)
        self.register_buffer("empty", torch.zeros(0), persistent=False)
        self.register_buffer("kept", torch.ones(3))


def zeroed(model: nn.Module) -> nn.Module:
    """As in fresh memory, which is zero, and which nobody has written."""
    for module in model.modules():
        for params in (module._parameters, module._buffers):
            for name, value in params.items():
                fresh = torch.zeros(value.shape, dtype=value.dtype)  # type: ignore[union-attr]
                params[name] = nn.Parameter(fresh) if isinstance(value, nn.Parameter) else fresh  # type: ignore[assignment]
    return model


def on_meta_in_part(folder: str) -> None:
    model = Table()
    if torch.distributed.get_rank() == 1:
        model.table = model.table.to("meta")
    load = partial(
        fsdp_optim.load, folder, model, options=fsdp_optim.LoadOptions(process_group=torch.distributed.group.WORLD)
    )
    refused_on_ranks("on the meta device", load, "WrapperError", "table", "on rank 1", "persistent=False", "to_empty()")


class UnsavedBuffersTest(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_rotary_buffers_are_named_and_the_documented_lines_fill_them(self, kind: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            build(LLAMA).save_pretrained(folder)
            run_on_ranks(load_llama, 1 if kind == "plain" else 2, Path(folder), kind)

    def test_a_buffer_on_the_meta_device_is_an_error_on_all_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(f"{folder}/it", Table(), options=fsdp_optim.SaveOptions(durable=False))
            run_on_ranks(on_meta_in_part, 2, f"{folder}/it")

    def _warned(self, model: nn.Module, load: Callable[..., Any] = fsdp_optim.load) -> list[str]:
        with tempfile.TemporaryDirectory() as folder, log_texts(logging.WARNING) as texts:
            fsdp_optim.save(f"{folder}/it", Table(), options=fsdp_optim.SaveOptions(durable=False))
            load(f"{folder}/it", model)
        return texts

    def test_an_ordinary_model_is_loaded_without_a_word(self) -> None:
        self.assertEqual(self._warned(Table()), [])
        self.assertEqual(
            self._warned(Table().double(), partial(fsdp_optim.load, options=fsdp_optim.LoadOptions(cast=True))), []
        )

    def test_fresh_memory_is_known_by_the_weights_before_the_load(self) -> None:
        (text,) = self._warned(zeroed(Table()))
        for name in ("table", "cache", "places"):
            self.assertIn(name, text)
        self.assertNotIn("empty,", text)
        self.assertNotIn("kept", text)

    def test_buffers_that_were_computed_in_place_are_filled(self) -> None:
        model, wanted = zeroed(Table()), Table()
        for name, buffer in model.named_buffers():
            buffer.copy_(wanted.get_buffer(name))
        self.assertEqual(self._warned(model), [])

    def test_nan_is_named_in_any_model(self) -> None:
        for index in (0, 7):
            model = Table()
            model.table[index] = float("nan")
            (text,) = self._warned(model)
            self.assertIn("table", text)
            self.assertNotIn("cache", text)

    def test_a_full_dict_of_weights_is_a_load_too(self) -> None:
        model = Table()
        model.table.fill_(float("nan"))
        with log_texts(logging.WARNING) as texts:
            fsdp_optim.scatter_full_model_state_dict(model, Table().state_dict())
        self.assertEqual(["table" in text for text in texts], [True])


if __name__ == "__main__":
    unittest.main()
