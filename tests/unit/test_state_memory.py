"""The memory that a load fills: its shape, its padding, and what it begins with."""

from __future__ import annotations

import unittest

import torch
from torch import nn

from fsdp_optim.layout import Whole
from fsdp_optim.plugins import Handle, Original
from fsdp_optim.state.live import LocalParam
from fsdp_optim.state.live.state_memory import StateMemory
from fsdp_optim.state.values import Summary
from fsdp_optim.view import NamedHandle

MODULE = nn.Module()
SUMMARY = Summary(sharded=(("exp_avg", "float32"), ("exp_avg_sq", "float32")), names=("exp_avg", "exp_avg_sq"))


class Flattening(Handle):
    """A Handle with a form of its own, which takes 1-D tensors alone."""

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.unsqueeze(0)


def param_of(handle: Handle, state: dict[str, torch.Tensor] | None = None) -> LocalParam:
    fqns = tuple(f"p{number}" for number in range(len(handle.originals)))
    return LocalParam(0, 0, NamedHandle(handle, fqns), state)


class StateMemoryTest(unittest.TestCase):
    def setUp(self) -> None:
        self.placement = Whole((2, 3), (0,))
        self.originals = (Original(MODULE, "weight", self.placement),)

    def shapes(self, memory: StateMemory, handle: Handle) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in memory.of(param_of(handle), SUMMARY).values()]

    def test_the_shape(self) -> None:
        """The local shape where that is asked for and the Handle takes it; of parameters with one placement, too."""
        plain = Handle(nn.Parameter(torch.zeros(2, 3)), self.originals, (2, 3))
        own = Flattening(nn.Parameter(torch.zeros(2, 3)), self.originals, (2, 3))
        shaped, flat = StateMemory(0, shaped=True), StateMemory(0)
        for handle, shape in ((plain, (2, 3)), (own, (6,)), (plain, (2, 3)), (own, (6,))):
            self.assertEqual(self.shapes(shaped, handle), [shape] * 2)
            self.assertEqual(self.shapes(flat, handle), [(6,)] * 2)

    def test_each_tensor_has_memory_of_its_own(self) -> None:
        memory = StateMemory(0, shaped=True)
        handle = Handle(nn.Parameter(torch.zeros(2, 3)), self.originals, (2, 3))
        tensors = [tensor for _ in range(3) for tensor in memory.of(param_of(handle), SUMMARY).values()]
        self.assertEqual(len({tensor.untyped_storage().data_ptr() for tensor in tensors}), 6)

    def test_on_the_device_of_each_parameter(self) -> None:
        memory = StateMemory(0, shaped=True)
        for device in ("cpu", "meta", "cpu"):
            handle = Handle(torch.zeros(2, 3, device=device), self.originals, (2, 3))
            tensors = memory.of(param_of(handle), SUMMARY)
            self.assertEqual({tensor.device.type for tensor in tensors.values()}, {device})

    def test_the_padding_is_zero(self) -> None:
        """One element behind the original: zero in each of many tensors, whose memory was in use before."""
        handle = Handle(nn.Parameter(torch.zeros(7)), self.originals, (7,), num_padded=(1,))
        for _ in range(50):
            used = [torch.full((7,), float("nan")) for _ in range(20)]
            del used
            for tensor in StateMemory(0, shaped=True).of(param_of(handle), SUMMARY).values():
                self.assertEqual(tensor[6].item(), 0.0)

    def test_what_is_missing_begins_with_the_live_values(self) -> None:
        originals = tuple(Original(MODULE, name, Whole((3,), (0,))) for name in "ab")
        live = {name: torch.arange(3.0) + number for number, name in enumerate(SUMMARY.names)}
        handle = Handle(nn.Parameter(torch.zeros(3)), originals, (3,))
        memory = StateMemory(0, frozenset({"p1"}), shaped=True)
        for name, tensor in memory.of(param_of(handle, live), SUMMARY).items():
            self.assertEqual(tensor.tolist(), live[name].tolist())
            self.assertNotEqual(tensor.data_ptr(), live[name].data_ptr())


if __name__ == "__main__":
    unittest.main()
