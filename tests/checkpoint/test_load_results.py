"""What a load says of names that one side has, and what it refuses to write to: one process, plain modules."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same, refused
from kit.folders import SharedFolder
from kit.log_texts import log_texts
from kit.models import TiedHead
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import run_on_ranks

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)


class Masked(nn.Module):
    """A buffer whose rows are one row in memory, and one without elements, and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3))
        self.register_buffer("empty", torch.ones(1, 3).expand(0, 3))
        self.register_buffer("single", torch.tensor(1.0).expand(1, 1))


def saved_in_background(*args: Any, **kwargs: Any) -> None:
    fsdp_optim.async_save(*args, **kwargs).wait()


def warnings_of_a_save(folder: Path) -> list[str]:
    torch.manual_seed(0)
    with log_texts(logging.WARNING) as told:
        fsdp_optim.save(folder / "ranks", Masked(), options=QUICK)
    return [text for text in told if "share memory" in text]


class ResultTest(SharedFolder):
    def setUp(self) -> None:
        self.folder = self.own_folder()

    def test_parameters_without_saved_state_are_named(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optim = torch.optim.Adam(model.parameters())
        model[0](torch.ones(1, 3)).sum().backward()
        optim.step()
        fsdp_optim.save(self.folder / "step", model, optim, options=QUICK)
        new = copy.deepcopy(model)
        result = fsdp_optim.load(self.folder / "step", new, torch.optim.Adam(new.parameters()))
        self.assertEqual(result.absent, ("1.weight", "1.bias"))
        self.assertEqual(fsdp_optim.load(self.folder / "step", new).absent, ())

    def test_elements_that_share_memory_are_not_written_to(self) -> None:
        """Each element of an expanded tensor would get the value of the last one."""
        model = nn.Linear(3, 2)
        fsdp_optim.save(self.folder / "step", model, options=QUICK)
        new = nn.Linear(3, 2)
        new.weight = nn.Parameter(torch.full((1, 1), 7.0).expand(2, 3))
        words = ("weight: its elements share memory in the model", "nothing was loaded")
        refused(lambda: fsdp_optim.load(self.folder / "step", new), StateError, *words)
        check_same("untouched", new.weight.detach().tolist(), [[7.0] * 3] * 2)

    def test_a_save_names_what_its_own_model_cannot_load(self) -> None:
        """In the foreground and in the background; a model whose buffer has memory of its own loads it."""
        words = "cannot load them, because their elements share memory (expand): mask: register its .contiguous() in the model"
        for name, save in (("save", fsdp_optim.save), ("async_save", saved_in_background)):
            with log_texts(logging.WARNING) as told:
                save(self.folder / name, Masked(), options=QUICK)
            check_same("warnings", [words in text for text in told], [True])
            refused(lambda name=name: fsdp_optim.load(self.folder / name, Masked()), StateError, words.split(": ")[-1])
            new = Masked()
            new.mask = new.mask.contiguous().zero_()
            with log_texts(logging.WARNING) as told:
                fsdp_optim.load(self.folder / name, new)
                save(self.folder / name, new, options=QUICK, overwrite=True)
            check_same("loaded", new.mask.tolist(), Masked().mask.tolist())
            check_same("nothing to say", told, [])

    def test_one_rank_names_it(self) -> None:
        told = run_on_ranks(warnings_of_a_save, 2, self.folder)
        check_same("warnings of the ranks", list(map(len, told)), [1, 0])

    def test_tied_tensors_that_differ(self) -> None:
        """They are an error; with strict=False one of the two is loaded, and the other is named."""
        embed, head = torch.arange(15.0).view(5, 3), torch.arange(15.0).view(5, 3)
        head[4, 2] = -1.0
        save_file({"embed.weight": embed, "head.weight": head}, self.folder / "model.safetensors")
        model = TiedHead()
        words = ("head.weight", "the model ties it to embed.weight, but they differ in the checkpoint")
        refused(lambda: fsdp_optim.load(self.folder / "model.safetensors", model), StateError, *words)
        result = fsdp_optim.load(self.folder / "model.safetensors", model, strict=False)
        self.assertEqual(result.unexpected_keys, ("head.weight",))
        check_same("loaded", model.head.weight.detach(), embed)
        save_file({"embed.weight": embed, "head.weight": embed.clone()}, self.folder / "equal.safetensors")
        self.assertEqual(fsdp_optim.load(self.folder / "equal.safetensors", model).unexpected_keys, ())
