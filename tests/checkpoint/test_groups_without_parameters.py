"""Several optimizers: groups that have no parameters, on this rank or on any, get the saved hyperparameters; another order."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.folders import InFolder
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

Optims = list[torch.optim.Optimizer]


def stage_of(rank: int) -> tuple[nn.Module, Optims]:
    """A pipeline stage and its two optimizers; the second stage has no biases, and an empty group for them."""
    stage = nn.Module()
    stage.add_module(f"layer{rank}", nn.Linear(3, 3, bias=rank == 0))
    weights = [param for param in stage.parameters() if param.dim() > 1]
    biases = [param for param in stage.parameters() if param.dim() == 1]
    optims = [torch.optim.SGD([{"params": weights}], lr=0.1), torch.optim.SGD([{"params": biases}], lr=0.2)]
    return stage, [*optims, torch.optim.SGD([{"params": []}], lr=0.3)]  # the last is empty everywhere


def lrs_of(optims: Optims) -> list[float]:
    return [group["lr"] for optim in optims for group in optim.param_groups]


def resume_stages(root: Path) -> None:
    rank = dist.get_rank()
    stage, optims = stage_of(rank)
    for optim in optims:
        optim.param_groups[0]["lr"] /= 2  # as a scheduler does
    fsdp_optim.save(root / "a", [stage], optims)
    sharded = fsdp_optim.gather_full_optim_state_dict([stage], optims, key_by="name")
    for way in ("load", "scatter"):
        resumed, resumed_optims = stage_of(rank)
        if way == "load":
            fsdp_optim.load(root / "a", [resumed], resumed_optims)
        else:
            shard = fsdp_optim.scatter_full_optim_state_dict([resumed], resumed_optims, sharded)
            fsdp_optim.load_optim_state_dict(resumed_optims, shard)
        check_same(f"{way}: learning rates", lrs_of(resumed_optims), [0.05, 0.1, 0.15])
        fsdp_optim.save(root / way, [resumed], resumed_optims)  # the ranks compare their groups


def stage_with_schedules(rank: int, *lrs: float) -> tuple[nn.Module, Optims]:
    """A pipeline stage with one or two of three layers, and three optimizers, one for each layer."""
    stage, optims = nn.Module(), Optims()
    for number, lr in enumerate(lrs):
        layer = nn.Linear(2, 2)
        if number % 2 == rank:
            stage.add_module(f"layer{number}", layer)
        params = [*layer.parameters()] if number % 2 == rank else []
        optims.append(torch.optim.Adam([{"params": params}], lr=lr))
    return stage, optims


def resume_schedules(root: Path) -> None:
    """New optimizers all have the learning rate of the start, the saved ones those of their schedules."""
    saved = [0.25, 0.5, 0.125]
    stage, optims = stage_with_schedules(dist.get_rank(), *saved)
    fsdp_optim.save(root / "a", [stage], optims)
    resumed, resumed_optims = stage_with_schedules(dist.get_rank(), 1.0, 1.0, 1.0)
    fsdp_optim.load(root / "a", [resumed], resumed_optims)
    check_same("learning rates", lrs_of(resumed_optims), saved)
    fsdp_optim.save(root / "b", [resumed], resumed_optims)


def adams(model: nn.Linear, lr: float) -> Optims:
    """The last group has no parameters."""
    second = torch.optim.Adam([{"params": [model.bias], "lr": 0.1}, {"params": [], "lr": lr}])
    return [torch.optim.Adam([model.weight], lr=0.1), second]


class GroupsWithoutParametersTest(InFolder):
    def test_on_one_rank_of_stages(self) -> None:
        run_on_ranks(resume_stages, 2, self.root)

    def test_of_equal_hyperparameters(self) -> None:
        """Two optimizers that are one group of all ranks before the load, and two after it."""
        run_on_ranks(resume_schedules, 2, self.root)

    def test_on_no_rank(self) -> None:
        model = nn.Linear(3, 3)
        full = fsdp_optim.gather_full_optim_state_dict(model, adams(model, 0.05), key_by="name")
        optims = adams(model, 0.2)
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optims, full)
        fsdp_optim.load_optim_state_dict(optims, shard)
        self.assertEqual(lrs_of(optims), [0.1, 0.1, 0.05])

    def test_live_groups_stay_where_they_are_asked_for(self) -> None:
        model = nn.Linear(3, 3)
        fsdp_optim.save(self.root / "a", model, adams(model, 0.05))
        optims = adams(model, 0.2)
        fsdp_optim.load(self.root / "a", model, optims, options=fsdp_optim.LoadOptions(param_groups="live"))
        self.assertEqual(lrs_of(optims), [0.1, 0.1, 0.2])


class OrderOfOptimizersTest(InFolder):
    def test_two_classes_in_another_order(self) -> None:
        """Each finds its group by its parameters, and is not compared with the group at its place."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def made() -> Optims:
            adam = torch.optim.Adam(model[0].parameters(), lr=0.01)
            return [adam, torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)]

        adam, sgd = made()
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0)
        for optim in (adam, sgd):
            optim.step()
        fsdp_optim.save(self.root / "a", model, [adam, sgd])
        for groups in ("saved", "live"):
            new_adam, new_sgd = made()
            options = fsdp_optim.LoadOptions(param_groups=groups)
            fsdp_optim.load(self.root / "a", model, [new_sgd, new_adam], options=options)
            for new, old in ((new_adam, adam), (new_sgd, sgd)):
                self.assertEqual(new.param_groups[0]["lr"], old.param_groups[0]["lr"])
                for param, values in old.state.items():
                    for name, value in values.items():
                        self.assertTrue(torch.equal(new.state[param][name], value), (groups, name))
