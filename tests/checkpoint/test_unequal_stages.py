"""Pipeline stages that differ: if only some have state, or tied weights, all ranks must know that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def frozen_stage(*, frozen: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The stage of this rank. The stage of the rank `frozen` is not trained."""
    stage, rank = nn.Module(), dist.get_rank()
    stage.add_module(f"layer{rank}", nn.Linear(3, 3).requires_grad_(rank != frozen))
    return stage, torch.optim.Adam(stage.parameters())


def load_into_the_same_run(root: Path, frozen: int) -> None:
    stage, optim = frozen_stage(frozen=frozen)
    for param in stage.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optim.step()
    fsdp_optim.save(root / "a", [stage], optim)
    fsdp_optim.load(root / "a", [stage], optim)
    full = fsdp_optim.gather_full_optim_state_dict([stage], optim, recipient_rank=None, key_by="name")
    assert full is not None
    fsdp_optim.reshard_optim_state_dict([stage], optim, full)
    fsdp_optim.scatter_full_optim_state_dict([stage], optim, full)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.out = nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight


def tied_stage(*, tied: int) -> list[nn.Module]:
    """The stage of this rank: an embedding and a head with its weight on the rank `tied`, a layer on the other."""
    stage = Tied() if dist.get_rank() == tied else nn.Sequential()
    if dist.get_rank() != tied:
        stage.add_module("layer", nn.Linear(3, 3))
    return [stage]


NAMES = ["embed.weight", "layer.bias", "layer.weight", "out.weight"]


def name_twice(root: Path, tied: int) -> None:
    stages = tied_stage(tied=tied)
    full = fsdp_optim.gather_full_model_state_dict(stages, recipient_rank=None)
    assert full is not None
    check_same("names in the full model dict", sorted(full), NAMES)
    if dist.get_rank() == 0:
        torch.save(full, root / "both.pt")
        torch.save({name: value for name, value in full.items() if name != "embed.weight"}, root / "other.pt")
    fsdp_optim.save(root / "saved", stages)
    for name in ("both.pt", "other.pt", "saved", ""):
        other = tied_stage(tied=tied)
        if name:
            result: Any = fsdp_optim.load(root / name, other)
        else:
            result = fsdp_optim.scatter_full_model_state_dict(other, full)
        check_same(f"{name}: missing and unexpected", (result.missing_keys, result.unexpected_keys), ((), ()))
        check_same(f"{name}: weights", list(other[0].parameters()), list(stages[0].parameters()))


class Buffers(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.add_module(f"layer{place}", nn.Linear(3, 2))
        for number in range(3 * place):
            self.register_buffer(f"buffer{number}", torch.full((3,), float(number)))


def save_buffers(root: Path) -> None:
    """Two stages on two ranks each, which are replicas; the second stage has buffers."""
    stage = Buffers(dist.get_rank() // 2)
    for param in stage.parameters():
        nn.init.ones_(param)
    options = fsdp_optim.SaveOptions(strategy="per_rank_files", durable=False)
    fsdp_optim.save(root / "saved", [stage], options=options)


class UnequalStagesTest(InFolder):
    @parameterized.expand([(0,), (1,)])
    def test_a_stage_without_state(self, frozen: int) -> None:
        """It is not taken for one whose state the load would drop."""
        run_on_ranks(load_into_the_same_run, 2, self.root, frozen)

    @parameterized.expand([(0,), (1,)])
    def test_a_stage_with_tied_weights(self, tied: int) -> None:
        run_on_ranks(name_twice, 2, self.root, tied)
        self.assertEqual(fsdp_optim.inspect(self.root / "saved").aliases, {"out.weight": "embed.weight"})
        fsdp_optim.convert(self.root / "saved", self.root / "torch", format="torch")
        self.assertEqual(sorted(torch.load(self.root / "torch" / "model.pt")), NAMES)

    def test_buffers_of_a_stage_in_files_of_each_rank(self) -> None:
        """All ranks know that these are buffers, which only the lowest of their ranks writes."""
        run_on_ranks(save_buffers, 4, self.root)
        model = Buffers(1)
        model.add_module("layer0", nn.Linear(3, 2))
        wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(9.0)
        fsdp_optim.load(self.root / "saved", model)
        check_same("buffers", dict(model.named_buffers()), wanted)
        self.assertTrue(all(bool((param == 1.0).all()) for param in model.parameters()))
