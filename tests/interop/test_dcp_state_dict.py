"""`fsdp_optim.dcp` beside torch.distributed.checkpoint.state_dict: the same dicts, bit for bit, each loaded by the other."""

from __future__ import annotations

import copy
import unittest
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint.state_dict as theirs
from kit.cases import expand, those
from kit.compare import check_same
from kit.dcp_dicts import check_alike, plain
from kit.optimizers import OPTIMIZERS, each_of
from kit.tables import Table
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fsdp_optim import dcp

OPTIONS = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "full on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "on the CPU": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "trainable": {"ignore_frozen_params": True},
}


COMMON = ("plain", "DDP", "FSDP2", "HSDP", "FSDP2 x TP", "FSDP1 flat", "FSDP1 orig")


def groups(params: Any) -> Any:
    first, *others = params
    return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others, "weight_decay": 0.25}], amsgrad=True)


def several(params: Any) -> list[Any]:
    """One optimizer for each parameter, of two classes."""
    return [
        torch.optim.Adam([param], lr=0.01) if place % 2 else torch.optim.SGD([param], lr=0.1, momentum=0.5)
        for place, param in enumerate(params)
    ]


def of(name: str) -> Any:
    kind, options = OPTIMIZERS[name]
    return lambda params: kind(params, **options)


MAKERS: dict[str, Any] = {"groups": groups, "several": several, **{name: of(name) for name in OPTIMIZERS}}


def gets(wrapper: str, maker: str, prepare: Any = None) -> None:
    """Every dict is torch's, and nothing changes."""
    with cpu():
        trained = Trained(wrapper, MAKERS[maker], prepare=prepare)
        before = snapshot(trained)
        dicts = {
            name: dcp.get_state_dict(trained.model, trained.optim, options=StateDictOptions(**given))
            for name, given in OPTIONS.items()
        }
        check_same("side effects", snapshot(trained), before)
        for name, given in OPTIONS.items():
            oracle = trained
            if wrapper.startswith("FSDP1") and given.get("full_state_dict"):
                oracle = Trained("plain", MAKERS[maker], prepare=prepare)  # torch cannot unshard FSDP1 on the CPU
            wanted = theirs.get_state_dict(oracle.model, oracle.optim, options=StateDictOptions(**given))
            check_alike(f"{name}, weights", dicts[name][0], wanted[0])
            if oracle is not trained:  # which lists the parameters unit by unit
                for state in (dicts[name][1], wanted[1]):
                    for group in state.get("param_groups", ()):
                        group["params"].sort()
            check_alike(f"{name}, state", dicts[name][1], wanted[1])


GETS = Table(
    gets,
    *those(
        [
            *[(size, wrapper, "adamw") for size in (2, 4) for wrapper in COMMON],
            *[(2, "FSDP2", maker) for maker in MAKERS if maker not in ("adamw", "peculiar", "rprop")],
        ],
        lambda size, wrapper, maker: True,
    ),
)


def no_step(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an optimizer was stepped")


def set_both(loader: Any, target: Trained, weights: Any, state: Any, options: StateDictOptions) -> Any:
    if loader is theirs:  # whose set_state_dict passes over the model on ranks with an empty dict
        loader.set_optimizer_state_dict(target.model, target.optim, state, options=options)
        return loader.set_model_state_dict(target.model, weights, options=options)
    with mock.patch.object(torch.optim.Optimizer, "zero_grad", no_step), ExitStack() as stack:
        for optim in each_of(target.optim):
            stack.enter_context(mock.patch.object(type(optim), "step", no_step))
        return loader.set_state_dict(
            target.model, target.optim, model_state_dict=weights, optim_state_dict=state, options=options
        )


def loads(wrapper: str, maker: str) -> None:
    """The dicts of either library are loaded by either: the model and the optimizer are then those that were saved."""
    with cpu():
        trained = Trained(wrapper, MAKERS[maker])
        wanted = plain(theirs.get_state_dict(trained.model, trained.optim))
        for name, given in OPTIONS.items():
            if name == "trainable":
                continue
            options = StateDictOptions(**given)
            to_load = StateDictOptions(**given)
            if name == "full on rank 0":
                to_load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            for kind, source, loader in (("ours", dcp, dcp), ("theirs", theirs, dcp), ("by theirs", dcp, theirs)):
                is_fsdp1 = wrapper.startswith("FSDP1") and given.get("full_state_dict")
                is_strided = wrapper == "FSDP2 x TP" and given.get(
                    "full_state_dict"
                )  # torch cannot cut full tensors like that
                if (theirs in (loader, source) and is_fsdp1) or (loader is theirs and (maker != "adamw" or is_strided)):
                    continue
                weights, state = copy.deepcopy(source.get_state_dict(trained.model, trained.optim, options=options))
                target = Trained(wrapper, MAKERS[maker], steps=0)
                result = set_both(loader, target, weights, state, to_load)
                check_same(f"{name}, {kind}, names", (list(result[0]), list(result[1])), ([], []))
                loaded = plain(theirs.get_state_dict(target.model, target.optim))
                if loader is theirs:  # which makes lists of tuples
                    for group in loaded[1]["param_groups"]:
                        group["betas"] = tuple(group["betas"])
                check_same(f"{name}, {kind}", loaded, wanted, in_order=False)


LOADS = Table(
    loads,
    [
        *[(size, wrapper, "adamw") for size in (2, 4) for wrapper in COMMON],
        *[(2, "FSDP2", maker) for maker in ("groups", "several", "sgd", "sgd_momentum", "rmsprop", "adamw_amsgrad")],
    ],
)


class LoadTest(unittest.TestCase):
    @expand(*LOADS.soon_and_later)
    def test_either_loads_what_either_gives(self, size: int, wrapper: str, maker: str) -> None:
        LOADS(size, wrapper, maker)


class GetTest(unittest.TestCase):
    @expand(*GETS.soon_and_later)
    def test_torchs_dicts(self, size: int, wrapper: str, maker: str) -> None:
        GETS(size, wrapper, maker)


if __name__ == "__main__":
    unittest.main()
