"""A state value that is made for a DTensor parameter is the DTensor that torch's own `from_local` makes."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Sequence
from functools import partial

import torch
from kit.compare import check_same, error_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import fsdp_optim
from fsdp_optim.adapters import ModelReader
from fsdp_optim.testing import run_on_ranks


def form(value: torch.Tensor) -> dict[str, object]:
    """What torch's operations look at, and the elements."""
    assert isinstance(value, DTensor)
    meta = value._spec.tensor_meta
    local = value.to_local()
    return {
        "class": type(value),
        "mesh": value.device_mesh,
        "placements": value.placements,
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "recorded": (tuple(meta.shape), tuple(meta.stride), meta.dtype) if meta is not None else None,
        "local": local.tolist(),
        "local stride": local.stride(),
        "doubled": (value + value).full_tensor().tolist(),
    }


def check_forms() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    fully_shard(model, mesh=mesh)
    columns = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3).t().contiguous().t(), mesh, [Shard(1)]))
    model.columns, model.copies = columns, nn.Parameter(distribute_tensor(torch.arange(3.0), mesh, [Replicate()]))
    for named in ModelReader(model).read().handles:
        handle, param = named.handle, named.handle.param
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.arange(handle.local_numel, dtype=dtype)
            made = handle.from_local(flat.clone())
            local = torch.empty_like(param.to_local(), dtype=dtype)
            local.copy_(flat.view(local.shape))
            like = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            check_same(f"{named.fqns[0]} in {dtype}", form(made), form(like))
        weights = handle.weights()
        check_same(f"weights of {named.fqns[0]}", form(weights), form(param.detach()))
        if weights.to_local().data_ptr() != param.to_local().data_ptr() or weights.requires_grad:
            raise AssertionError(f"{named.fqns[0]}: weights() is no detached view of the parameter")


def gather_from_another_mesh() -> None:
    """A state value of the parameter's shape and placements, whose mesh has the same ranks in other rows and columns."""
    mesh, other = (DeviceMesh("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    spec = [Shard(0), Replicate()]
    wanted = {"exp_avg": torch.arange(15.0).view(5, 3), "exp_avg_sq": torch.arange(15.0, 30.0).view(5, 3)}
    for of_param, of_value in ((mesh, other), (other, mesh)):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(5, 3), of_param, spec))
        optim = torch.optim.Adam(model.parameters())
        optim.state[model.weight] = {
            "step": torch.tensor(1.0),
            "exp_avg": distribute_tensor(wanted["exp_avg"], of_param, spec),
            "exp_avg_sq": distribute_tensor(wanted["exp_avg_sq"], of_value, spec),
        }
        for recipient in range(4):
            full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient, key_by="name")
            if full is not None:
                check_same(f"on rank {recipient}", {n: full["state"]["weight"][n] for n in wanted}, wanted)


def calls_with_what_torch_cuts_in_two_ways() -> list[tuple[str, str]]:
    """torch gives a rank the shape of one shard and the place of another, where the ranks of a mesh do not ascend."""
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(5, 3), DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    value = distribute_tensor(torch.arange(15.0).view(5, 3), DeviceMesh("cpu", [1, 0]), [Shard(0)])
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    own = {**optim.state_dict(), "state": {0: {"momentum_buffer": value}}}
    of_dict = error_text(lambda: fsdp_optim.reshard_optim_state_dict(model, optim, own))
    optim.state[model.weight] = {"momentum_buffer": value}
    of_value = error_text(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, None, key_by="name"))
    model.register_buffer("table", value)
    of_buffer = error_text(lambda: fsdp_optim.gather_full_model_state_dict(model, None))
    return [of_value, of_dict, of_buffer]


def calls_with_two_dtypes(folder: str) -> list[tuple[str, str]]:
    """An assignment to .data changes the dtype of a DTensor, and leaves its local tensor. Then what mends it."""
    mesh, told = init_device_mesh("cpu", (2,)), []
    for which in ("weight", "momentum_buffer", "table", "state.tree.t"):
        model = nn.Module()
        for name in ("weight", "other"):
            setattr(model, name, nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])))
        model.register_buffer("table", distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        optim = torch.optim.SGD(model.parameters(), momentum=0.9)
        for param in model.parameters():
            optim.state[param] = {"momentum_buffer": torch.zeros_like(param)}
        tree = {"t": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}
        moments = optim.state[model.weight]["momentum_buffer"]
        values = {"weight": model.weight, "momentum_buffer": moments, "table": model.table, "state.tree.t": tree["t"]}
        changed = values[which]
        changed.data = changed.data.to(torch.bfloat16)
        save = partial(fsdp_optim.save, f"{folder}/{which}", model, optim, state={"tree": tree})
        told.append(error_text(save))
        changed.data = changed.detach()
        save()
    return told


def on_a_mesh(shape: tuple[int, ...], spec: Sequence[Placement]) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    mesh = init_device_mesh("cpu", shape)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, spec))
    return model, torch.optim.SGD(model.parameters(), momentum=0.9), mesh


def loads_of_a_value_with_a_cut_of_its_own() -> None:
    """It is cut as it was; where the new mesh cannot, as its parameter is. The strided cut goes along the mesh backwards."""
    value, row, square = torch.arange(32.0).view(8, 4), (4,), (2, 2)
    copies, backwards = Replicate(), (_StridedShard(0, split_factor=2), Shard(0))
    for number, (saved, own, target, wanted) in enumerate(
        (
            ((row, [Shard(0)]), [Shard(1)], (row, [Shard(0)]), (Shard(1),)),
            ((row, [Shard(0)]), [Shard(1)], (square, [copies, Shard(0)]), (copies, Shard(0))),
            ((square, [copies, copies]), [Shard(1), copies], (square, [Shard(0), copies]), (Shard(1), copies)),
            ((square, [copies, copies]), [Shard(0), Shard(0)], (square, [copies, copies]), (Shard(0), Shard(0))),
            ((square, [copies, copies]), backwards, (square, [copies, copies]), (copies, copies)),
        )
    ):
        model, optim, mesh = on_a_mesh(*saved)
        optim.state[model.weight] = {"momentum_buffer": distribute_tensor(value, mesh, own)}
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, key_by="name")
        model, optim, mesh = on_a_mesh(*target)
        fsdp_optim.load_optim_state_dict(optim, fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))
        loaded, like = optim.state[model.weight]["momentum_buffer"], distribute_tensor(value, mesh, wanted)
        check_same(f"placements of {number}", loaded.placements, wanted)
        check_same(f"elements of {number}", loaded.to_local(), like.to_local())


def check_replaced() -> None:
    """Parameters on the meta device that a program replaces between `fully_shard` and the first forward pass."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wanted = {}
    for number, (fqn, param) in enumerate(dict(model.named_parameters()).items()):
        wanted[fqn] = torch.arange(float(param.numel())).view(param.shape) + 100 * number
        module, _, name = fqn.partition(".")
        live = nn.Parameter(distribute_tensor(wanted[fqn], param.device_mesh, param.placements))
        setattr(model[int(module)], name, live)
    optim = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optim.step()
    weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)
    check_same("weights", dict(weights), {fqn: torch.zeros_like(value) for fqn, value in wanted.items()})
    state = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")["state"]
    check_same("state", {fqn: values["momentum_buffer"] for fqn, values in state.items()}, wanted)


class FormsTest(unittest.TestCase):
    def test_a_value_with_a_cut_of_its_own(self) -> None:
        run_on_ranks(loads_of_a_value_with_a_cut_of_its_own, 4)

    def test_a_value_on_another_mesh_than_its_parameter(self) -> None:
        run_on_ranks(gather_from_another_mesh, 4)

    def test_a_value_that_is_not_cut_as_its_placements_say_is_refused(self) -> None:
        for told in run_on_ranks(calls_with_what_torch_cuts_in_two_ways, 2):
            for (kind, text), name in zip(told, ("weight: a state value", "momentum_buffer", "table"), strict=True):
                self.assertEqual(kind, "WrapperError", text)
                self.assertRegex(text, rf"{name}.*local tensor on rank 0 has shape \[2, 3\].* give \[3, 3\]")

    def test_a_dtensor_of_another_dtype_than_its_local_tensor_is_refused(self) -> None:
        """Its elements, and those of all values that are alike, would be saved as bytes of the wrong dtype."""
        with tempfile.TemporaryDirectory() as folder:
            (told, other) = run_on_ranks(calls_with_two_dtypes, 2, folder)
        self.assertEqual(told, other)
        for (_, text), name in zip(told, ("weight", "weight: momentum_buffer", "table", "state.tree.t"), strict=True):
            self.assertRegex(text, rf"{name}\b.* is a DTensor of torch.bfloat16 with a local tensor of torch.float32")

    def test_parameters_that_are_replaced_before_the_first_pass(self) -> None:
        run_on_ranks(check_replaced, 2)

    def test_forms(self) -> None:
        run_on_ranks(check_forms, 2)
