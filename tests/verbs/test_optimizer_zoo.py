"""Every optimizer of `pytorch_optimizer` that keeps a state: back bit for bit from everything that takes it, or refused by name.

Their states have all that optimizers keep: moments, factored moments, histories, weights of shape (1,), dicts and lists of
tensors, numbers, objects, and entries under keys that are no parameters.
"""

from __future__ import annotations

import functools
import inspect
import re
import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.imports import Later
from kit.optimizers import OfModel, Optim
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import FsdpOptimError
from fsdp_optim.state.values import same
from fsdp_optim.testing import run_on_ranks

pytorch_optimizer = Later("pytorch_optimizer")
pytestmark = pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")


class Zoo(nn.Module):
    """Parameters with shapes that an optimizer's values can have by coincidence: (1,), (1, n), (n, 1, 1, 1)."""

    units = ("conv", "first", "")
    tensor_parallel: Mapping[str, Any] = {}

    def __init__(self, scale: Sequence[int] = (1,)) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(scale))
        self.conv = nn.Conv2d(2, 3, 1)
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 1)


def zoo_without_dimensions() -> nn.Module:
    return Zoo(())


# Those that the issue names, and some of every other kind.
FEW = (
    *("Amos", "AggMo", "Nero", "SM3", "RACS", "Alice", "SaRA", "A2Grad", "AdaNorm", "Adalite", "QHAdam", "SWATS"),
    *("FlashAdamW", "MADGRAD", "SPAM", "AdaFactor", "Shampoo", "CAME", "Prodigy", "Lion", "NovoGrad"),
)

# Why each of the others is not here: what it needs that a step without a forward pass does not have.
NOT_STEPPED = frozenset({"LBFGS", "LOMO", "AdaLOMO", "AliG", "BSAM", "DeMo", "SpectralSphere"})

# Their own steps never return on uneven shards: DistributedMuon exchanges whole parameters between ranks, and gloo then aborts
# the process; in the other three, one rank alone waits for a collective operation of DTensor.
NOT_STEPPED_ON = {"FSDP2": frozenset({"DistributedMuon", "AvaGrad", "Gravity", "StableSPAM"})}


def all_of_them(wrap: str) -> list[str]:
    names = {cls.__name__ for cls in pytorch_optimizer.optimizer.OPTIMIZERS.values()}
    names -= NOT_STEPPED | NOT_STEPPED_ON.get(wrap, frozenset())
    if len(names) < 90:
        raise AssertionError(f"only {len(names)} optimizers")
    return sorted(names)


@functools.cache
def wants_muon(cls: type) -> bool:
    """Whether its groups must say which of them are for Muon; finding a class's source takes longer than its steps."""
    return "use_muon" in inspect.getsource(cls)


def made(name: str) -> OfModel:
    """An optimizer of all parameters of a model."""
    cls = next(cls for cls in pytorch_optimizer.optimizer.OPTIMIZERS.values() if cls.__name__ == name)
    takes = inspect.signature(cls.__init__).parameters
    more = {"num_iterations": 10} if "num_iterations" in takes else {}

    def make(model: nn.Module) -> Optim:
        params = list(model.parameters())
        if wants_muon(cls):
            matrices = [param for param in params if param.ndim > 1]
            others = [param for param in params if param.ndim < 2]
            groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
            return cls([group for group in groups if group["params"]], **more)
        return cls(params, **more)

    return OfModel(make)


def on_all_ranks(text: str) -> str:
    """The report of the first rank that has one."""
    if not dist.is_initialized():
        return text
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, text)
    return next(filter(None, told), "")


def trip(name: str, wrap: str | Callable[[nn.Module], Any], model: Callable[[], nn.Module], folder: str) -> str:
    """The differences after all trips of one optimizer's state; "" for none. "cannot step": the wrapper is not for it."""
    failed = ""
    try:
        trained = Trained(wrap, made(name), 3, model)
    except Exception as error:
        failed = f"cannot step: {type(error).__name__}: {error}"
    failed = on_all_ranks(failed)
    if failed:
        return failed
    if not on_all_ranks("state" if _state(trained) else ""):
        return "no state"
    for how, path in (("shard", "id"), ("rekey", "name"), ("scatter", "id"), ("transfer", ""), ("save", "")):
        try:
            target = Trained(wrap, made(name), 0, model)
            _send(trained, target, how, path, f"{folder}/{'()' if model is not Zoo else ''}/{name}")
            failed = _unlike(_state(trained), _state(target))
        except FsdpOptimError as error:
            failed = f"refused: {error}"
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        failed = on_all_ranks(failed)
        if failed:
            return f"{how}: {failed}"
    return ""


def _send(trained: Trained, target: Trained, how: str, key_by: Any, path: str) -> None:
    group = {"process_group": trained.process_group}
    if how == "transfer":
        fsdp_optim.transfer_optim_state(
            trained.model, trained.optim, target.model, target.optim, **as_options(fsdp_optim.CallOptions, **group)
        )
    elif how == "save":
        trust = path.rpartition("/")[2] in OBJECTS
        fsdp_optim.save(
            path,
            trained.model,
            trained.optim,
            **as_options(fsdp_optim.SaveOptions, **group, durable=False, allow_pickle=trust),
        )
        fsdp_optim.load(
            path,
            target.model,
            target.optim,
            **as_options(fsdp_optim.LoadOptions, **group, compare=True, allow_pickle=trust),
        )
    else:
        full = trained.gather(None, key_by)
        if how == "rekey":
            full = fsdp_optim.rekey_optim_state_dict(full, trained.model, "id")
        elif how == "shard":  # as a file keeps it
            with tempfile.TemporaryFile() as file:
                torch.save(full, file)
                file.seek(0)
                full = torch.load(file, weights_only=False)
        if how == "scatter":
            given = full if not dist.is_initialized() or dist.get_rank() == 0 else None
            shard = fsdp_optim.scatter_full_optim_state_dict(
                target.model, target.optim, given, **as_options(fsdp_optim.CallOptions, **group)
            )
        else:
            shard = target.shard(full)
        fsdp_optim.load_optim_state_dict(target.optim, shard)


def _state(trained: Trained) -> dict[Any, Any]:
    """The optimizer's own; an empty one is none, and padding, which a load fills with zeros, is zero.

    A rank of FSDP1 has none for a parameter that it holds no element of: DistributedMuon makes some all the same.
    """
    state: dict[Any, Any] = {}
    index = {id(param): numbers < 64 for param, numbers in zip(trained.params, trained.index, strict=True)}
    for key, values in trained.optim.state.items():
        if not isinstance(key, Tensor):
            state[key] = values
        elif values:
            padding = index[id(key)]
            place = next(i for i, param in enumerate(trained.params) if param is key)
            if trained.gets_gradient[place]:
                state[place] = {name: _without(padding, value) for name, value in values.items()}
    return state


def _without(padding: Tensor, value: Any) -> Any:
    """A value that is cut like a flat parameter, with zeros in the padding."""
    if type(value) is not Tensor or not bool(padding.any()) or value.shape != padding.shape:
        return value
    return torch.where(padding, torch.zeros_like(value), value)


def _unlike(wanted: Mapping[Any, Any], got: Mapping[Any, Any]) -> str:
    if set(wanted) != set(got):
        return f"state of {list(got)}, not of {list(wanted)}"
    for key, values in wanted.items():
        for name in values if isinstance(values, dict) else ():
            if name not in got[key] or not same(values[name], got[key][name]):
                return f"{key}, {name}: {got[key].get(name)!r}, not {values[name]!r}"
        if not same(values, got[key]):
            return f"{key}: {got[key]!r}, not {values!r}"
    return ""


def trips(names: Sequence[str], wrap: str, folder: str, scale: Sequence[int] = (1,)) -> dict[str, str]:
    """The differences, by optimizer."""
    torch.set_num_threads(1)
    with cpu():
        return {name: trip(name, wrap, Zoo if scale else zoo_without_dimensions, folder) for name in names}


def on_ranks(names: Sequence[str], wrap: str, world_size: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="fsdp_optim_zoo_") as folder:
        if world_size == 1:
            return trips(names, wrap, folder) | {f"{n} ()": t for n, t in trips(names, wrap, folder, ()).items()}
        return run_on_ranks(trips, world_size, names, wrap, folder, timeout=3600)[0]


# Have objects of their own in their state or their groups, which a checkpoint has only for who trusts its writer.
OBJECTS = frozenset({"SCION", "Conda", "ScalableShampoo", "AdaShift"})

# Refused by gather, by the names of a parameter (or a group) and of a value: a sum that is not made yet, and numbers that an
# optimizer made for sharded parameters computes from one rank's part, so that they differ between ranks.
REFUSED = re.compile(
    r"shard: refused: ((scale|conv|first|last)[.a-z]*: \w+ is "
    r"(a DTensor with placements \((_Norm)?Partial|.* on rank 0 and .* on rank 1)"
    r"|param group 0: \w+ is .* on rank 0 and .* on rank 1"
    r"|state_dict\(\) of Magma has no param_groups and no state)"  # it is a wrapper of another, without a dict of its own
)


# SaRA's own load_state_dict wants a mask for parameters of which a rank of FSDP1 has no element, and so no state.
OWN_TROUBLE = "shard: refused: SaRA's own load_state_dict() refused the saved state, with KeyError: 'mask'"


def problems(texts: Mapping[str, str]) -> list[str]:
    """The differences that should not be there."""
    fine = ("cannot step", "no state", OWN_TROUBLE)
    wrong = {
        name: text for name, text in texts.items() if text and not text.startswith(fine) and not REFUSED.match(text)
    }
    return [f"{name}: {text}" for name, text in wrong.items()]


def stepped(texts: Mapping[str, str]) -> int:
    return sum(not text.startswith(("cannot step", "no state")) for text in texts.values())


WRAPPED = (("FSDP2", 2), ("FSDP1 orig", 2), ("FSDP1 flat", 2), ("fairscale flat", 2))


class TestFew(unittest.TestCase):
    """Some of them, in a few seconds: every second unwrapped, and every eighth in each wrapper, from another one on."""

    @parameterized.expand([("plain", 1, 11), *((wrap, size, 1) for wrap, size in WRAPPED)])
    def test_state_comes_back(self, wrap: str, world_size: int, least: int) -> None:
        place = (wrap, world_size)
        texts = on_ranks(
            FEW[WRAPPED.index(place) :: 2 * len(WRAPPED)] if place in WRAPPED else FEW[::2], wrap, world_size
        )
        self.assertEqual(problems(texts), [])
        self.assertGreaterEqual(stepped(texts), least, texts)


@pytest.mark.slow
class TestAll(unittest.TestCase):
    """All of them."""

    @parameterized.expand([("plain", 1, 90), *((wrap, size, 10) for wrap, size in WRAPPED)])
    def test_state_comes_back(self, wrap: str, world_size: int, least: int) -> None:
        texts = on_ranks(all_of_them(wrap), wrap, world_size)
        self.assertEqual(problems(texts), [])
        self.assertGreaterEqual(stepped(texts), least, texts)
