"""Live tensors that share memory without being one Parameter: a load refuses to give them different elements."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fsdp2
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


class Two(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(3, 2, bias=False)
        self.y = nn.Linear(3, 2, bias=False)


def same_memory(model: Any) -> None:
    model.y.weight.data = model.x.weight.data


def part_of_the_other(model: Any) -> None:
    model.y.weight = nn.Parameter(torch.zeros(1, 3))
    model.y.weight.data = model.x.weight.data[1:]


def beside_each_other(model: Any) -> None:
    memory = torch.zeros(4, 3)
    model.x.weight.data, model.y.weight.data = memory[:2], memory[2:]


def by_turns(model: Any) -> None:
    memory = torch.zeros(2, 6)
    model.x.weight.data, model.y.weight.data = memory[:, :3], memory[:, 3:]


def load_on_ranks(path: str) -> list[tuple[str, str]]:
    """Only rank 1 shares memory."""
    with cpu():
        model = Two()
        if dist.get_rank() == 1:
            same_memory(model)
        wrapped = in_ddp(model)
        full = torch.load(f"{path}.pt") if dist.get_rank() == 0 else None
        calls = (
            partial(fsdp_optim.load, path, wrapped),
            partial(fsdp_optim.scatter_full_model_state_dict, wrapped, full),
        )
        errors = []
        for call in calls:
            before = model.x.weight.clone(), model.y.weight.clone()
            errors.append(error_text(call))
            check_same("nothing is changed", (model.x.weight.detach(), model.y.weight.detach()), before)
        return errors


def load_dtensors(path: str) -> list[tuple[str, str]]:
    """The local tensors of two DTensors share memory on rank 1, or on no rank."""
    errors = []
    with cpu():
        for shares in (False, True):
            model = in_fsdp2(Two())
            weights = model.x.weight, model.y.weight
            if shares and dist.get_rank() == 1:
                weights[1]._local_tensor.set_(weights[0]._local_tensor)
            before = [weight.to_local().clone() for weight in weights]
            errors.append(error_text(partial(fsdp_optim.load, path, model)))
            if shares:
                check_same("nothing is changed", [weight.to_local() for weight in weights], before)
    return errors


class SharedMemoryTest(InFolder):
    def save(self, model: nn.Module, state: Any = None) -> None:
        fsdp_optim.save(self.path, model, state=state, options=QUIET)

    @parameterized.expand([("same_memory", same_memory), ("part_of_the_other", part_of_the_other)])
    def test_weights_that_differ(self, _: str, share: Any) -> None:
        saved, model = Two(), Two()
        if share is part_of_the_other:
            saved.y.weight = nn.Parameter(saved.x.weight[:1].detach().clone())
        self.save(saved)
        share(model)
        before = model.x.weight.detach().clone()
        kind, text = error_text(partial(fsdp_optim.load, self.path, model))
        self.assertEqual(kind, "StateError", text)
        self.assertIn("y.weight shares its memory with x.weight on rank 0, but they differ in the checkpoint", text)
        check_same("nothing is changed", model.x.weight.detach(), before)
        fsdp_optim.load(self.path, model, strict=False)
        check_same("the last one", model.y.weight.detach(), saved.y.weight.detach())
        with torch.no_grad():
            saved.y.weight.copy_(saved.x.weight[-len(saved.y.weight) :])
        fsdp_optim.save(self.path, saved, overwrite=True, options=QUIET)
        fsdp_optim.load(self.path, model)
        check_same("equal ones", model.state_dict(), saved.state_dict())

    @parameterized.expand([("beside_each_other", beside_each_other), ("by_turns", by_turns)])
    def test_one_memory_without_a_common_element(self, _: str, share: Any) -> None:
        saved, model = Two(), Two()
        self.save(saved)
        share(model)
        fsdp_optim.load(self.path, model)
        check_same("weights", model.state_dict(), saved.state_dict())

    @parameterized.expand([("with the model", True), ("alone", False)])
    def test_one_tensor_in_two_places(self, _: str, with_model: bool) -> None:
        model = Two()
        self.save(model, {"tree": {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}})
        tensor = torch.full((2, 3), 5.0)
        for tree in ({"a": tensor, "b": tensor}, {"a": torch.zeros(2, 3), "b": model.x.weight.detach()}):
            is_weight = tree["b"] is not tensor
            if is_weight and not with_model:
                continue
            load = partial(fsdp_optim.load, self.path, model if with_model else None, state={"tree": tree})
            kind, text = error_text(load)
            self.assertEqual(kind, "StateError", text)
            other = "x.weight" if is_weight else "state.tree.a"
            for word in ("shares its memory with", "state.tree.b", other):
                self.assertIn(word, text)
            self.assertEqual(tensor.unique().tolist(), [5.0])

    def test_local_tensors_of_dtensors(self) -> None:
        self.save(Two())
        of_own, shared = zip(*run_on_ranks(load_dtensors, 2, str(self.path)), strict=True)
        self.assertEqual(of_own, (("", ""),) * 2)
        check_refused("", shared, "StateError", "y.weight shares its memory with x.weight on rank 1")

    def test_on_one_rank(self) -> None:
        saved = Two()
        self.save(saved)
        torch.save(saved.state_dict(), f"{self.path}.pt")
        for errors in zip(*run_on_ranks(load_on_ranks, 2, str(self.path)), strict=True):
            check_refused("", errors, "StateError", "y.weight shares its memory with x.weight on rank 1")
