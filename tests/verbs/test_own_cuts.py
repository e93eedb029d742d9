"""Values that are cut by themselves: what is refused by name, what counts as replicas, and what is compared."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text, refused, refused_on_ranks
from kit.options import as_options
from kit.wraps import in_ddp, in_fsdp2, in_hsdp
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs

import fsdp_optim
from fsdp_optim.tensors.memory import detached_copy
from fsdp_optim.testing import run_on_ranks

WORLD = 4
ShardOrderEntry: Any = getattr(specs, "ShardOrderEntry", None)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 5, bias=False)
        self.last = nn.Linear(5, 2)


class Keeps(torch.optim.SGD):
    """Keeps what `make(param)` gives; its dict has `tops` beside the state, and `loose` in the state of no parameter."""

    def __init__(self, params: Any, make: Any = None, tops: Any = None, loose: Any = None) -> None:
        super().__init__(params, lr=0.5)
        self.make, self.tops, self.loose = make, tops or {}, loose or {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = self.make(param)

    def state_dict(self) -> dict[str, Any]:
        content = super().state_dict()
        return {**content, "state": {**content["state"], **self.loose}, **self.tops}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.tops = {key: value for key, value in state_dict.items() if key in self.tops}


def like(param: Any, add: float = 0.0) -> torch.Tensor:
    return torch.arange(float(param.numel())).reshape(param.shape) + add


def mesh_of(*shape: int) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut(value: torch.Tensor, mesh: Any, *spec: Any) -> Any:
    whole = DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, spec)


def gathered(model: Any, optim: Any, **options: Any) -> Any:
    return fsdp_optim.gather_full_optim_state_dict(
        model, optim, recipient_rank=None, key_by="name", **as_options(fsdp_optim.CallOptions, **options)
    )


def every_read(model: Any, optim: Any, folder: str) -> dict[str, Any]:
    """The calls that read an optimizer's state."""
    return {
        "gather": lambda: gathered(model, optim),
        "save": lambda: fsdp_optim.save(folder, model, optim),
        "transfer": lambda: fsdp_optim.transfer_optim_state(model, optim, model, optim),
        "iter": lambda: list(fsdp_optim.iter_full_optim_state(model, optim)),
    }


def check_training_goes_on() -> None:
    """No call has left a message behind that the next collective call of the training would take for its own."""
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    check_same("all_reduce", total, torch.tensor([WORLD * (WORLD + 1) / 2]))


# ------------------------------------------------------------------------------------------- replicas


def opaque_under_ddp(folder: str) -> None:
    model = in_ddp(Two())
    rank = dist.get_rank()
    alike = Keeps(model.parameters(), lambda param: {"history": [1, torch.ones(2)], "name": "a"})
    alike.step()
    check_same(
        "equal values", gathered(model, alike)["state"]["last.bias"], {"history": [1, torch.ones(2)], "name": "a"}
    )
    for what, make in {
        "a list": lambda param: {"history": [1, torch.full((2,), float(rank))]},
        "a tensor of another shape": lambda param: {"history": torch.full((7,), float(rank))},
    }.items():
        optim = Keeps(model.parameters(), make)
        optim.step()
        for call, read in every_read(model, optim, folder).items():
            refused_on_ranks(f"{what}, {call}", read, "StateError", "first.weight", "not the same on rank 0")
        full = gathered(model, optim, on_replica_mismatch="lowest_rank")
        history = full["state"]["last.weight"]["history"]
        check_same(
            f"{what}, lowest rank",
            history[1] if what == "a list" else history,
            torch.zeros(2 if what == "a list" else 7),
        )
    check_training_goes_on()


def opaque_under_hsdp(folder: str) -> None:
    """The replicas of one shard may have different values that no wrapper keeps equal."""
    model = in_hsdp(Two(), (2, 2))
    optim = Keeps(model.parameters(), lambda param: {"history": [dist.get_rank() // 2, [0, 1, 2]]})
    optim.step()
    for call, read in every_read(model, optim, folder).items():
        refused_on_ranks(call, read, "StateError", "first.weight", "not the same on", "rank 2")
    check_training_goes_on()


def moments_on_shard(folder: str) -> None:
    """HSDP whose moments are on mesh["shard"]: each replica group has the complete state."""
    model = in_hsdp(Two(), (2, 2))
    line = mesh_of(2, 2)["shard"]

    def make(param: Any, add: float = 0.0) -> dict[str, Any]:
        return {"moment": cut(like(param, add), line, Shard(0)), "step": torch.tensor(3.0)}

    optim = Keeps(model.parameters(), make)
    optim.step()
    wanted = {name: {"moment": like(param), "step": torch.tensor(3.0)} for name, param in Two().named_parameters()}
    full = gathered(model, optim)
    check_same("gathered", full["state"], wanted)
    fsdp_optim.save(folder, model, optim)
    for what in ("shard", "load", "transfer"):
        again = Keeps(model.parameters(), lambda param: make(param, 100.0))
        again.step()
        if what == "shard":
            again.load_state_dict(fsdp_optim.get_shard_from_optim_state_dict(model, again, full))
        elif what == "load":
            fsdp_optim.load(folder, model, again, options=fsdp_optim.LoadOptions(compare=True))
        else:
            fsdp_optim.transfer_optim_state(model, optim, model, again)
        for param in model.parameters():
            moment, saved_moment = again.state[param]["moment"], optim.state[param]["moment"]
            check_same(f"{what}: mesh", moment.device_mesh == saved_moment.device_mesh, True)
            check_same(f"{what}: shard", moment.to_local(), saved_moment.to_local())
    differing = Keeps(model.parameters(), lambda param: make(param, float(dist.get_rank() // 2)))
    differing.step()
    for call, read in every_read(model, differing, folder + "2").items():
        kind, text = error_text(read)
        shown = [word for word in ("first.weight", "moment", "rank 0", "rank 2", "not replicas") if word not in text]
        check_same(
            f"{call}: {kind} {text}", (kind, shown, "OnMesh(" in text or "MeshBoxes" in text), ("StateError", [], False)
        )
    lowest = gathered(model, differing, on_replica_mismatch="lowest_rank")
    check_same("lowest rank", lowest["state"], wanted)
    check_training_goes_on()


def saved_on_shard(folder: str) -> None:
    model, line = in_hsdp(Two(), (2, 2)), mesh_of(2, 2)["shard"]
    optim = Keeps(
        model.parameters(), lambda param: {"moment": cut(like(param), line, Shard(0)), "step": torch.tensor(3.0)}
    )
    optim.step()
    fsdp_optim.save(f"{folder}/now", model, optim)
    fsdp_optim.async_save(f"{folder}/later", model, optim).wait()


def resumed_on_fsdp2(folder: str) -> None:
    """Into FSDP2 on other ranks, whose state is cut like its parameters, whether the optimizer has state or not."""
    wanted = {name: {"moment": like(param), "step": torch.tensor(3.0)} for name, param in Two().named_parameters()}
    for name in ("now", "later", "dcp", "torch"):
        for has_state in (False, True):
            model = in_fsdp2(Two())
            optim = Keeps(
                model.parameters(), lambda param: {"moment": torch.zeros_like(param), "step": torch.tensor(0.0)}
            )
            if has_state:
                optim.step()
            fsdp_optim.load(f"{folder}/{name}", model, optim, options=fsdp_optim.LoadOptions(compare=True))
            check_same(f"{name}, {has_state}", gathered(model, optim)["state"], wanted)
            cuts = {optim.state[param]["moment"].placements == param.placements for param in model.parameters()}
            check_same(f"{name}, {has_state}: cut like the parameters", cuts, {True})


def managed(folder: str) -> None:
    """A manager's save and resume of DTensor state under DDP."""
    model, mesh = in_ddp(Two()), mesh_of(WORLD)

    def optim_of(add: float) -> Keeps:
        both = {"moment": Shard(0), "mean": Replicate()}
        optim = Keeps(
            model.parameters(), lambda param: {name: cut(like(param, add), mesh, spec) for name, spec in both.items()}
        )
        optim.step()
        return optim

    optim, again = optim_of(0.0), optim_of(9.0)
    with fsdp_optim.CheckpointManager(folder, model, optim, every=1) as manager:
        manager.resume()
        manager.step(1)
    with fsdp_optim.CheckpointManager(folder, model, again, every=1) as manager:
        check_same("step", manager.resume(), 1)
    check_same("state", gathered(model, again)["state"], gathered(model, optim)["state"])
    check_same("classes", {type(value) for values in again.state.values() for value in values.values()}, {DTensor})


def on_one_rank_each(folder: str) -> None:
    """Each parameter's value is on a mesh of one rank, the others have an empty DTensor of that mesh: blocks of Shampoo."""
    model = in_ddp(Two())
    params = list(model.parameters())
    meshes = [dist.device_mesh.DeviceMesh("cpu", [rank]) for rank in range(WORLD)]

    def make(param: Any) -> dict[str, Any]:
        owner = [param is candidate for candidate in params].index(True)
        local = like(param) if dist.get_rank() == owner else torch.empty(0)
        shape, strides = param.shape, param.stride()
        return {
            "block": DTensor.from_local(
                local, meshes[owner], [Replicate()], run_check=False, shape=shape, stride=strides
            )
        }

    optim = Keeps(params, make)
    optim.step()
    wanted = {name: {"block": like(param)} for name, param in Two().named_parameters()}
    full = gathered(model, optim)
    check_same("gathered", full["state"], wanted)
    fsdp_optim.save(folder, model, optim)
    for what in ("shard", "load"):
        again = Keeps(params, make)
        again.step()
        for values in again.state.values():
            values["block"].to_local().fill_(-1)
        if what == "shard":
            again.load_state_dict(fsdp_optim.get_shard_from_optim_state_dict(model, again, full))
        else:
            fsdp_optim.load(folder, model, again, options=fsdp_optim.LoadOptions(compare=True))
        for owner, param in enumerate(params):
            block = again.state[param]["block"]
            check_same(
                f"{what}: {owner}", block.to_local(), like(param) if dist.get_rank() == owner else torch.empty(0)
            )


def beyond_the_call() -> None:
    """A plain model, and state over ranks that nothing in the model shows."""
    model, mesh = Two(), mesh_of(WORLD)
    optim = Keeps(model.parameters(), lambda param: {"moment": cut(like(param), mesh, Shard(0))})
    optim.step()
    kind, text = error_text(lambda: gathered(model, optim))
    check_same(text, (kind, "first.weight: moment" in text, "process_group=" in text), ("StateError", True, True))
    check_same(
        "with the group",
        gathered(model, optim, process_group=dist.group.WORLD)["state"]["last.bias"]["moment"],
        like(model.last.bias),
    )
    check_training_goes_on()


# ------------------------------------------------------------------------------------------- refused by name


def inner_values(folder: str) -> None:
    """DTensors inside containers of the state of a parameter that is no DTensor."""
    model, mesh = in_ddp(Two()), mesh_of(WORLD)
    whole = Keeps(model.parameters(), lambda param: {"blocks": [cut(like(param), mesh, Replicate())]})
    whole.step()
    for read in (lambda: gathered(model, whole)["state"]["last.bias"]["blocks"],):
        blocks = read()
        check_same("a replicated one", blocks, [like(model.module.last.bias)])
        check_same("its class", type(blocks[0]), torch.Tensor)
    part = Keeps(model.parameters(), lambda param: {"blocks": {"a": [0, cut(like(param), mesh, Shard(0))]}})
    part.step()
    for mismatch in ("error", "lowest_rank"):
        call = lambda: gathered(model, part, on_replica_mismatch=mismatch)  # noqa: B023, E731
        refused_on_ranks(f"a part, {mismatch}", call, "WrapperError", "first.weight: blocks['a'][1]", "full_tensor()")
    check_training_goes_on()


PLACES = ["group", "top", "loose"]


def outside_of_state(place: str, folder: str) -> None:
    """A DTensor in a param group, at the top of the dict, or in state of no parameter."""
    model, mesh = in_ddp(Two()), mesh_of(WORLD)
    rank = dist.get_rank()

    def made(value: Any) -> Keeps:
        loose = {"shared": {"norm": [value]}} if place == "loose" else None
        optim = Keeps(
            model.parameters(),
            lambda param: {"moment": like(param)},
            {"norm": value} if place == "top" else None,
            loose,
        )
        optim.step()
        if place == "group":
            optim.param_groups[0]["norm"] = {"of": (value, 1)}
        return optim

    def found(full: Any) -> Any:
        if place == "group":
            return full["param_groups"][0]["norm"]["of"][0]
        return full["norm"] if place == "top" else full["state"]["shared"]["norm"][0]

    whole = made(DTensor.from_local(torch.tensor(2.5), mesh, [Replicate()], run_check=False))
    value = found(gathered(model, whole))
    check_same("a replicated one", (value, type(value)), (torch.tensor(2.5), torch.Tensor))
    fsdp_optim.save(folder, model, whole)
    fsdp_optim.load(folder, model, whole, options=fsdp_optim.LoadOptions(compare=True))
    fsdp_optim.transfer_optim_state(model, whole, model, whole)
    full = gathered(model, whole)
    shard = fsdp_optim.get_shard_from_optim_state_dict(model, whole, full, param_groups="live")
    check_same("live groups", type(found(shard)), torch.Tensor)
    for what, dtensor in {
        "Partial": DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial()], run_check=False),
        "Shard": DTensor.from_local(torch.tensor([float(rank)]), mesh, [Shard(0)], run_check=False),
    }.items():
        optim = made(dtensor)
        calls = every_read(model, optim, folder + "2")
        if place == "group":
            calls["get_shard"] = lambda optim=optim: fsdp_optim.get_shard_from_optim_state_dict(
                model, optim, full, param_groups="live"
            )
        for call, read in calls.items():
            refused_on_ranks(f"{what}, {call}", read, "WrapperError", "norm", what, "full_tensor()")
        # One rank alone has it: the others are told, and nobody waits.
        alone = made(dtensor if rank == 1 else 1.0)
        kind, text = error_text(lambda alone=alone: gathered(model, alone))
        check_same(f"{what} on rank 1: {text}", (kind, "full_tensor()" in text), ("WrapperError", True))
        check_training_goes_on()


def given_dicts(folder: str) -> None:
    """A DTensor in the groups or at the top of a dict that the caller gives, as torch's own dicts may have them."""
    model, mesh = in_ddp(Two()), mesh_of(WORLD)
    optim = Keeps(model.parameters(), lambda param: {"moment": like(param)})
    optim.step()
    full = gathered(model, optim)
    for what, spec in {"Partial": Partial(), "Shard": Shard(0), "Replicate": Replicate()}.items():
        value = DTensor.from_local(
            torch.tensor([1.0 + dist.get_rank() * (what != "Replicate")]), mesh, [spec], run_check=False
        )
        in_group = {**full, "param_groups": [{**full["param_groups"][0], "norm": [value]}]}
        for place, given in {"group": in_group, "top": {**full, "norm": [value]}}.items():
            for call, read in {
                "get_shard": lambda given=given: fsdp_optim.get_shard_from_optim_state_dict(model, optim, given),
                "scatter": lambda given=given: fsdp_optim.scatter_full_optim_state_dict(
                    model, optim, given if dist.get_rank() == 0 else None
                ),
                "rekey": lambda given=given: fsdp_optim.rekey_optim_state_dict(given, model, "id"),
            }.items():
                if what != "Replicate":
                    kind, text = error_text(read)
                    seen = [word for word in ("norm", what, "full_tensor()") if word not in text]
                    check_same(f"{what}, {place}, {call}: {text}", (kind, seen), ("WrapperError", []))
                else:
                    result = read()
                    result = result["param_groups"][0]["norm"] if place == "group" else result["norm"]
                    check_same(f"{place}, {call}", (result, type(result[0])), ([torch.tensor([1.0])], torch.Tensor))
        check_training_goes_on()


def copies_of_one_rank(folder: str) -> None:
    """A copy of a DTensor is no call between ranks, wherever it is: an object of the trainer is copied before it is loaded."""
    mesh = mesh_of(WORLD)
    for spec in (Partial(), Shard(0), Replicate()):
        value = DTensor.from_local(torch.tensor([1.0 + dist.get_rank()]), mesh, [spec], run_check=False)
        if dist.get_rank() == 1:
            copy = detached_copy({"of": [value]})["of"][0]
            check_same(
                f"{spec}",
                (copy.to_local(), copy.placements, copy.shape),
                (value.to_local(), value.placements, value.shape),
            )
            check_same(f"{spec}: memory", copy.to_local().data_ptr() == value.to_local().data_ptr(), False)
        check_training_goes_on()


def rows_in_another_order() -> None:
    """Equal placements, mesh and local shapes; only the spec says that the second dimension of the mesh cuts first."""
    mesh = init_device_mesh("cpu", (2, 2))
    outer, inner = mesh.get_coordinate() or (0, 0)
    whole = torch.arange(24.0).reshape(8, 3)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for swapped in (False, True):
        rows = whole.view(2, 2, 2, 3)[(inner, outer) if swapped else (outer, inner)].clone()
        value: Any = DTensor.from_local(rows, mesh, [Shard(0), Shard(0)], run_check=False)
        if swapped:
            value._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        optim.state[model.weight] = {"momentum_buffer": value}
        if swapped:
            _, text = error_text(lambda: gathered(model, optim))
            assert "a state value of shape [8, 3]: dimension 0 of this DTensor" in text, text
        else:
            check_same("in torch's order", gathered(model, optim)["state"]["weight"]["momentum_buffer"], whole)


def loaded_into_own_cuts(folder: str) -> None:
    """Moments of a plain model go into moments that are sharded, of parameters that each rank has all of (ZeRO-1)."""
    mesh = mesh_of(WORLD)
    plain = nn.Linear(6, 5)
    plain_optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for param in plain.parameters():
        plain_optim.state[param] = {"momentum_buffer": like(param, add=1.0)}
    if dist.get_rank() == 0:
        torch.save({"model": plain.state_dict(), "optimizer": plain_optim.state_dict()}, f"{folder}.pt")
    dist.barrier()
    model = nn.Linear(6, 5)
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optim.state[param] = {"momentum_buffer": cut(torch.zeros(param.shape), mesh, Shard(0))}
    fsdp_optim.load(f"{folder}.pt", model, optim)
    for param in model.parameters():
        value: Any = optim.state[param]["momentum_buffer"]
        assert value.placements == (Shard(0),), value.placements
        check_same("the moment", value.full_tensor(), like(param, add=1.0))


def extras(folder: str) -> None:
    """Values of the trainer: a cut DTensor is saved complete; a partial one, and a cut one of each rank, are refused by name."""
    model, mesh = in_ddp(Two()), mesh_of(WORLD)
    whole = DTensor.from_local(torch.tensor([2.5]), mesh, [Replicate()], run_check=False)
    fsdp_optim.save(folder, model, state={"norm": [whole]})
    check_same("replicated", dict(fsdp_optim.load(folder, model).state), {"norm": [torch.tensor([2.5])]})
    own_norm = fsdp_optim.per_rank({"norm": [whole]})
    fsdp_optim.save(folder + "1", model, state={"own": own_norm})
    check_same(
        "replicated, of each rank", fsdp_optim.load(folder + "1", model).state["own"], {"norm": [torch.tensor([2.5])]}
    )
    for what, spec in {"Partial": Partial(), "Shard": Shard(0)}.items():
        part = DTensor.from_local(torch.tensor([1.0 + dist.get_rank()]), mesh, [spec], run_check=False)
        refused(
            lambda part=part: fsdp_optim.save(
                folder + "2", model, state={"own": fsdp_optim.per_rank({"norm": [part]})}
            ),
            fsdp_optim.StateError,
            "state['own']['norm'][0]",
            "without per_rank()",
        )
        if what == "Partial":
            refused(
                lambda part=part: fsdp_optim.save(folder + "2", model, state={"norm": [part]}),
                fsdp_optim.WrapperError,
                "state.norm.0",
                "P(sum)",
            )
        else:
            fsdp_optim.save(folder + "3", model, state={"norm": [part]})
            wanted = torch.arange(1.0, WORLD + 1)
            check_same("complete", dict(fsdp_optim.load(folder + "3", model).state), {"norm": [wanted]})
        check_training_goes_on()


class OwnCutsTest(unittest.TestCase):
    @parameterized.expand(
        [
            (opaque_under_ddp,),
            (opaque_under_hsdp,),
            (moments_on_shard,),
            (managed,),
            (on_one_rank_each,),
            (inner_values,),
            (given_dicts,),
            (copies_of_one_rank,),
            (extras,),
        ],
        name_func=lambda function, _, case: f"{function.__name__}_{case.args[0].__name__}",
    )
    def test_values(self, case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(case, WORLD, f"{folder}/c")

    @parameterized.expand(PLACES)
    def test_outside_of_state(self, place: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(outside_of_state, WORLD, place, f"{folder}/c")

    def test_rows_in_another_order(self) -> None:
        if ShardOrderEntry is None:
            self.skipTest(f"torch {torch.__version__} has no order of shards in a spec")
        run_on_ranks(rows_in_another_order, WORLD)

    def test_loaded_into_own_cuts(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(loaded_into_own_cuts, WORLD, f"{folder}/c")

    def test_a_call_without_all_ranks_of_the_mesh(self) -> None:
        run_on_ranks(beyond_the_call, WORLD)

    def test_moments_on_shard_resume_on_other_ranks_and_in_other_formats(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved_on_shard, WORLD, folder)
            for format in ("dcp", "torch"):
                fsdp_optim.convert(f"{folder}/now", f"{folder}/{format}", format=format)
            for world_size in (1, 2, 3):
                run_on_ranks(resumed_on_fsdp2, world_size, folder)
