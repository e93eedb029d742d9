"""Param groups that have changed since the save: refused with the way out, and found by name with param_groups="live"."""

from __future__ import annotations

import copy
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import OfModel
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.25)


def decay_and_none(model: nn.Module) -> torch.optim.Optimizer:
    """The most usual change: some parameters do not decay any more, and another learning rate."""
    params = list(model.parameters())
    groups = [{"params": params[1:], "weight_decay": 0.5}, {"params": params[:1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0625)


def biases_apart(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [{"params": [p for name, p in named if name.endswith("bias") == is_bias]} for is_bias in (True, False)]
    return torch.optim.AdamW(groups, lr=0.125)


def by_name(full: Any) -> dict[str, Any]:
    """The state in an order that does not depend on the groups."""
    return dict(sorted(full["state"].items()))


def regrouped(wrapper: str, folder: str) -> dict[str, tuple[str, str]]:
    """The error of each verb about one group for two; that param_groups="live" loads all of it is checked here."""
    with cpu():
        source = Trained(wrapper, OfModel(one_group))
        group = source.process_group
        by_id, full = source.gather(None), source.gather(None, "name")
        fsdp_optim.save(folder, source.model, source.optim, options=fsdp_optim.SaveOptions(process_group=group))
        verbs: dict[str, Callable[..., Any]] = {
            "shard": lambda target, **o: target.shard(full, **o),
            "shard by id": lambda target, **o: target.shard(by_id, **o),
            "scatter": lambda target, **o: target.scatter(full, dist.get_world_size() - 1, **o),
            "transfer": lambda target, **o: fsdp_optim.transfer_optim_state(
                source.model,
                source.optim,
                target.model,
                target.optim,
                **as_options(fsdp_optim.CallOptions, **o, process_group=group),
            ),
            "load": lambda target, **o: fsdp_optim.load(
                folder,
                target.model,
                target.optim,
                **as_options(fsdp_optim.LoadOptions, **{"compare": True, **o}, process_group=group),
            ),
        }
        if wrapper == "FSDP2":
            sharded = get_optimizer_state_dict(source.model, source.optim)
            verbs["sharded"] = lambda target, **o: target.shard(sharded, **o)
        errors = {}
        for verb, call in verbs.items():
            for steps in (0, 2):
                target = Trained(wrapper, OfModel(decay_and_none), steps)
                before = snapshot(target)
                errors[verb] = error_text(lambda: call(target))  # noqa: B023
                check_same(f"{verb}: nothing is changed", snapshot(target), before)
                groups = copy.deepcopy(
                    [{k: v for k, v in g.items() if k != "params"} for g in target.optim.param_groups]
                )
                ids = [[id(param) for param in g["params"]] for g in target.optim.param_groups]
                made = call(target, param_groups="live")
                if verb not in ("transfer", "load"):
                    fsdp_optim.load_optim_state_dict(target.optim, made)
                loaded = target.optim.param_groups
                check_same(f"{verb}: groups", [{k: v for k, v in g.items() if k != "params"} for g in loaded], groups)
                check_same(f"{verb}: members", [[id(param) for param in g["params"]] for g in loaded], ids)
                again = target.gather(None, "name")
                check_same(f"{verb}: state", by_name(again), by_name(full))
                target.step([7])
        return errors


def into_one_flat_parameter(wrapper: str) -> list[tuple[str, str]]:
    """Originals that were in two groups, and lie in one flat parameter now."""
    with cpu():
        source, target = Trained("plain", OfModel(biases_apart)), Trained(wrapper, OfModel(one_group), 0)
        full = source.gather(None, "name")
        errors = [error_text(lambda: target.shard(full)), error_text(lambda: target.scatter(full))]
        for shard in (target.shard(full, param_groups="live"), target.scatter(full, param_groups="live")):
            fsdp_optim.load_optim_state_dict(target.optim, shard)
            check_same("state", by_name(target.gather(None, "name")), by_name(full))
            check_same("lr", target.optim.param_groups[0]["lr"], 0.125)
        return errors


class GroupsTest(unittest.TestCase):
    @expand(*some(("fairscale flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "plain"), every=3))
    def test_groups_that_have_changed(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(regrouped, 2, wrapper, str(Path(folder, "one")))
        for verb in by_rank[0]:
            check_refused(
                verb, [errors[verb] for errors in by_rank], "StateError", "param_groups='live'", "1", "2", "param group"
            )

    @parameterized.expand(("fairscale flat", "FSDP1 flat"))
    def test_two_groups_into_one_flat_parameter(self, wrapper: str) -> None:
        for errors in zip(*run_on_ranks(into_one_flat_parameter, 2, wrapper), strict=True):
            check_refused("two groups", errors, "StateError", "param_groups='live'")

    def test_parameters_that_one_side_lacks(self) -> None:
        """strict and groups are two questions."""
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        saved = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()])
        live = torch.optim.AdamW(
            [{"params": list(model[1].parameters())}, {"params": list(model[2].parameters())}], lr=0.5
        )
        model(torch.ones(4, 3)).sum().backward()
        saved.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, saved, key_by="name")
        with self.assertRaisesRegex(fsdp_optim.StateError, "0.weight"):
            fsdp_optim.get_shard_from_optim_state_dict(model, live, full, param_groups="live")
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, live, full, param_groups="live", strict=False)
        told = fsdp_optim.load_optim_state_dict(live, shard)
        self.assertEqual((told.missing_keys, told.unexpected_keys), (("2.weight", "2.bias"), ("0.weight", "0.bias")))
        for param in model[1].parameters():
            check_same("state", live.state[param], saved.state[param])
        self.assertEqual([group["lr"] for group in live.param_groups], [0.5, 0.5])

    def test_several_optimizers(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        saved = torch.optim.AdamW(biases_apart(model).param_groups, lr=0.25)
        model(torch.ones(4, 3)).sum().backward()
        saved.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, saved)
        live = [torch.optim.AdamW(part.parameters(), lr=0.5) for part in model]
        with self.assertRaisesRegex(fsdp_optim.StateError, "param_groups='live'"):
            fsdp_optim.get_shard_from_optim_state_dict(model, live, full)
        shards = fsdp_optim.get_shard_from_optim_state_dict(model, live, full, param_groups="live")
        fsdp_optim.load_optim_state_dict(live, shards)
        for optim in live:
            self.assertEqual(optim.param_groups[0]["lr"], 0.5)
            for param in optim.param_groups[0]["params"]:
                check_same("state", optim.state[param], saved.state[param])
