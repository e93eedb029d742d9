"""A reader asks torch once for the ranks of a mesh, for all parameters on it: torch computes them anew each time."""

from __future__ import annotations

import unittest
from unittest import mock

from kit.models import Net
from kit.wraps import in_fsdp2
from torch.distributed.device_mesh import DeviceMesh

from fsdp_optim.adapters import ModelReader
from fsdp_optim.testing import run_on_ranks


def times_asked() -> tuple[int, int]:
    """How often a reader asks for the ranks of the mesh, also to find who shares the model, and the number of its parameters."""
    model, asked = in_fsdp2(Net()), []
    real = DeviceMesh.mesh

    def ranks(mesh: DeviceMesh) -> object:
        asked.append(mesh)
        return real.fget(mesh)  # type: ignore[attr-defined]

    with mock.patch.object(DeviceMesh, "mesh", property(ranks)):
        number = len(ModelReader(model).read().handles)
    return len(asked), number


class MeshRanksTest(unittest.TestCase):
    def test_once_for_all_parameters(self) -> None:
        for asked, parameters in run_on_ranks(times_asked, 2):
            self.assertGreater(parameters, 8)
            self.assertEqual(asked, 1)


if __name__ == "__main__":
    unittest.main()
