"""The golden checkpoint of version 2 of the format: always read, bit for bit, and written today in the same structure.

`PYTHONPATH=tests python tests/checkpoint/test_golden.py` makes it, once. That of version 1 is in
test_safetensors_format.py.
"""

from __future__ import annotations

import json
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_format import all_bytes, check_folder, extra, in_order, read_manifest
from kit.compare import check_same
from kit.golden import check_kept, make, without
from kit.local_parts import local_of
from kit.optimizers import OfModel
from kit.options import as_options
from kit.trained import Trained
from parameterized import parameterized
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

GOLDEN = Path(__file__).parents[1] / "data" / "golden-2"

# What `PYTHONPATH=tests python tests/checkpoint/test_golden.py` printed. It is made once: a golden checkpoint that a newer
# version cannot load is a bug of that version.
GOLDEN_SHA256 = "89fae9b8c99f97c6a37698bfd2b9a968053a13cf5c8d08e8b36a42309c1aab28"

STEP = 1000
CHANGES = ("created_ns", "token", "checksum", "xxh3_64")  # in the manifest, whenever something is saved


class Counting(nn.Module):
    """Keeps something besides parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = (3, "größe", torch.tensor([0.5, -0.0]))

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Tied(nn.Module):
    """Uneven parameters of two dtypes, one that has two names, buffers (one with two), extra state, a name that is not ASCII."""

    units = ("stem", "low", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.low = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.named = nn.ModuleDict({"größe": nn.Linear(2, 3)})
        self.same = self.named["größe"]
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(5))
        self.counting = Counting()
        self.counting.register_buffer("count", self.count)


class Momentum(torch.optim.Optimizer):
    """An optimizer of this file's own, so that no version of torch changes what it keeps; with one value of each kind."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "betas": (0.5, 0.75), "rate": torch.tensor([1.5, -0.0])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.tensor(7.0),
                    "exp_avg": torch.zeros_like(param),
                    "phase": "warm",
                    "seen": 3,
                    "nothing": None,
                    "small": _beside(param),
                }


def _beside(param: torch.Tensor) -> torch.Tensor:
    """A value of a shape of its own: of a DTensor parameter one that every rank has."""
    value = torch.tensor([0.25, -2.0, 3.0])
    return DTensor.from_local(value, param.device_mesh, [Replicate()]) if isinstance(param, DTensor) else value


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return Momentum([{"params": params[:2]}, {"params": params[2:], "lr": 0.125}])


def trained(wrapper: str, filled: bool) -> Trained:
    """Every value is a simple function of the element's number, not of anybody's arithmetic."""
    training = Trained(wrapper, OfModel(two_groups), steps=1, model=Tied)
    training.forget_gradients()
    with torch.no_grad():
        for param, index in zip(training.params, training.index, strict=True):
            values = training.optim.state[param]
            local_of(param).copy_(index.reshape(local_of(param).shape) if filled else torch.zeros(()))
            local = local_of(values["exp_avg"])
            local.copy_((-index / 4).reshape(local.shape) if filled else torch.zeros(()))
            if param.dim() == 2 and isinstance(param, DTensor):  # cut in another way than the parameter
                whole = values["exp_avg"].full_tensor().mul(2)
                values["columns"] = _by_columns(whole, param)
            elif param.dim() == 2:
                values["columns"] = values["exp_avg"] * 2
            if not filled:
                values |= {"step": torch.tensor(0.0), "phase": "", "seen": 0, "small": values["small"] * 0}
        for buffer in () if filled else training.model.buffers():
            buffer.zero_()
    if not filled:
        training.model.counting.seen = None
    for group in () if filled else training.optim.param_groups:
        group |= {"lr": 99.0, "betas": (0, 0), "rate": torch.zeros(2)}
    return training


def _by_columns(whole: torch.Tensor, param: DTensor) -> DTensor:
    """A tensor cut at its second dimension."""
    return torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, [Shard(1)])


def contents(training: Trained) -> dict[str, Any]:
    """This rank's part of all that a checkpoint restores."""
    return {
        "parameters": [local_of(param).detach() for param in training.params],
        "buffers": dict(training.model.named_buffers(remove_duplicate=False)),
        "extra state": list(training.model.counting.seen),
        "state": [
            in_order({k: local_of(v) if isinstance(v, torch.Tensor) else v for k, v in training.optim.state[p].items()})
            for p in training.params
        ],
        "groups": [in_order({k: v for k, v in g.items() if k != "params"}) for g in training.optim.param_groups],
    }


def plain() -> dict[str, Any]:
    """The values that ranks have in common without the tensor, which has been in a file of its own since version 4."""
    return {name: value for name, value in extra().items() if name != "tensor"}


def save(path: Path, values: dict[str, Any] | None = None) -> None:
    training = trained("FSDP2", filled=True)
    own = {"rank": dist.get_rank(), "rng": torch.arange(3) + dist.get_rank()}
    options: dict[str, Any] = {"extra": extra() if values is None else values, "per_rank_extra": own}
    fsdp_optim.save(path, training.model, training.optim, step=STEP, **as_options(fsdp_optim.SaveOptions, **options))


def save_on_ranks(path: Path) -> None:
    run_on_ranks(save, 2, path)


def load(path: Path, wrapper: str, values: dict[str, Any] | None = None) -> None:
    wanted, target = trained(wrapper, filled=True), trained(wrapper, filled=False)
    restored = fsdp_optim.load(
        path,
        target.model,
        target.optim,
        options=fsdp_optim.LoadOptions(process_group=target.process_group, compare=True),
    )
    check_same("loaded", contents(target), contents(wanted))
    values = extra() if values is None else values
    check_same("extra", {name: restored.state[name] for name in values}, values)
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = {"rank": rank, "rng": torch.arange(3) + rank} if rank < 2 else {}  # it was saved by two
    check_same("per_rank", {name: restored.state[name] for name in ("rank", "rng") if name in restored.state}, own)
    check_same("missing", len(restored.missing_keys), 0 if rank < 2 else 2)
    check_same("summary", (restored.step, restored.world_size), (STEP, 2))


def save_and_load(path: Path) -> None:
    """On each of two ranks."""
    save(path, plain())
    load(path, "FSDP2", plain())
    load(GOLDEN, "FSDP2")


def structure(folder: Path) -> dict[str, Any]:
    """All that a checkpoint says and holds, but what differs with each save.

    The borders of segments are free, so that tables of checksums may differ; `check_folder` has compared them with the data.
    """
    parts: dict[str, Any] = {"manifest": without((*CHANGES, "sums_xxh3_64"), read_manifest(folder))}
    for name, data in all_bytes(folder).items():
        if name.endswith(".safetensors"):
            (length,) = struct.unpack("<Q", data[:8])
            parts[name] = (json.loads(data[8 : 8 + length]), data[8 + length :])
        elif name.endswith(".sums"):
            parts[name] = data[:8]
    return parts


class GoldenTest(unittest.TestCase):
    def test_it_is_still_what_it_was(self) -> None:
        check_kept(GOLDEN, GOLDEN_SHA256, 2)

    def test_a_plain_process_loads_it(self) -> None:
        load(GOLDEN, "plain")

    def test_it_is_written_alike_today(self) -> None:
        """By two ranks, which then load it, and the one of old."""
        with tempfile.TemporaryDirectory(prefix="fsdp_optim_golden_") as root:
            path = Path(root) / "golden-2"
            run_on_ranks(save_and_load, 2, path)
            check_folder(path)
            wanted = structure(GOLDEN)
            wanted["manifest"]["brief"]["keep_last"] = None  # an argument that `save` had then
            wanted["manifest"]["brief"]["wrapper"] = "FSDP2"  # which older readers pass over
            written, common = structure(path), "extra/common.safetensors"
            for content in (written, wanted):
                del content[common], content["manifest"]["files"][common], content["manifest"]["brief"]["files"][common]
            check_same("what is written", written, wanted)

    @parameterized.expand([("FSDP2", 3)])
    def test_ranks_load_it(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(load, world_size, GOLDEN, wrapper)


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make(GOLDEN, save_on_ranks)}"')
