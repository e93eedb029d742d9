"""load_optim_state_dict: dtypes, current hyperparameters, and partial loading."""

from __future__ import annotations

import copy
import itertools
import unittest
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some, those
from kit.compare import Differs, check_refused, check_same, error_text
from kit.models import Net, freeze_stem
from kit.optimizers import OfModel, adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, cpu, snapshot
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------- dtypes


class MasterAdam(torch.optim.Optimizer):
    """Adam's state in fp32, whatever the parameter is; and one value in fp64, one in int16."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name, dtype in (("exp_avg", torch.float32), ("fine", torch.float64), ("counts", torch.int16)):
                        state[name] = torch.zeros_like(param, dtype=dtype)
                state["step"] += 1
                grad = param.grad.to(torch.float32)
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["fine"].add_(param.grad.to(torch.float64) / 3)
                state["counts"].add_((grad > 0).to(torch.int16))


def halves(model: nn.Module) -> None:
    """All parameters in bf16. `Small` has few enough elements that bf16 has a number for each."""
    model.to(torch.bfloat16)


class Small(nn.Module):
    units = ("inner", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.last = nn.Linear(7, 5, bias=False)


def half_precision(wrapper: str) -> None:
    with cpu():
        oracle = Oracle(MasterAdam, STEPS, Small, halves)
        trained, target = (Trained(wrapper, MasterAdam, steps, Small, halves) for steps in (STEPS, 0))
        group = dist.group.WORLD
        if {param.dtype.itemsize for param in (*trained.params, *oracle.model.parameters())} != {2}:
            raise Differs("the test was to have parameters of two bytes")
        full = trained.gather(None, process_group=group)
        shard = target.shard(full)
        fsdp_optim.load_optim_state_dict(target.optim, shard)
        dtypes = {
            name: {values[name].dtype for values in target.optim.state.values()}
            for name in ("exp_avg", "fine", "counts")
        }
        again = target.gather(None, process_group=group)
        check_full("gathered", full, oracle.full())
        check_same("dtypes", dtypes, {"exp_avg": {torch.float32}, "fine": {torch.float64}, "counts": {torch.int16}})
        check_full("loaded, gathered again", again, oracle.full())
        # the same through scatter, over a state that is there already
        fsdp_optim.load_optim_state_dict(target.optim, target.scatter(full, process_group=group))
        check_full("loaded twice", target.gather(None, process_group=group), oracle.full())


class DtypeTest(unittest.TestCase):
    # fairscale refuses to wrap parameters that are not fp32
    @expand(*some(("FSDP1 flat", "FSDP1 orig", "FSDP2", "HSDP", "DDP", "plain"), every=2))
    def test_every_value_keeps_the_dtype_that_it_was_saved_in(self, wrapper: str) -> None:
        run_on_ranks(half_precision, 2, wrapper)

    def test_torchs_own_loading_would_have_cast(self) -> None:
        """The reason for the test above: without our loading, it would fail."""
        oracle = Oracle(MasterAdam, STEPS, Small, halves)
        oracle.optim.load_state_dict(copy.deepcopy(oracle.optim.state_dict()))
        self.assertEqual({v["exp_avg"].dtype for v in oracle.optim.state.values()}, {torch.bfloat16})

    def test_step_is_where_the_optimizer_needs_it(self) -> None:
        for options in ({}, {"foreach": True}, {"fused": True}):
            source, target = nn.Linear(3, 2), nn.Linear(3, 2)
            optims = [torch.optim.AdamW(model.parameters(), **options) for model in (source, target)]
            source(torch.ones(3)).sum().backward()
            optims[0].step()
            full = fsdp_optim.gather_full_optim_state_dict(source, optims[0])
            shard = fsdp_optim.get_shard_from_optim_state_dict(target, optims[1], full)
            fsdp_optim.load_optim_state_dict(optims[1], shard)
            for values in optims[1].state.values():
                self.assertEqual((values["step"].dtype, values["step"].device.type), (torch.float32, "cpu"), options)
            target(torch.ones(3)).sum().backward()
            optims[1].step()
            self.assertEqual({float(values["step"]) for values in optims[1].state.values()}, {2.0}, options)


# ------------------------------------------------------------------------------------------- keep


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": params[:1], "lr": 0.5, "weight_decay": 0.25},
        {"params": params[1:], "lr": 0.125, "weight_decay": 0.0625},
    ]
    return torch.optim.AdamW(groups, betas=(0.5, 0.75))


def keeping(wrapper: str) -> None:
    with cpu():
        source = Trained(wrapper, OfModel(two_groups))
        full = source.gather(None)
        for keep, lrs, decays, betas in (
            ((), [0.5, 0.125], [0.25, 0.0625], (0.5, 0.75)),
            (("lr",), [7.0, 8.0], [0.25, 0.0625], (0.5, 0.75)),
            (("lr", "betas"), [7.0, 8.0], [0.25, 0.0625], (0.0, 0.25)),
        ):
            target = Trained(wrapper, OfModel(two_groups), steps=0)
            for group, lr in zip(target.optim.param_groups, (7.0, 8.0), strict=True):
                group.update(lr=lr, weight_decay=lr * 2, betas=(0.0, 0.25))
            shard = target.shard(full)
            kept = copy.deepcopy(shard["param_groups"])
            told = fsdp_optim.load_optim_state_dict(target.optim, shard, keep_hyperparameters=keep)
            got = target.optim.param_groups
            again = target.gather(None)
            check_same("missing and unexpected", [tuple(told.missing_keys), tuple(told.unexpected_keys)], [(), ()])
            check_same(f"lr, keep={keep}", [g["lr"] for g in got], lrs)
            check_same(f"weight_decay, keep={keep}", [g["weight_decay"] for g in got], decays)
            check_same(f"betas, keep={keep}", [tuple(g["betas"]) for g in got], [betas, betas])
            check_same("the shard is left as it was", shard["param_groups"], kept)
            check_same("state", again["state"], full["state"])


class KeepTest(unittest.TestCase):
    @parameterized.expand(("FSDP1 orig", "FSDP1 flat", "fairscale flat", "FSDP2", "DDP"))
    def test_current_hyperparameters_are_kept_on_request(self, wrapper: str) -> None:
        run_on_ranks(keeping, 2, wrapper)

    def test_an_unknown_hyperparameter_is_refused_by_name(self) -> None:
        oracle = Oracle()
        full = fsdp_optim.gather_full_optim_state_dict(oracle.model, oracle.optim)
        shard = fsdp_optim.get_shard_from_optim_state_dict(oracle.model, oracle.optim, full)
        kind, text = error_text(
            lambda: fsdp_optim.load_optim_state_dict(oracle.optim, shard, keep_hyperparameters=("lrr",))
        )
        self.assertEqual(kind, "StateError", text)
        self.assertIn("lrr", text)


# ------------------------------------------------------------------------------------------- strict


class Longer(Net):
    """`Net` and one more unit."""

    units = ("stem", "block.0", "block", "added", "")

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(3, 2)


def partly(wrapper: str, case: str) -> dict[str, list[tuple[str, str]]]:
    """The errors of strict loading, by verb; everything else is checked here."""
    with cpu():
        if case == "missing":  # the model has a unit that the dict has not
            source, target = Trained(wrapper), Trained(wrapper, steps=2, model=Longer)
            missing, extra = ("added.weight", "added.bias"), ()
        elif case == "extra":  # the dict has a unit that the model has not
            source, target = Trained(wrapper, model=Longer), Trained(wrapper, steps=2)
            missing, extra = (), ("added.weight", "added.bias")
        else:  # frozen at save time, trained now
            source, target = Trained(wrapper, prepare=freeze_stem), Trained(wrapper, steps=2)
            missing, extra = ("stem.weight", "stem.bias"), ()
        world = dist.group.WORLD
        full, named = (source.gather(None, key_by, process_group=world) for key_by in ("id", "name"))
        old = target.gather(None, "name", process_group=world)
        before = snapshot(target)
        errors = {
            "shard": [error_text(partial(target.shard, given)) for given in (full, named)],
            "scatter": [error_text(partial(target.scatter, given, process_group=world)) for given in (full, named)],
        }
        shards = {
            "shard": target.shard(named, strict=False),
            "shard by id": target.shard(full, strict=False),
            "scatter": target.scatter(named, 1, strict=False, process_group=world),
        }
        check_same("nothing is changed before loading", snapshot(target), before)
        for what, shard in shards.items():
            told = {"missing_keys": missing, "unexpected_keys": extra}
            if wrapper == "FSDP1 orig" and case == "frozen" and what != "scatter":  # as this rank alone can see
                held = {name for index in target.index for name in target.numbers.names_of(index)}
                told["missing_keys"] = tuple(name for name in missing if name in held)
            check_same(
                f"{what}, told", shard.get("incompatible", {}), {k: list(names) for k, names in told.items() if names}
            )
        for what, shard in shards.items():
            told = fsdp_optim.load_optim_state_dict(target.optim, shard)
            check_same(
                f"{what}, told by loading",
                [sorted(told.missing_keys), sorted(told.unexpected_keys)],
                [sorted(shard.get("incompatible", {}).get(key, ())) for key in ("missing_keys", "unexpected_keys")],
            )
            got = target.gather(None, "name", process_group=world)["state"]
            for name in target.numbers.start:
                wanted = old["state"].get(name) if name in missing else named["state"].get(name)
                check_same(f"{what}, state of {name}", got.get(name), wanted)
        target.step([7])  # and training continues
    return errors


def absent_before(wrapper: str) -> None:
    """Missing, and there was no state to leave as it was: then there is none afterwards."""
    with cpu():
        source, target = Trained(wrapper, prepare=freeze_stem), Trained(wrapper, steps=0)
        shard = target.shard(source.gather(None), strict=False)
        fsdp_optim.load_optim_state_dict(target.optim, shard)
        state = target.gather(None, "name")["state"]
        check_same("parameters with state", [n for n in state if n.startswith("stem")], [])
        target.step([STEPS])
        steps = {n: float(s["step"]) for n, s in target.gather(None, "name")["state"].items()}
        for name, step in steps.items():
            wanted = 1.0 if name.startswith("stem") else STEPS + 1.0
            check_same(f"step of {name}", step, wanted)


PARTLY = ("missing", "extra", "frozen")


def meets(wrapper: str, case: str) -> bool:
    """Whether `make test-all` has this pair: each wrapper meets one case, and FSDP2 and flat parameters meet all of them."""
    in_turn = (list(WRAPPERS).index(wrapper) + PARTLY.index(case)) % len(PARTLY) == 0
    return in_turn or wrapper in ("FSDP2", "fairscale flat")


class StrictTest(unittest.TestCase):
    @expand(*those(itertools.product(WRAPPERS, PARTLY), meets))
    def test_missing_and_extra(self, wrapper: str, case: str) -> None:
        by_rank = run_on_ranks(partly, 2, wrapper, case)
        name = "stem" if case == "frozen" else "added"
        for verb in ("shard", "scatter"):
            for place, what in enumerate(("by id", "by name")):
                errors = [errors_of_rank[verb][place] for errors_of_rank in by_rank]
                if what == "by name" or case == "frozen":
                    check_refused(f"{verb}, {what}", errors, "StateError", name)
                else:
                    self.assertEqual({kind for kind, _ in errors}, {"StateError"}, errors)

    @expand(*some([w for w in WRAPPERS if w != "FSDP2 x TP"], every=4))
    def test_frozen_at_save_time_and_trained_now(self, wrapper: str) -> None:
        run_on_ranks(absent_before, 2, wrapper)


def another_shape(wrapper: str) -> list[tuple[str, str]]:
    """State that does not fit is refused, also with strict=False."""
    with cpu():
        source, target = Trained(wrapper), Trained(wrapper, adam, 0)
        full = source.gather(None, "name")
        values = {**full["state"]["head.weight"], "exp_avg_sq": torch.zeros(5, 2)}
        broken = {**full, "state": {**full["state"], "head.weight": values}}
        return [
            error_text(lambda: target.shard(broken, strict=False)),
            error_text(lambda: target.scatter(broken, strict=False)),
        ]


class ShapesTest(unittest.TestCase):
    @parameterized.expand(("fairscale flat", "FSDP1 flat", "FSDP2", "plain"))
    def test_a_wrong_shape_is_no_partial_loading(self, wrapper: str) -> None:
        by_rank = run_on_ranks(another_shape, 2, wrapper)
        for place in (0, 1):
            errors = [errors_of_rank[place] for errors_of_rank in by_rank]
            check_refused("a wrong shape", errors, "StateError", "head.weight", "exp_avg_sq", "[5, 2]", "[2, 5]")
