"""A folder of `save` opens in Hugging Face's `from_pretrained`, whatever the model was wrapped in: to the bit, and tied.

transformers is imported by the ranks, which are told to stay away from the network.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_refused, check_same, error_text
from kit.folders import SharedFolder
from kit.optimizers import stepped
from kit.options import as_options
from kit.pretrained import build, tensors_of, ties_of
from kit.tables import Table
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
MODELS = (
    "llama, tied",
    "llama, bfloat16",
    "gpt2, tied",
    "bert",
    "bert for masked words, tied",
    "t5, tied",
    "resnet, with buffers",
)
WRAPPED_IN = ("FSDP2", "fairscale flat", "fairscale non-flat", "FSDP1 flat", "plain")
IN_EVERY_WRAPPER = (
    "gpt2, tied",
    "resnet, with buffers",
)  # the files are the same whatever wrote them: see test_save_load_matrix
SMALL = 3000  # bytes of one file, where a model is split


CASES = [
    (name, wrapper, how)
    for name, wrapper, how in itertools.product(MODELS, WRAPPED_IN, ("whole", "split"))
    if wrapper == "FSDP2" or name in IN_EVERY_WRAPPER
]
SOON = [
    case
    for case in CASES
    if case[:2] in (("llama, bfloat16", "FSDP2"), ("gpt2, tied", "FSDP2"))
    or case in (("gpt2, tied", "fairscale flat", "whole"), ("resnet, with buffers", "FSDP1 flat", "split"))
]
"""The others, in `make test-long` only, are more models, each with names of its own."""
LATER = [case for case in CASES if case not in SOON]


def folder_of(root: Path, name: str, wrapper: str, how: str) -> Path:
    return root / f"{name} {wrapper} {how}"


# ------------------------------------------------------------------------------------------ on ranks


def save_one(root: Path, name: str, wrapper: str, how: str) -> None:
    with cpu():
        unwrapped = build(name)
        config = unwrapped.config
        model = WRAPPERS[wrapper](unwrapped)
        optim = stepped(model)
        path = folder_of(root, name, wrapper, how)
        options: dict[str, Any] = {"max_file_size": SMALL} if how == "split" else {}
        group = dist.group.WORLD if wrapper == "plain" else None
        fsdp_optim.save(
            path,
            model,
            optim,
            **as_options(fsdp_optim.SaveOptions, **options, durable=False, progress=False, process_group=group),
        )
        if dist.get_rank() == 0:
            config.save_pretrained(path)
        dist.barrier()


def open_one(root: Path, name: str, wrapper: str, how: str) -> None:
    """As a user of Hugging Face does, without this library."""
    path = folder_of(root, name, wrapper, how)
    files = sorted(path.glob("model*.safetensors"))
    check_same("several files, and an index", [len(files) > 2, *_has_index(path)], [how == "split"] * 2)
    wanted = build(name)
    stepped(wanted)
    if ("tied" in name) != bool(ties_of(wanted)):
        raise Differs(f"ties: {ties_of(wanted)}")
    with mock.patch("socket.getaddrinfo", side_effect=Differs("somebody wants to use the network")):
        loaded, info = type(wanted).from_pretrained(path, output_loading_info=True)
    check_same("loading info", {key: list(value) for key, value in info.items() if value}, {})
    check_same("tensors", tensors_of(loaded), tensors_of(wanted))
    check_same("ties", ties_of(loaded), ties_of(wanted))


def _has_index(path: Path) -> Iterator[bool]:
    yield (path / "model.safetensors.index.json").exists()


def resume_beside_config(root: Path, name: str, wrapper: str) -> None:
    """The folder is still a checkpoint when a config lies in it, and a save that replaces it carries the config over."""
    path = folder_of(root, name, wrapper, "whole")
    with cpu():
        model = WRAPPERS[wrapper](build(name))
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        fsdp_optim.load(path, model, optim, options=fsdp_optim.LoadOptions(compare=True, progress=False))
        fsdp_optim.save(
            path, model, optim, overwrite=True, options=fsdp_optim.SaveOptions(durable=False, progress=False)
        )
        check_same("the config", (path / "config.json").exists(), True)


def load_foreign(root: Path, how: str) -> list[tuple[str, str]]:
    """The errors of a load with an optimizer, and of saves, for a folder that `save_pretrained` has made."""
    path = root / "theirs"
    if dist.get_rank() == 0:
        their_options = {"max_shard_size": SMALL} if how == "split" else {}
        build("bert").save_pretrained(path, **their_options)
    dist.barrier()
    model = WRAPPERS["FSDP2"](build("bert"))
    optim = stepped(model)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    there = {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}
    calls: list[Callable[[], Any]] = [
        lambda: fsdp_optim.load(path, model, optim),
        lambda: fsdp_optim.save(path, model, optim),
        lambda: fsdp_optim.save(path, model, optim, overwrite=True),
    ]
    errors = [error_text(call) for call in calls]
    check_same("the model", {name: param.to_local() for name, param in model.named_parameters()}, before)
    check_same("the folder", {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}, there)
    check_same("latest", fsdp_optim.latest(root), None)
    return errors


# ------------------------------------------------------------------------------------------ the tests


class HuggingFaceTest(SharedFolder):
    saved: Table
    opened: Table

    @classmethod
    def fill(cls) -> None:
        on_two, on_one = ([[(size, *case) for case in cases] for cases in (SOON, LATER)] for size in (2, 1))
        cls.saved = Table(partial(save_one, cls.root), *on_two)
        cls.opened = Table(partial(open_one, cls.root), *on_one)

    @expand(SOON, LATER)
    def test_from_pretrained(self, *case: str) -> None:
        self.check(case)

    def check(self, case: tuple[str, ...]) -> None:
        self.saved(2, *case)
        self.opened(1, *case)

    @parameterized.expand(("FSDP2", "fairscale flat"))
    def test_a_config_beside_it_is_no_damage(self, wrapper: str) -> None:
        self.check(SOON[0])  # of all: the folder is changed below
        run_on_ranks(resume_beside_config, 2, self.root, "gpt2, tied", wrapper)

    @parameterized.expand(("whole", "split"))
    def test_what_they_have_saved_is_no_place_for_a_save(self, how: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(load_foreign, 2, Path(folder), how)
        for errors in zip(*by_rank, strict=True):
            check_refused(
                how, errors, "CheckpointError" if errors[0][0] == "CheckpointError" else "StateError", "theirs"
            )
        for (kind, text), reason in zip(
            by_rank[0], ("without an optimizer", *["not a checkpoint|already exists"] * 2), strict=True
        ):
            self.assertRegex(text, reason, kind)
