"""What a load was given to fill and cannot: an error by name, where the checkpoint has the name and no tensor for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, refused
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.testing import run_on_ranks


def save(path: Path, saved: Any) -> None:
    fsdp_optim.save(path, nn.Linear(1, 1), state={"average": saved})


def into_a_dtensor(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    live = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    words = ("state['average']['weight']", "DTensor", "give an ordinary tensor")
    refused(lambda: fsdp_optim.load(path, nn.Linear(1, 1), state={"average": {"weight": live}}), StateError, *words)
    check_same("as before", live.full_tensor(), torch.zeros(4))
    ordinary = torch.zeros(4)
    fsdp_optim.load(path, nn.Linear(1, 1), state={"average": {"weight": ordinary}})
    check_same("filled", ordinary, torch.arange(4.0))


class TreesNotFilledTest(InFolder):
    @parameterized.expand([("none", None), ("a number", 3), ("an empty dict", {}), ("other names", {"bias": 1})])
    def test_nothing_there(self, _: str, saved: Any) -> None:
        save(self.root / "a", saved)
        live = torch.full((2,), 7.0)
        with self.assertRaisesRegex(
            StateError, r"state\['average'\]\['weight'\]: this call has it, the checkpoint does not"
        ):
            fsdp_optim.load(self.root / "a", nn.Linear(1, 1), state={"average": {"weight": live}})
        result = fsdp_optim.load(self.root / "a", nn.Linear(1, 1), state={"average": {"weight": live}}, strict=False)
        self.assertEqual(result.missing_keys, ("state['average']['weight']",))
        self.assertEqual((result.state["average"], live.tolist()), (saved, [7.0, 7.0]))

    def test_without_tensors_on_either_side(self) -> None:
        save(self.root / "a", {"step": 3})
        result = fsdp_optim.load(self.root / "a", nn.Linear(1, 1), state={"average": {"step": 0}})
        self.assertEqual(result.state["average"], {"step": 3})

    def test_a_dtensor_for_a_value_in_memory(self) -> None:
        """A file of torch holds it whole."""
        save(self.root / "a", {"weight": torch.arange(4.0)})
        fsdp_optim.convert(self.root / "a", self.root / "file", format="torch_file")
        run_on_ranks(into_a_dtensor, 2, self.root / "file")
