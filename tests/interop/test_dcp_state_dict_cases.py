"""What `fsdp_optim.dcp` promises beside torch's values: nothing steps, nothing is cast, and what does not fit changes nothing."""

from __future__ import annotations

import copy
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.checkpoint.state_dict as theirs
from kit.compare import check_same, refused_on_ranks
from kit.dcp_dicts import check_alike, plain
from kit.models import freeze_stem
from kit.optimizers import Peculiar, adam
from kit.tables import Table
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from kit.wraps import WRAPPERS, in_fsdp2, mesh_2d
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import fsdp_optim
from fsdp_optim import dcp

WRAPPED = ("plain", "FSDP2", "FSDP1 flat", "FSDP1 orig")
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def no_step(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an optimizer was stepped")


def frozen(wrapper: str) -> None:
    """Frozen parameters have weights and no state; `ignore_frozen_params` leaves out the weights, and only these."""
    with cpu():
        trained = Trained(wrapper, adam, prepare=freeze_stem if wrapper != "FSDP1 flat" else None)
        options = StateDictOptions(ignore_frozen_params=True)
        for given in (None, options):
            weights, state = dcp.get_state_dict(trained.model, trained.optim, options=given)
            wanted = theirs.get_state_dict(trained.model, trained.optim, options=given)
            check_alike("weights", weights, wanted[0])
            check_alike("state", state, wanted[1])


def fresh(wrapper: str) -> None:
    """An optimizer without state gives the values before the first step, and has no state itself before they are set."""
    with cpu():
        saved, target = Trained(wrapper, adam), Trained(wrapper, adam, steps=0)
        before = snapshot(target)
        with mock.patch.object(torch.optim.Adam, "step", no_step):
            empty = dcp.get_optimizer_state_dict(target.model, target.optim)
            check_same("side effects", snapshot(target), before)
            check_same("state", len(target.optim.state), 0)
            wanted = dcp.get_optimizer_state_dict(saved.model, saved.optim)
        zeros = copy.deepcopy(wanted)
        for values in zeros["state"].values():
            for value in values.values():
                local = value if type(value) is torch.Tensor else None
                for tensor in [local] if local is not None else parts_of(value):
                    tensor.zero_()
        check_alike("values before the first step", empty, zeros)
        loaded = {"optim": wanted}
        if not wrapper.startswith(
            "FSDP1"
        ):  # torch cannot load ShardedTensors that a rank has no part of, its own neither
            loaded = loaded_by_torch(wanted, empty)
        check_alike("loaded by torch", loaded["optim"], wanted)
        with mock.patch.object(torch.optim.Adam, "step", no_step):
            dcp.set_optimizer_state_dict(target.model, target.optim, loaded["optim"])
            check_alike("set", dcp.get_optimizer_state_dict(target.model, target.optim), wanted)


def loaded_by_torch(saved: Any, into: Any) -> dict[str, Any]:
    """Save one dict and load the other, both by torch."""
    loaded = {"optim": into}
    with tempfile.TemporaryDirectory() as folder:
        paths: list[Any] = [folder]
        dist.broadcast_object_list(paths)
        checkpoint.save({"optim": saved}, checkpoint_id=Path(paths[0]) / "saved")
        checkpoint.load(loaded, checkpoint_id=Path(paths[0]) / "saved")
        dist.barrier()
    return loaded


def parts_of(value: Any) -> list[torch.Tensor]:
    if hasattr(value, "to_local"):
        return [value.to_local()]
    return [shard.tensor for shard in value.local_shards()]


class Tied(nn.Module):
    units = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(3, 5)
        self.head.weight = self.stem.weight
        self.register_buffer("mean", torch.arange(3.0))


def tied(wrapper: str) -> None:
    """A tied weight is under all of its names, as torch has it, and each name alone is enough to load it."""
    with cpu():
        torch.manual_seed(0)
        model, other = WRAPPERS[wrapper](Tied()), WRAPPERS[wrapper](Tied())
        weights = dcp.get_model_state_dict(model)
        check_alike("weights", weights, theirs.get_model_state_dict(model))
        for left_out in ("stem.weight", "head.weight"):
            less = {name: value for name, value in copy.deepcopy(weights).items() if name != left_out}
            dcp.set_model_state_dict(other, less)
            check_alike(left_out, dcp.get_model_state_dict(other), weights)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()


def other_mesh() -> None:
    """Values on one mesh are loaded into a model on another, and full values into any."""
    with cpu():
        saved = Trained("FSDP2", adam)
        target = Trained(lambda model: in_fsdp2(model, mesh_2d((2, dist.get_world_size() // 2))), adam, steps=0)
        for source in (dcp, theirs):
            weights, state = source.get_state_dict(saved.model, saved.optim)
            dcp.set_state_dict(target.model, target.optim, model_state_dict=weights, optim_state_dict=state)
            full = StateDictOptions(full_state_dict=True)
            loaded = dcp.get_state_dict(target.model, target.optim, options=full)
            wanted = theirs.get_state_dict(saved.model, saved.optim, options=full)
            check_alike("weights", loaded[0], wanted[0])
            check_alike("state", loaded[1], wanted[1])


def stepped(whole: nn.Module) -> dict[str, Any]:
    """The weights of a copy after one step."""
    model = copy.deepcopy(whole)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    return dict(model.state_dict())


def first_mesh_dim() -> None:
    """FSDP1 shards over the first dimension of a mesh, and torch's dicts are cut over the last one."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import always_wrap_policy

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    mesh = mesh_2d((2, 2))
    units = {"device_mesh": mesh, "use_orig_params": True, "auto_wrap_policy": always_wrap_policy}
    model = FullyShardedDataParallel(copy.deepcopy(whole), device_id=torch.device("cpu"), **units)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    weights, state = dcp.get_state_dict(model, optim)
    check_same("gathered", fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None), stepped(whole))
    check_alike("as torch's", [weights, state], [*theirs.get_state_dict(model, optim)])
    model(torch.ones(2, 3)).sum().backward()
    wanted = copy.deepcopy(weights), copy.deepcopy(state)
    for loader in (dcp, theirs):
        optim.step()
        loader.set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=state)
        check_alike(f"loaded by {loader.__name__}", [*dcp.get_state_dict(model, optim)], [*wanted])


def refusals() -> None:
    """What does not fit is refused on all ranks, by name, before anything changes."""
    target = Trained("FSDP2", adam)
    before = plain(dcp.get_state_dict(target.model, target.optim))
    before = copy.deepcopy(before)
    weights, state = dcp.get_state_dict(target.model, target.optim, options=StateDictOptions(full_state_dict=True))
    low = {**weights, "scale": weights["scale"].bfloat16()}
    wrong = {**weights, "scale": torch.zeros(2)}
    less = {name: value for name, value in weights.items() if name != "scale"}
    model = target.model

    def set_model(given: Any, options: Any = None) -> Any:
        return lambda: dcp.set_model_state_dict(model, given, options=options)

    for options in (None, BROADCAST):
        here = options is None or dist.get_rank() == 0
        refused_on_ranks("dtype", set_model(low if here else {}, options), "StateError", "scale: bfloat16", "float32")
        refused_on_ranks("shape", set_model(wrong if here else {}, options), "StateError", "scale", "[2]", "[1]")
        refused_on_ranks("less", set_model(less if here else {}, options), "StateKeysError", "Missing key", "scale")
    more = {**less, "more": torch.zeros(1)}
    refused_on_ranks("more", set_model(more), "StateKeysError", "Unexpected key", "more")
    result = dcp.set_model_state_dict(model, more, options=StateDictOptions(strict=False))
    check_same("passed over", (result.missing_keys, result.unexpected_keys), (["scale"], ["more"]))

    def set_state(given: Any, options: Any = None) -> Any:
        return lambda: dcp.set_optimizer_state_dict(model, target.optim, given, options=options)

    groups = [{**state["param_groups"][0], "params": [f for f in state["param_groups"][0]["params"] if f != "scale"]}]
    less_state = {"state": state["state"], "param_groups": groups}
    for options in (None, BROADCAST):
        here = options is None or dist.get_rank() == 0
        given = less_state if here else {}
        refused_on_ranks("a parameter", set_state(given, options), "StateKeysError", "Missing key", "scale")
        refused_on_ranks("nothing", set_state({}, options), "StateKeysError", "empty")
    alone = StateDictOptions(broadcast_from_rank0=True)
    refused_on_ranks("alone", set_model(weights, alone), "StateError", "full_state_dict must be True")
    peculiar = Peculiar(model.parameters())
    refused_on_ranks(
        "a class", lambda: dcp.get_optimizer_state_dict(model, peculiar), "StateError", "Peculiar", "fsdp_optim.load"
    )
    check_same("unchanged", plain(dcp.get_state_dict(target.model, target.optim)), before, in_order=False)


def meta() -> None:
    """A model on the meta device gets memory."""
    saved = Trained("FSDP2", adam)
    full = dcp.get_model_state_dict(saved.model, options=StateDictOptions(full_state_dict=True))
    for options in (StateDictOptions(full_state_dict=True), BROADCAST):
        with torch.device("meta"):
            target = WRAPPERS["FSDP2"](type(saved.model).__mro__[2]())
        given = full if options is not BROADCAST or dist.get_rank() == 0 else {}
        dcp.set_model_state_dict(target, given, options=options)
        check_alike("weights", dcp.get_model_state_dict(target), dcp.get_model_state_dict(saved.model))


FROZEN = Table(frozen, [(2, wrapper) for wrapper in ("plain", "FSDP2", "FSDP1 orig")])
FRESH = Table(fresh, [(2, wrapper) for wrapper in WRAPPED])
TIED = Table(tied, [(2, wrapper) for wrapper in WRAPPED])
CASES = {"refusals": refusals, "meta": meta, "other_mesh": other_mesh, "first_mesh_dim": first_mesh_dim}


def other(case: str) -> None:
    CASES[case]()


OTHERS = Table(other, [(2, "refusals"), (2, "meta"), (4, "other_mesh"), (4, "first_mesh_dim")])


class CasesTest(unittest.TestCase):
    def test_frozen(self) -> None:
        for case in FROZEN.cases:
            FROZEN(*case)

    def test_fresh(self) -> None:
        for case in FRESH.cases:
            FRESH(*case)

    def test_tied(self) -> None:
        for case in TIED.cases:
            TIED(*case)

    def test_others(self) -> None:
        for case in OTHERS.cases:
            OTHERS(*case)

    def test_options_are_known(self) -> None:
        """A new option of torch must be decided."""
        from dataclasses import fields, make_dataclass

        from fsdp_optim.dcp.dicts.options import read_options

        known = {"full_state_dict", "cpu_offload", "ignore_frozen_params", "keep_submodule_prefixes", "strict"}
        known |= {"broadcast_from_rank0", "flatten_optimizer_state_dict", "dsd_fqn_modifiers"}
        self.assertLessEqual({option.name for option in fields(StateDictOptions)}, known)
        newer = make_dataclass("StateDictOptions", [("strict", bool, True), ("compress", bool, False)])
        read_options(newer())
        with self.assertRaisesRegex(fsdp_optim.StateError, "compress=True"):
            read_options(newer(compress=True))

    def test_the_names_are_torchs(self) -> None:
        import inspect

        self.assertIs(dcp.StateDictOptions, theirs.StateDictOptions)
        self.assertIs(dcp.Stateful, checkpoint.stateful.Stateful)
        for name in dcp.__all__:
            if name[:3] in ("get", "set"):
                own, torchs = (inspect.signature(getattr(module, name)) for module in (dcp, theirs))
                kinds = [[(p.name, p.kind, p.default) for p in each.parameters.values()] for each in (own, torchs)]
                self.assertEqual(*kinds)


if __name__ == "__main__":
    unittest.main()
