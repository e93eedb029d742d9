"""State of fused parameters that does not fit their parts: begun anew with strict=False, and reported by name."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
from kit.compare import Differs, check_same, sorted_state
from kit.fused import VIEWS, TrainedFused, Unfused
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions
from fsdp_optim.testing import run_on_ranks

QKV = tuple(f"attention.w{part}.weight" for part in "qkv")
BIASES = tuple(f"attention.w{part}.bias" for part in "qkv")


def param_of(trained: Trained, name: str) -> nn.Parameter:
    return dict(trained.model.named_parameters())[name]


def saved_without(folder: str) -> None:
    """wk was frozen, so it has no state; the other checkpoint lacks ff.w3 altogether."""
    with cpu():
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        del apart.optim.state[param_of(apart, "attention.wk.weight")]
        fsdp_optim.save(f"{folder}/frozen", apart.model, apart.optim)
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        del apart.model.ff.w3
        optim = torch.optim.Adam(apart.model.parameters())
        for key in ("lr", "betas", "eps", "weight_decay"):
            optim.param_groups[0][key] = apart.optim.param_groups[0][key]
        optim.state.update({param: apart.optim.state[param] for param in apart.model.parameters()})
        fsdp_optim.save(f"{folder}/lacking", apart.model, optim)


def state_of(fused: Trained) -> Any:
    return sorted_state(fused.gather(None, "name", views=VIEWS)["state"])


def without(state: Any, names: tuple[str, ...]) -> Any:
    return {fqn: values for fqn, values in state.items() if fqn not in names}


def begun_anew(folder: str) -> None:
    """On one rank: the fused parameter alone begins anew, whatever it has, and the rest is as saved. Then all train on."""
    wanted = sorted_state(Oracle(adam, STEPS, Unfused).by_name())
    with cpu():
        for wrapper, anew in (("FSDP2", QKV), ("FSDP1 orig", QKV), ("FSDP1 flat", (*QKV, *BIASES)), ("DDP", QKV)):
            for steps in (0, STEPS + 1):
                fused = TrainedFused(wrapper, adam, steps)
                options = LoadOptions(views=VIEWS, process_group=fused.process_group, compare=True)
                result = fsdp_optim.load(f"{folder}/frozen", fused.model, fused.optim, strict=False, options=options)
                what = f"{wrapper}, {steps} steps"
                check_same(f"{what}, begun anew", sorted(result.begun_anew), sorted(anew))
                check_same(
                    f"{what}, others", (result.missing_keys, result.unexpected_keys, result.absent), ((), (), ())
                )
                check_same(what, without(state_of(fused), anew), without(wanted, anew))
                has = {fqn for fqn, values in state_of(fused).items() if values}
                check_same(f"{what}, without state", sorted(set(anew) & has), [])
                fused.step(range(STEPS, STEPS + 1))


def kept_or_anew(folder: str) -> None:
    """A part that the checkpoint lacks keeps its live state, as other parameters do; without any, the whole begins anew."""
    wanted = sorted_state(Oracle(adam, STEPS, Unfused).by_name())
    with cpu():
        fused = TrainedFused("FSDP2", adam, STEPS)
        options = LoadOptions(views=VIEWS)
        result = fsdp_optim.load(f"{folder}/lacking", fused.model, fused.optim, strict=False, options=options)
        check_same("kept", (result.missing_keys, result.begun_anew), (("ff.w3.weight",), ()))
        check_same("state", state_of(fused), wanted)
        fused = TrainedFused("FSDP2", adam, 0)
        result = fsdp_optim.load(f"{folder}/lacking", fused.model, fused.optim, strict=False, options=options)
        anew = ("ff.w1.weight", "ff.w3.weight")
        check_same("begun anew", result.begun_anew, anew)
        check_same("rest", without(state_of(fused), anew), without(wanted, anew))


def of_a_dict(folder: str) -> None:
    """A full dict too: cut by each rank alone, and sent by one."""
    with cpu():
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        full = apart.gather(None, "name")
        del full["state"]["attention.wk.weight"]
        for name in ("shard", "scatter"):
            fused = TrainedFused("FSDP2", adam, 0)
            part = getattr(fused, name)(full, views=VIEWS, strict=False)
            found = fsdp_optim.load_optim_state_dict(fused.optim, part)
            check_same(f"{name}, begun anew", (bool(found), found.begun_anew), (True, QKV))
            if "begun_anew" not in repr(found):
                raise Differs(repr(found))
            check_same(name, without(state_of(fused), QKV), without(sorted_state(full["state"]), QKV))


class TestBegunAnew(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_a_fused_parameter_of_which_a_part_has_no_state(self) -> None:
        run_on_ranks(saved_without, 2, self.folder)
        run_on_ranks(begun_anew, 2, self.folder)
        run_on_ranks(kept_or_anew, 2, self.folder)

    def test_full_dicts(self) -> None:
        run_on_ranks(of_a_dict, 2, self.folder)
