"""A load from a store where a request costs much reads small values with the long ones beside them, in few requests."""

from __future__ import annotations

import tempfile
import unittest
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_optim
from fsdp_optim.buckets.objects.opened import VersionedObjects
from fsdp_optim.testing import run_on_ranks

WIDTH, LAYERS = 160, 100


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


def loaded(url: str) -> tuple[int, bool]:
    """The requests of a rank, and whether the state is what was saved."""
    model, optim = trained()
    fsdp_optim.save(url, model, optim, options=fsdp_optim.SaveOptions(durable=False))
    fresh, (_, saved) = torch.optim.Adam(model.parameters()), (model, optim.state_dict()["state"])
    read, num = VersionedObjects.read_into, 0

    def counted(self: VersionedObjects, *args: object) -> object:
        nonlocal num
        num += 1
        return read(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(VersionedObjects, "read_into", counted):
        fsdp_optim.load(url, model, fresh)
    state = fresh.state_dict()["state"]
    return num, all(torch.equal(value, state[i][name]) for i, values in saved.items() for name, value in values.items())


class RequestsTest(unittest.TestCase):
    def test_small_values_take_no_requests_of_their_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(loaded, 2, f"file://{folder}/saved")
        for num, is_equal in by_rank:
            self.assertTrue(is_equal)
            self.assertLess(num, LAYERS // 2)  # the biases of a rank by themselves take one for each layer
