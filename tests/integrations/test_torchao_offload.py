"""torchao's own CPUOffloadOptimizer, which needs a GPU: its streams and pinned memory are mocked, and its device is the CPU.

That a load of state on the CPU makes nothing on a device is tested in tests/verbs/test_offloaded.py, with a stand-in of it.
"""

from __future__ import annotations

import contextlib
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.imports import Later
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.integrations.torchao import OffloadedOptimizer
from fsdp_optim.testing import run_on_ranks

cpu_offload: Any = Later("torchao.optim.cpu_offload")

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
SAVE = fsdp_optim.SaveOptions(durable=False, progress=False)
LOAD = fsdp_optim.LoadOptions(progress=False)


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Inside, the streams and events of torchao's optimizer do nothing, and pinned memory is ordinary."""
    empty_like = torch.empty_like

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty_like(*args, **kwargs)

    with (
        mock.patch("torchao.optim.cpu_offload.get_available_devices", return_value=["cpu", "cuda"]),
        mock.patch("torch.cuda.Stream"),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.stream", return_value=contextlib.nullcontext()),
        mock.patch("torch.empty_like", unpinned),
    ):
        yield


class Net(nn.Sequential):
    """Some parameters that torchao keeps on the device, and some that it offloads."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 2, bias=False))


def offloading(model: nn.Module, make: Any = torch.optim.Adam) -> Any:
    return cpu_offload.CPUOffloadOptimizer(model.parameters(), make, minimal_size=20, **OPTIONS)


def train(model: nn.Module, optim: Any, first: int, last: int) -> None:
    for step in range(first, last):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()


def content(model: nn.Module, optim: Any) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    return {"weights": dict(model.state_dict()), "state": {names[p]: dict(optim.state[p]) for p in names}}


def oracle(steps: int, make: Any = torch.optim.Adam) -> dict[str, Any]:
    model = Net()
    optim = make(model.parameters(), **OPTIONS)
    train(model, optim, 0, steps)
    return content(model, optim)


def load_on_two_ranks(path: Path) -> None:
    model = Net(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.Adam(model.parameters(), **OPTIONS)
    fsdp_optim.load(path, model, optim, options=LOAD)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, "name")
    check_same("loaded", full["state"], oracle(3)["state"])
    fsdp_optim.save(path.with_name("of two"), model, optim, options=SAVE)


class OffloadTest(unittest.TestCase):
    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(without_a_gpu())
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def trained(self, make: Any = torch.optim.Adam) -> tuple[nn.Module, Any]:
        model = Net()
        optim = offloading(model, make)
        self.assertEqual((len(optim.optim_dict), len(optim.d_param_groups[0]["params"])), (2, 3))
        train(model, optim, 0, 3)
        return model, optim

    def test_a_training_goes_on_from_a_checkpoint(self) -> None:
        """Also of two ranks with FSDP2, which load the checkpoint and save it anew."""
        model, optim = self.trained()
        fsdp_optim.save(self.folder / "saved", model, OffloadedOptimizer(optim), options=SAVE)
        run_on_ranks(load_on_two_ranks, 2, self.folder / "saved")
        for name in ("saved", "of two"):
            for steps in (0, 1):  # a new optimizer, and one with state
                other = Net(seed=2)
                offloaded = offloading(other)
                train(other, offloaded, 7, 7 + steps)
                state = OffloadedOptimizer(offloaded)
                fsdp_optim.load(self.folder / name, other, state, options=LOAD)
                check_same(f"loaded {name}", content(other, state), oracle(3))
                train(other, offloaded, 3, 5)
                check_same(f"trained on {name}", content(other, state), oracle(5))
                self.assertEqual(offloaded.d_param_groups, offloaded.d_opt.param_groups)

    def test_the_verbs(self) -> None:
        model, optim = self.trained()
        full = fsdp_optim.gather_full_optim_state_dict(model, OffloadedOptimizer(optim), key_by="name")
        check_same("gathered", dict(sorted(full["state"].items())), dict(sorted(oracle(3)["state"].items())))
        self.assertEqual((full["optimizer_class"], len(full["param_groups"])), ("Adam", 1))
        other = Net()
        plain = torch.optim.Adam(other.parameters(), **OPTIONS)
        fsdp_optim.load_optim_state_dict(plain, fsdp_optim.get_shard_from_optim_state_dict(other, plain, full))
        check_same("in a plain one", content(other, plain)["state"], oracle(3)["state"])
        back = OffloadedOptimizer(offloading(other))
        fsdp_optim.transfer_optim_state(other, plain, other, back)
        check_same("and back", content(other, back)["state"], oracle(3)["state"])

    def test_state_of_another_dtype(self) -> None:
        model, optim = self.trained()
        state = OffloadedOptimizer(optim)
        for values in state.state.values():
            values["exp_avg"] = values["exp_avg"].double() / 3
        wanted = {name: values["exp_avg"].clone() for name, values in content(model, state)["state"].items()}
        fsdp_optim.save(self.folder / "saved", model, state, options=SAVE)
        other = Net(seed=2)
        offloaded = OffloadedOptimizer(offloading(other))
        fsdp_optim.load(self.folder / "saved", other, offloaded, options=LOAD)
        check_same("doubles", {n: v["exp_avg"] for n, v in content(other, offloaded)["state"].items()}, wanted)

    def test_several_groups(self) -> None:
        model = Net()
        groups = [
            {"params": list(model[0].parameters())},
            {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.5},
        ]
        optim = cpu_offload.CPUOffloadOptimizer(groups, torch.optim.Adam, minimal_size=20, **OPTIONS)
        listed = OffloadedOptimizer(optim).state_dict()["param_groups"]
        self.assertEqual([(group["lr"], len(group["params"])) for group in listed], [(0.01, 2), (0.5, 3)])

    def test_refused(self) -> None:
        with self.assertRaisesRegex(fsdp_optim.WrapperError, "this Adam has no optim_dict"):
            OffloadedOptimizer(torch.optim.Adam(Net().parameters()))
        state = OffloadedOptimizer(offloading(Net()))
        with self.assertRaisesRegex(fsdp_optim.StateError, r"\[1\] parameters in its groups, the optimizer \[5\]"):
            state.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


if __name__ == "__main__":
    unittest.main()
