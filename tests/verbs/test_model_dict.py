"""`gather_full_model_state_dict` gives what the unwrapped model's `state_dict()` has, and scatter loads it, in every wrapper."""

from __future__ import annotations

import unittest
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, those
from kit.compare import Differs, check_same, refused_on_ranks
from kit.tables import Table
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

NOT_CUT = ("plain", "DDP")


class Counting(nn.Linear):
    """A layer with extra state, a buffer, and a buffer that is not persistent."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Tied(nn.Module):
    """Uneven shapes, an empty parameter, one of another dtype by itself, and a head tied to the stem."""

    units = ("block.0", "block", "")  # wrappers keep ties inside one unit only
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.stem = nn.Linear(5, 7, bias=False)
        self.block = nn.Sequential(Counting(7, 3), nn.LayerNorm(3))
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.stem.weight


def made(first: float) -> Tied:
    """A model whose elements count from `first` on; -1: every element is -1."""
    model = Tied()
    at = first
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if first < 0:
                tensor.fill_(-1)
            else:
                tensor.copy_(torch.arange(at, at + tensor.numel()).view(tensor.shape))
                at += tensor.numel()
    model.block[0].calls = int(first) + 1  # type: ignore[union-attr]
    return model


def wrapped(wrapper: str, first: float) -> nn.Module:
    return WRAPPERS[wrapper](made(first))


def trip(wrapper: str) -> None:
    """Gather to the last rank, and to all; scatter from the last rank into another wrapper; gather again."""
    wanted, last = made(10).state_dict(), dist.get_world_size() - 1
    group = dist.group.WORLD if wrapper in NOT_CUT else None
    with cpu():
        model = wrapped(wrapper, 10)
        before = fsdp_optim.gather_full_model_state_dict(
            model, recipient_rank=None, options=fsdp_optim.CallOptions(process_group=group)
        )
        full = fsdp_optim.gather_full_model_state_dict(
            model, recipient_rank=last, options=fsdp_optim.CallOptions(process_group=group, bucket_nbytes=64)
        )
        check_same("who gets it", full is None, dist.get_rank() != last)
        for received in (before, full) if full is not None else (before,):
            check_same("names", sorted(received or ()), sorted(wanted))
            check_same("values", dict(sorted((received or {}).items())), dict(sorted(wanted.items())))
            if received is not None and received["out.weight"] is not received["stem.weight"]:
                raise Differs("a tied weight is two tensors")
        for target in ("FSDP2", "FSDP1 flat", wrapper):
            other = wrapped(target, -1)
            result = fsdp_optim.scatter_full_model_state_dict(
                other,
                full,
                source_rank=last,
                options=fsdp_optim.CallOptions(bucket_nbytes=64, process_group=dist.group.WORLD),
            )
            check_same("differences", result, fsdp_optim.Incompatible())
            group_of_target = dist.group.WORLD if target in NOT_CUT else None
            again = fsdp_optim.gather_full_model_state_dict(
                other, recipient_rank=None, options=fsdp_optim.CallOptions(process_group=group_of_target)
            )
            check_same(f"in {target}", dict(sorted((again or {}).items())), dict(sorted(wanted.items())))
            check_same("the given dict", full is None or full.keys() == wanted.keys(), True)


def refuse() -> None:
    """Wrong dicts and ranks are refused on all ranks, and the model stays as it is."""
    model, good = wrapped("FSDP2", -1), dict(made(10).state_dict())
    scatter = partial(fsdp_optim.scatter_full_model_state_dict, model)
    me = dist.get_rank()

    def of_rank_0(full: Any) -> Any:
        return full if me == 0 else None

    cases: dict[str, tuple[Any, str, tuple[str, ...]]] = {
        "no dict": (None, "StateError", ("rank 0", "NoneType")),
        "a name": ({**good, 3: good["scale"]}, "StateError", ("3: the names",)),
        "one too few": ({k: v for k, v in good.items() if k != "scale"}, "StateError", ("scale", "strict=False")),
        "one too many": ({**good, "more": good["scale"]}, "StateError", ("more", "strict=False")),
        "a shape": ({**good, "scale": torch.zeros(2)}, "StateError", ("scale: shape [2]", "[1] in the model")),
        "a dtype": ({**good, "scale": good["scale"].double()}, "StateError", ("scale: float64", "cast=True")),
        "ties": ({**good, "out.weight": good["out.weight"] + 1}, "StateError", ("out.weight", "stem.weight")),
        "meta": ({**good, "scale": good["scale"].to("meta")}, "StateError", ("scale", "meta")),
        "sharded": ({**good, "scale": model.scale}, "StateError", ("scale", "DTensor", "full tensors")),
    }
    for name, (full, kind, words) in cases.items():
        refused_on_ranks(name, partial(scatter, of_rank_0(full)), kind, *words)
    refused_on_ranks("a rank", partial(scatter, good, source_rank=7), "RankError", "source_rank 7")
    refused_on_ranks(
        "a recipient", partial(fsdp_optim.gather_full_model_state_dict, model, 7), "RankError", "recipient_rank 7"
    )
    gathered = fsdp_optim.gather_full_model_state_dict(model, None)
    check_same("unchanged", gathered, wanted_of(model, made(-1).state_dict(), gathered))
    less = {k: v for k, v in good.items() if k != "scale"}
    result = scatter(of_rank_0({**less, "more": torch.zeros(1)}), strict=False)
    check_same("passed over", (result.missing_keys, result.unexpected_keys), (("scale",), ("more",)))
    scatter(of_rank_0({f"model.{k}": v for k, v in good.items()}), rename={"model.": ""})
    gathered = fsdp_optim.gather_full_model_state_dict(model, None)
    check_same("renamed", gathered, wanted_of(model, good, gathered))
    low = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in made(20).state_dict().items()}
    scatter(of_rank_0(low), cast=True)
    gathered = fsdp_optim.gather_full_model_state_dict(model, None)
    check_same("cast", gathered, wanted_of(model, made(20).state_dict(), gathered))


def frozen(wrapper: str) -> nn.Module:
    model = made(10)
    model.stem.requires_grad_(False)
    return WRAPPERS[wrapper](model)


def trainable() -> None:
    """The parameters that require gradients, and all buffers and extra state."""
    wanted = {name: value for name, value in made(10).state_dict().items() if name not in ("stem.weight", "out.weight")}
    for wrapper in ("plain", "DDP", "FSDP2"):
        with cpu():
            gather = partial(
                fsdp_optim.gather_full_model_state_dict,
                frozen(wrapper),
                None,
                options=fsdp_optim.CallOptions(process_group=dist.group.WORLD),
            )
            gathered = gather(weights="trainable")
            check_same(wrapper, dict(sorted((gathered or {}).items())), dict(sorted(wanted.items())))
            refused_on_ranks("none", partial(gather, weights="none"), "StateError", "weights", "'trainable'")


def wanted_of(model: nn.Module, full: Any, order: Any) -> Any:
    """The same entries in the order of the found ones."""
    return {name: full[name] for name in order}


TRIPS = Table(
    trip,
    # ties across the layers of tensor parallelism are DTensors of two meshes
    *those(
        [(size, wrapper) for size in (1, 2, 3) for wrapper in WRAPPERS if wrapper != "FSDP2 x TP"],
        lambda size, wrapper: size == 2 or wrapper in ("fairscale flat", "FSDP2", "plain"),
    ),
)


class ModelDictTest(unittest.TestCase):
    @expand(*TRIPS.soon_and_later)
    def test_every_wrapper(self, size: int, wrapper: str) -> None:
        TRIPS(size, wrapper)

    def test_the_trainable_weights_alone(self) -> None:
        run_on_ranks(trainable, 2)

    def test_what_does_not_fit_is_refused(self) -> None:
        run_on_ranks(refuse, 2)


if __name__ == "__main__":
    unittest.main()
