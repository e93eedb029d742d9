"""The result of get_shard and scatter is an ordinary dict of the optimizer's own keys; a full dict is none of them."""

from __future__ import annotations

import io
import tempfile
import unittest
from typing import Any

import torch
from kit.compare import Differs, check_refused, check_same, error_text
from kit.models import Net
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from kit.wraps import WRAPPERS, in_fsdp1
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Longer(Net):
    """`Net` and one more unit."""

    units = ("stem", "block.0", "block", "added", "")

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(3, 2)


def plain_dicts() -> None:
    with cpu():
        for wrapper in ("fairscale flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "plain"):
            source, target = Trained(wrapper), Trained(wrapper, steps=0)
            full = source.gather(None, "name")
            for how, shard in (("shard", target.shard(full)), ("scatter", target.scatter(full))):
                kinds = {type(shard), type(shard["state"]), *map(type, shard["state"].values())}
                check_same(f"{wrapper}, {how}: classes", kinds, {dict})
                check_same(f"{wrapper}, {how}: keys", set(shard), {"state", "param_groups"})
            loose = target.shard(full, strict=False)
            check_same(
                f"{wrapper}: where all fits, strict=False has no other keys", set(loose), {"state", "param_groups"}
            )
            longer = Trained(wrapper, model=Longer, steps=1)
            part = longer.shard(full, strict=False)
            check_same(
                f"{wrapper}: what is told", part["incompatible"], {"missing_keys": ["added.weight", "added.bias"]}
            )
            if wrapper != "FSDP2":  # a DTensor is not for torch.load(weights_only=True)
                for written in (target.shard(full), part):
                    check_same(f"{wrapper}: saved and loaded", saved_and_loaded(written), written)
            given = {**part, "incompatible": dict(part["incompatible"])}
            told = fsdp_optim.load_optim_state_dict(
                longer.optim, saved_and_loaded(part) if wrapper != "FSDP2" else part
            )
            check_same(f"{wrapper}: told by loading", told.missing_keys, ("added.weight", "added.bias"))
            check_same(f"{wrapper}: the shard is left as it was", set(part), set(given))


def saved_and_loaded(shard: Any) -> Any:
    file = io.BytesIO()
    torch.save(shard, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def full_for_a_shard(wrapper: str) -> list[tuple[str, str]]:
    """A full dict of any kind, loaded as if it were a shard."""
    with cpu():
        target = Trained(wrapper)
        by_id, by_name = target.gather(None), target.gather(None, "name")
        bare = {
            "state": by_id["state"],
            "param_groups": [
                {key: value for key, value in group.items() if key != "param_names"} for group in by_id["param_groups"]
            ],
        }
        before, errors = snapshot(target), []
        for full in (by_id, by_name, {"state": by_name["state"], "param_groups": by_name["param_groups"]}, bare):
            errors.append(error_text(lambda: fsdp_optim.load_optim_state_dict(target.optim, full)))  # noqa: B023
            if errors[-1] != ("", ""):
                check_same(f"{wrapper}: after {errors[-1]}", snapshot(target), before)
        target.load(by_id)
        return errors


def states_after_a_real_step() -> int:
    """torch's own training leaves out parameters of which a rank holds no element: the oracle of the test below."""
    model = in_fsdp1(Net(), use_orig_params=True)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    optim.step()
    empty = [param for param in model.parameters() if not param.numel()]
    check_same("parameters with state", sum(param in optim.state for param in empty), 0)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    before = {index: list(values) for index, values in optim.state_dict()["state"].items()}
    fsdp_optim.load_optim_state_dict(optim, fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))
    after = {index: list(values) for index, values in optim.state_dict()["state"].items()}
    check_same("state after a load", after, before)
    return len(empty)


def states_of_nothing(world_size: int) -> int:
    """How many parameters have no state on this rank after a load, as torch's own training has it."""
    with cpu():
        trained, target = Trained("FSDP1 orig", steps=0), Trained("FSDP1 orig", steps=0)
        for number in range(2):
            trained.step([number])
        empty = [index for index, param in enumerate(trained.params) if not param.numel()]
        full = trained.gather(None)
        for what, shard in (("shard", target.shard(full)), ("scatter", target.scatter(full, world_size - 1))):
            fsdp_optim.load_optim_state_dict(target.optim, shard)
            check_same(f"{what}: state", target.optim.state_dict()["state"], trained.optim.state_dict()["state"])
            again = target.gather(None)
            check_same(f"{what}: gathered again", again["state"], full["state"])
        target.step([2])
        return len(empty)


def checkpoint_of_nothing(folder: str) -> int:
    with cpu():
        trained, target = Trained("FSDP1 orig", steps=1), Trained("FSDP1 orig", steps=0)
        fsdp_optim.save(folder, trained.model, trained.optim)
        fsdp_optim.load(folder, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
        empty = [param for param in target.params if not param.numel()]
        if any(param in target.optim.state for param in empty):
            raise Differs("a parameter of which this rank holds no element has state")
        return len(empty)


class ShardDictTest(unittest.TestCase):
    def test_it_is_an_ordinary_dict_of_torchs_keys(self) -> None:
        run_on_ranks(plain_dicts, 2)

    @parameterized.expand(list(WRAPPERS))
    def test_a_full_dict_is_no_shard(self, wrapper: str) -> None:
        by_rank = run_on_ranks(full_for_a_shard, 2, wrapper)
        for place, errors in enumerate(zip(*by_rank, strict=True)):
            ways_out = ("get_shard_from_optim_state_dict(model, optim, full)", "scatter_full_optim_state_dict(")
            if place < 3:
                check_refused(f"{wrapper}, {place}", errors, "StateError", *ways_out)
            elif wrapper in ("plain", "DDP"):  # there a plain optimizer's dict is a shard
                self.assertEqual({kind for kind, _ in errors}, {""}, errors)
            elif "flat" in wrapper:  # the number of parameters differs, or the shapes
                self.assertEqual({kind for kind, _ in errors}, {"StateError"}, errors)
            else:
                check_refused(f"{wrapper}, {place}", [(kind, "") for kind, _ in errors], "StateError")
                self.assertTrue(all(way in text for _, text in errors for way in ways_out), errors)

    def test_no_state_for_parameters_without_elements(self) -> None:
        for num_empty in (run_on_ranks(states_after_a_real_step, 4), run_on_ranks(states_of_nothing, 4, 4)):
            self.assertGreater(sum(num_empty), 0, num_empty)

    def test_no_state_for_parameters_without_elements_from_a_checkpoint(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            num_empty = run_on_ranks(checkpoint_of_nothing, 4, f"{folder}/one")
        self.assertGreater(sum(num_empty), 0, num_empty)
