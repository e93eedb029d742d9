"""What a load says of names that one side has, and what it refuses to write to: one process, plain modules."""

from __future__ import annotations

import copy

import torch
from kit.compare import check_same, refused
from kit.folders import SharedFolder
from kit.models import TiedHead
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim import StateError

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)


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
