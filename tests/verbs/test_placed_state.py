"""State that is cut by itself: DTensors in the state of parameters that are none (ZeRO-1 by DTensor, blocks of Shampoo)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import Differs, check_same
from kit.log_texts import log_texts
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

STEPS = 3
RANKS = 3


class Uneven(nn.Module):
    """Rows that three ranks cannot share evenly, fewer rows than ranks, one element, no dimension."""

    def __init__(self, scale: Any = 1.5) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 2, bias=False)
        self.last = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.tensor(scale))


class Momentum(torch.optim.Optimizer):
    """Momentum; with a mesh its state are DTensors over the ranks of the mesh, as in ZeRO-1. `rows` has a shape of its own."""

    def __init__(self, params: Any, mesh: DeviceMesh | None = None, early: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mesh = mesh
        for param in self.param_groups[0]["params"] if early else ():
            self._begin(param)

    def _made(self, value: torch.Tensor, *, cut: bool = True) -> torch.Tensor:
        if self.mesh is None:
            return value
        spec = Shard(0) if value.dim() and cut else Replicate()
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False).redistribute(self.mesh, [spec])

    def _begin(self, param: torch.Tensor) -> None:
        zeros = torch.zeros(param.shape)
        self.state[param] = {
            "momentum": self._made(zeros),
            "mean": self._made(zeros.clone(), cut=False),
            "rows": self._made(zeros.flatten().clone()),
            "step": torch.tensor(0.0),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self._begin(param)
                state = self.state[param]
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(self._made(param.grad.clone()))
                state["mean"].lerp_(self._made(param.grad.clone(), cut=False), 0.25)
                state["rows"].add_(self._made(param.grad.square().flatten()))
                update = state["momentum"]
                param.sub_(group["lr"] * (update.full_tensor() if isinstance(update, DTensor) else update))


def train(model: nn.Module, optim: Any, first: int = 0) -> None:
    """The gradients are drawn, equal on all ranks: what an optimizer makes of each element is then equal bit by bit."""
    for step in range(first, first + STEPS):
        torch.manual_seed(100 + step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optim.step()


def oracle(steps: int = STEPS, scale: Any = 1.5) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The weights and the state of the same training without ranks."""
    model = Uneven(scale)
    optim = Momentum(model.parameters())
    for first in range(0, steps, STEPS):
        train(model, optim, first)
    return dict(model.state_dict()), {name: dict(optim.state[param]) for name, param in model.named_parameters()}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("zero",))


def in_fsdp2_ignored(module: nn.Module) -> nn.Module:
    """FSDP2 that leaves out every parameter."""
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=set(module.parameters()))
    return module


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": in_ddp,
    "plain": lambda module: module,
    "ignored": in_fsdp2_ignored,
}


def made(wrap: str, *, early: bool = False, zero: bool = True) -> tuple[Any, Momentum]:
    model = WRAPS[wrap](Uneven())
    return model, Momentum(model.parameters(), mesh() if zero else None, early)


def check_plain(what: str, state: Any, wanted: Any) -> None:
    check_same(what, state, wanted)
    kinds = {type(value) for values in state.values() for value in values.values()}
    check_same(f"{what}, classes", kinds, {torch.Tensor})


def full_dicts(wrap: str) -> None:
    model, optim = made(wrap)
    train(model, optim)
    _, wanted = oracle()
    group = dist.group.WORLD
    for recipient in (0, RANKS - 1, None):
        for mismatch in ("error", "lowest_rank"):
            full = fsdp_optim.gather_full_optim_state_dict(
                model,
                optim,
                recipient_rank=recipient,
                key_by="name",
                options=fsdp_optim.CallOptions(process_group=group, on_replica_mismatch=mismatch),
            )
            if (full is None) is not (recipient not in (None, dist.get_rank())):
                raise Differs(f"recipient {recipient}")
            if full is not None:
                check_plain(f"{wrap}, recipient {recipient}, {mismatch}", full["state"], wanted)


def resumed(wrap: str, folder: str) -> None:
    """Every way back into an optimizer with live DTensors, which then trains on as without ranks."""
    model, optim = made(wrap)
    train(model, optim)
    group = dist.group.WORLD
    full = fsdp_optim.gather_full_optim_state_dict(
        model, optim, recipient_rank=None, key_by="name", options=fsdp_optim.CallOptions(process_group=group)
    )
    bare = {key: value for key, value in copy.deepcopy(full).items() if key in ("state", "param_groups")}
    fsdp_optim.save(folder, model, optim, options=fsdp_optim.SaveOptions(process_group=group))
    weights, state = oracle(2 * STEPS)
    start = copy.deepcopy(model.state_dict())

    def check(what: str, load: Callable[[Any, Any], Any]) -> None:
        again, its_optim = made(wrap, early=True)
        again.load_state_dict(start)
        load(again, its_optim)
        for param, saved_param in zip(again.parameters(), model.parameters(), strict=True):
            for name, value in its_optim.state[param].items():
                live = optim.state[saved_param][name]
                check_same(f"{what}: {name}", type(value), type(live))
                if isinstance(value, DTensor):
                    check_same(f"{what}: {name}, placements", value.placements, live.placements)
                    check_same(f"{what}: {name}, shard", value.to_local(), live.to_local())
        train(again, its_optim, STEPS)
        bare_model = again.module if wrap == "DDP" else again
        check_same(f"{what}: weights", dict(bare_model.state_dict()), weights)
        after = fsdp_optim.gather_full_optim_state_dict(
            again, its_optim, recipient_rank=None, key_by="name", options=fsdp_optim.CallOptions(process_group=group)
        )
        check_plain(f"{what}: state", after["state"], state)

    def sharded(full: Any) -> Callable[[Any, Any], Any]:
        def load(model: Any, optim: Any) -> None:
            shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
            fsdp_optim.load_optim_state_dict(optim, shard)

        return load

    def scattered(model: Any, optim: Any) -> None:
        given = full if dist.get_rank() == 0 else None
        shard = fsdp_optim.scatter_full_optim_state_dict(
            model, optim, given, options=fsdp_optim.CallOptions(process_group=group)
        )
        fsdp_optim.load_optim_state_dict(optim, shard)

    check("get_shard", sharded(full))
    check("get_shard without kinds", sharded(bare))
    check("scatter", scattered)
    check(
        "transfer",
        lambda m, o: fsdp_optim.transfer_optim_state(
            model, optim, m, o, options=fsdp_optim.CallOptions(process_group=group)
        ),
    )
    check(
        "load",
        lambda m, o: fsdp_optim.load(folder, m, o, options=fsdp_optim.LoadOptions(process_group=group, compare=True)),
    )


def saved(folder: str) -> None:
    model = in_ddp(Uneven([1.5]))  # FSDP has no parameters without dimensions
    optim = Momentum(model.parameters(), mesh())
    train(model, optim)
    fsdp_optim.save(folder, model, optim)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name")
    if full is not None:
        torch.save(full, f"{folder}.pt")


def loaded_elsewhere(folder: str, wrap: str) -> None:
    """Into an optimizer whose state are ordinary tensors: on one rank, or cut as a wrapper cuts the parameters."""
    with fairscale_on_cpu():
        wraps = {"plain": lambda m: m, "FSDP1": in_fsdp1, "FSDP1 flat": lambda m: in_fsdp1(m, use_orig_params=False)}
        wraps |= {"FSDP2": in_fsdp2, "fairscale": in_fairscale, "DDP": in_ddp}
        full = torch.load(f"{folder}.pt", weights_only=False)
        _, wanted = oracle(scale=[1.5])
        if wrap != "plain" and wrap != "DDP":  # values with a shape of their own fit complete parameters, or DTensors
            for values in (*full["state"].values(), *wanted.values()):
                del values["rows"]
            full["kinds"] = {
                i: {k: word for k, word in words.items() if k != "rows"} for i, words in full["kinds"].items()
            }
        model = wraps[wrap](Uneven([1.5]))
        optim = Momentum(model.parameters())
        with log_texts() as texts:
            shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
        warned = [text for text in texts if "DTensors with a cut of their own" in text]
        check_same(f"{wrap}: warned", len(warned), 0 if wrap == "FSDP2" else 1)
        fsdp_optim.load_optim_state_dict(optim, shard)
        after = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
        check_plain(wrap, after["state"], wanted)
        if wrap in ("plain", "DDP"):
            optim = Momentum(model.parameters())
            fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(compare=True))
            again = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
            check_plain(f"{wrap}, load", again["state"], wanted)


@pytest.mark.parametrize("wrap", list(WRAPS))
def test_full_dicts_have_every_row(wrap: str) -> None:
    run_on_ranks(full_dicts, RANKS, wrap)


@pytest.mark.parametrize("wrap", list(WRAPS))
def test_every_way_back_gives_the_live_form(wrap: str, tmp_path: Path) -> None:
    run_on_ranks(resumed, RANKS, wrap, str(tmp_path / "c"))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("of_three") / "c")
    run_on_ranks(saved, RANKS, folder)
    return folder


@pytest.mark.parametrize("wrap", ["plain", "DDP", "FSDP1", "FSDP1 flat", "FSDP2", "fairscale"])
def test_other_ranks_and_wrappers_get_ordinary_tensors(of_three: str, wrap: str) -> None:
    run_on_ranks(loaded_elsewhere, 1 if wrap == "plain" else 2, of_three, wrap)
