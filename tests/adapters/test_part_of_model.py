"""Parts of wrapped models, values without elements and unknown groups are refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.elements import Numbers
from kit.local_parts import local_of
from kit.models import Net
from kit.optimizers import adam
from kit.wraps import in_ddp, in_fairscale, in_fsdp1
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of the library's error that a call raises."""
    try:
        call()
    except fsdp_optim.FsdpOptimError as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


def stepped(params: Any, make: Any = adam) -> Any:
    params = list(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optim = make(params)
    optim.step()
    return optim


class Made(nn.Module):
    """A wrapped submodule beside ordinary ones, one level deeper."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.wrapped = wrap(nn.Linear(4, 3))
        self.head = nn.Linear(3, 2)


Make = Callable[[], tuple[nn.Module, nn.Module]]
"""Make a wrapped model, and the part that is passed to the call."""


def _the_net_itself() -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    return TorchFSDP(net, use_orig_params=True, device_id=torch.device("cpu")), net


def _inside(wrap: Callable[..., nn.Module], path: str, **kwargs: Any) -> Make:
    def make() -> tuple[nn.Module, nn.Module]:
        wrapped = wrap(Net(), **kwargs)
        return wrapped, wrapped.get_submodule(path)

    return make


_IN, _FLAT_IN = "_fsdp_wrapped_module", "_fsdp_wrapped_module._fpw_module"

# name -> (what makes it, a parameter that the message names)
PARTS: dict[str, tuple[Make, str]] = {
    "FSDP1 orig, the net that was wrapped": (_the_net_itself, "0.weight"),
    "FSDP1 orig, wrapped.module": (_inside(in_fsdp1, _IN, use_orig_params=True), "scale"),
    "FSDP1 orig, a submodule": (_inside(in_fsdp1, f"{_IN}.head", use_orig_params=True), "weight"),
    "FSDP1 orig, inside a nested unit": (_inside(in_fsdp1, f"{_IN}.stem.{_IN}", use_orig_params=True), "weight"),
    "FSDP1 orig, NO_SHARD": (
        _inside(in_fsdp1, _IN, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
        "scale",
    ),
    "FSDP1 flat, wrapped.module": (_inside(in_fsdp1, _IN), "_flat_param"),
    "fairscale flat, wrapped.module": (_inside(in_fairscale, _IN), "flat_param"),
    "fairscale flat, inside a nested unit": (_inside(in_fairscale, f"{_FLAT_IN}.stem.{_IN}"), "flat_param"),
    "fairscale non-flat, wrapped.module": (_inside(in_fairscale, _IN, flatten_parameters=False), "scale"),
    "fairscale non-flat, a submodule": (_inside(in_fairscale, f"{_IN}.head", flatten_parameters=False), "weight"),
}


def verbs_on(part: nn.Module, optim: Any, wrapped: nn.Module, folder: str) -> dict[str, tuple[str, str]]:
    plain = torch.optim.Adam(Net().parameters()).state_dict()
    everywhere = dist.group.WORLD
    return {
        "gather": refusal(lambda: fsdp_optim.gather_full_optim_state_dict(part, optim)),
        "gather, group": refusal(
            lambda: fsdp_optim.gather_full_optim_state_dict(
                part, optim, options=fsdp_optim.CallOptions(process_group=everywhere)
            )
        ),
        "iterate": refusal(lambda: list(fsdp_optim.iter_full_optim_state(part, optim))),
        "shard": refusal(lambda: fsdp_optim.get_shard_from_optim_state_dict(part, optim, plain)),
        "scatter": refusal(lambda: fsdp_optim.scatter_full_optim_state_dict(part, optim, plain, 0)),
        "transfer": refusal(lambda: fsdp_optim.transfer_optim_state(part, optim, wrapped, optim)),
        "rekey": refusal(lambda: fsdp_optim.rekey_optim_state_dict(plain, part, "name")),
        "save": refusal(lambda: fsdp_optim.save(Path(folder) / f"save-{dist.get_rank()}", part, optim)),
        "save weights": refusal(lambda: fsdp_optim.save(Path(folder) / f"weights-{dist.get_rank()}", part)),
    }


def refuse_parts(folder: str) -> dict[str, dict[str, tuple[str, str]]]:
    refusals = {}
    with fairscale_on_cpu():
        for name, (make, _) in PARTS.items():
            wrapped, part = make()
            refusals[name] = verbs_on(part, stepped(part.parameters()), wrapped, folder)
            numbers = stepped(wrapped.parameters())  # the whole is still accepted
            fsdp_optim.gather_full_optim_state_dict(wrapped, numbers, key_by="name")
    return refusals


@pytest.fixture(scope="module")
def refused_parts() -> list[dict[str, dict[str, tuple[str, str]]]]:
    with tempfile.TemporaryDirectory() as folder:
        return list(run_on_ranks(refuse_parts, 2, folder))


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_wrapped_model_is_refused(refused_parts: Any, name: str) -> None:
    for rank, refusals in enumerate(refused_parts):
        for verb, (kind, message) in refusals[name].items():
            assert kind == "WrapperError", f"{verb} on rank {rank}: {kind}: {message}"
            assert PARTS[name][1] in message, f"{verb} on rank {rank}: {message}"
            assert "pass the wrapped root" in message, f"{verb} on rank {rank}: {message}"


# ------------------------------------------------------------------------------------------ parts with nothing left in them


def refuse_empty(folder: str) -> dict[str, tuple[str, str]]:
    """A wrapper that flattens takes all parameters out of the modules inside it."""
    where = Path(folder)
    refusals = {}
    whole = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    saved = fsdp_optim.save(where / "whole", in_ddp(whole))
    with fairscale_on_cpu():
        nets = {name: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)) for name in ("fairscale", "FSDP1")}
        kept_alive = [
            fsdp_optim.fairscale.FullyShardedDataParallel(nets["fairscale"]),
            TorchFSDP(nets["FSDP1"], use_orig_params=False, device_id=torch.device("cpu")),
        ]
        for name, net in nets.items():
            part = net if name == "fairscale" else net[0]
            refusals[f"{name}, save"] = refusal(lambda: fsdp_optim.save(where / "part", part))  # noqa: B023
            refusals[f"{name}, load"] = refusal(lambda: fsdp_optim.load(saved.path, part, strict=False))  # noqa: B023
        del kept_alive
    return refusals


def test_a_part_without_parameters_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for refusals in run_on_ranks(refuse_empty, 2, folder):
            assert len(refusals) == 4, refusals
            for call, (kind, message) in refusals.items():
                assert kind == "WrapperError", f"{call}: {kind}: {message}"
                assert "pass the wrapped root" in message, f"{call}: {message}"
        assert [path.name for path in Path(folder).iterdir()] == ["whole"]


# ------------------------------------------------------------------------------------------ parts that are whole


def gather_wholes() -> dict[str, bool]:
    """Parts with whole parameters, or with sharded parameters that record their cut, are gathered correctly."""
    are_equal = {}
    net = Net()
    numbers = Numbers(net)
    numbers.give(net)
    parts: dict[str, nn.Module] = {"DDP": in_ddp(net).module}
    mesh = init_device_mesh("cpu", (2,))
    inner = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    outer = nn.Sequential(inner, nn.Linear(5, 2))
    fully_shard(outer, mesh=mesh)
    parts["FSDP2"] = inner
    for name, part in parts.items():
        optim = stepped(part.parameters())
        full = fsdp_optim.gather_full_optim_state_dict(part, optim, None, "name")
        for fqn, param in part.named_parameters():
            own = local_of(optim.state[param]["exp_avg"])
            whole = optim.state[param]["exp_avg"]
            wanted = whole.full_tensor() if isinstance(whole, DTensor) else own
            are_equal[f"{name} {fqn}"] = torch.equal(full["state"][fqn]["exp_avg"], wanted)
    return are_equal


def test_parts_that_are_whole_are_gathered() -> None:
    for are_equal in run_on_ranks(gather_wholes, 2):
        assert len(are_equal) >= 6, are_equal
        assert all(are_equal.values()), are_equal


def test_world_size_1() -> None:
    """A flattened parameter is refused on a single rank too; a parameter that is neither flattened nor cut is read."""
    (outcomes,) = run_on_ranks(on_one_rank, 1)
    assert outcomes["flat"][0] == "WrapperError"
    assert "pass the wrapped root" in outcomes["flat"][1]
    assert outcomes["whole"] == ("nothing", "was raised")


def on_one_rank() -> dict[str, tuple[str, str]]:
    with fairscale_on_cpu():
        flat = in_fairscale(Net()).get_submodule("_fsdp_wrapped_module")
        whole = in_fairscale(Net(), flatten_parameters=False).get_submodule("_fsdp_wrapped_module")
        return {
            name: refusal(lambda part=part: fsdp_optim.gather_full_optim_state_dict(part, stepped(part.parameters())))
            for name, part in (("flat", flat), ("whole", whole))
        }


# ------------------------------------------------------------------------------------------ values without elements


class Norms(torch.optim.SGD):
    """An optimizer that keeps a norm of each parameter: a partial DTensor, in a list, or whole."""

    form = "plain"

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                norm = param.detach().norm()
                self.state[param]["norm"] = {"plain": norm, "list": [norm]}.get(self.form)
                if self.form == "whole":
                    self.state[param]["norm"] = norm.full_tensor()
                if self.form == "partial":
                    self.state[param]["norm"] = DTensor.from_local(
                        param.to_local() * 2, param.device_mesh, [Partial()], run_check=False
                    )


def refuse_partial(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    outcomes: dict[str, Any] = {}
    for form in ("plain", "list", "partial", "whole"):
        model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
        for param in model.parameters():
            nn.init.constant_(param, 1.0)
        fully_shard(model, mesh=mesh)
        optim = Norms(model.parameters(), lr=0.1)
        optim.form = form
        optim.step()
        last = dict(model.named_parameters())["1.bias"]
        for param in model.parameters():
            if param is not last:
                optim.state[param] = {"norm": torch.tensor(0.0)}
        outcomes[form] = {
            "gather": refusal(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim)),  # noqa: B023
            "iterate": refusal(lambda: list(fsdp_optim.iter_full_optim_state(model, optim))),  # noqa: B023
            "save": refusal(lambda: fsdp_optim.save(Path(folder) / form, model, optim)),  # noqa: B023
        }
        if form == "whole":
            full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, "name")
            outcomes["value"] = full["state"]["1.bias"]["norm"].item()
    return outcomes


def test_partial_dtensors_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for outcomes in run_on_ranks(refuse_partial, 2, folder):
            assert outcomes.pop("value") == torch.ones(2).norm().item()
            whole = outcomes.pop("whole")
            assert set(whole.values()) == {("nothing", "was raised")}, whole
            for form, by_verb in outcomes.items():
                for verb, (kind, message) in by_verb.items():
                    assert kind == "WrapperError", f"{form}, {verb}: {kind}: {message}"
                    assert "1.bias: norm" in message, message
                    assert "Partial" in message, message
                    assert "full_tensor()" in message, message


def refuse_partial_dict() -> tuple[str, str]:
    """A sharded dict, as torch makes it, with a partial value inside."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=mesh)
    optim = stepped(model.parameters())
    values = dict(optim.state[model.weight])
    values["exp_avg"] = DTensor.from_local(torch.ones(2, 4), mesh, [Partial()], run_check=False)
    sharded = {"state": {"weight": values}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
    return refusal(lambda: fsdp_optim.reshard_optim_state_dict(model, optim, sharded))


def test_a_partial_value_in_a_sharded_dict_is_refused() -> None:
    for kind, message in run_on_ranks(refuse_partial_dict, 2):
        assert kind == "WrapperError", message
        assert "weight: exp_avg" in message, message


# ------------------------------------------------------------------------------------------ the meta device


def refuse_meta(folder: str) -> dict[str, tuple[str, str]]:
    where = Path(folder)
    refusals = {}
    solid = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optim = stepped(solid.parameters())
    saved = fsdp_optim.save(where / "solid", fully_shard_on(solid), None)
    full = {"state": {}, "param_groups": [{**optim.state_dict()["param_groups"][0]}]}
    for name in ("plain", "FSDP2", "last", "buffer"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        if name == "last":  # only the last parameter has no memory
            model[0].to_empty(device="cpu")
            model[1].weight = nn.Parameter(torch.ones(2))
        elif name == "buffer":
            model[0].to_empty(device="cpu")
            model[1] = nn.BatchNorm1d(2)
            model[1].running_var = torch.empty(2, device="meta")
        if name in ("FSDP2", "last", "buffer"):
            fully_shard_on(model)
        group = dist.group.WORLD if name == "plain" else None
        optim = adam(model.parameters())
        refusals[f"{name}: load"] = refusal(
            lambda: fsdp_optim.load(saved.path, model, options=fsdp_optim.LoadOptions(process_group=group))  # noqa: B023
        )
        refusals[f"{name}: save"] = refusal(
            lambda: fsdp_optim.save(where / f"{name}", model, options=fsdp_optim.SaveOptions(process_group=group))  # noqa: B023
        )
        if name != "buffer":
            refusals[f"{name}: gather"] = refusal(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim))  # noqa: B023
            refusals[f"{name}: scatter"] = refusal(
                lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full, 0)  # noqa: B023
            )
            refusals[f"{name}: shard"] = refusal(lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))  # noqa: B023
    return refusals


def fully_shard_on(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


META_NAMES = {"plain": "0.weight", "FSDP2": "0.weight", "last": "1.bias", "buffer": "1.running_var"}


def test_a_model_on_the_meta_device_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, refusals in enumerate(run_on_ranks(refuse_meta, 2, folder)):
            for call, (kind, message) in refusals.items():
                assert kind == "WrapperError", f"{call}: {kind}: {message}"
                assert f"{META_NAMES[call.split(':')[0]]}: on rank" in message, f"{call} on rank {rank}: {message}"
                assert "to_empty(" in message, message
        assert sorted(path.name for path in Path(folder).iterdir()) == ["solid"]


def test_a_meta_model_still_tells_the_names() -> None:
    """Rekeying needs names and shapes only."""
    net = nn.Linear(3, 2)
    full = fsdp_optim.gather_full_optim_state_dict(net, stepped(net.parameters()))
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    assert full is not None
    assert list(fsdp_optim.rekey_optim_state_dict(full, model, "name")["state"]) == ["weight", "bias"]


def test_state_on_the_meta_device_is_refused() -> None:
    net = nn.Linear(3, 2)
    optim = stepped(net.parameters())
    optim.state[net.bias]["exp_avg_sq"] = torch.empty(2, device="meta")
    kind, message = refusal(lambda: fsdp_optim.gather_full_optim_state_dict(net, optim))
    assert kind == "WrapperError", message
    assert message.startswith("bias: exp_avg_sq is on the meta device"), message


# ------------------------------------------------------------------------------------------ HYBRID_SHARD on plain groups


def hybrid_on_groups(rows: list[list[int]], columns: list[list[int]]) -> dict[str, Any]:
    rank = dist.get_rank()
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*rows, *columns)}
    within = next(groups[tuple(row)] for row in rows if rank in row)
    across = next(groups[tuple(column)] for column in columns if rank in column)
    model = TorchFSDP(
        nn.Linear(4, 3),
        process_group=(within, across),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optim = stepped(model.parameters())
    return {
        "gather": refusal(
            lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, options=fsdp_optim.CallOptions(timeout=20))
        ),
        "shard": refusal(
            lambda: fsdp_optim.get_shard_from_optim_state_dict(
                model, optim, adam(nn.Linear(4, 3).parameters()).state_dict()
            )
        ),
    }


def test_groups_that_are_not_known_ask_for_a_mesh() -> None:
    for rank, refusals in enumerate(run_on_ranks(hybrid_on_groups, 4, [[0, 3], [1, 2]], [[0, 1], [2, 3]])):
        for verb, (kind, message) in refusals.items():
            assert kind == "WrapperError", f"{verb} on rank {rank}: {kind}: {message}"
            assert "device_mesh=" in message, f"{verb} on rank {rank}: {message}"


def test_groups_that_are_shifted_copies_are_read() -> None:
    for outcomes in run_on_ranks(hybrid_on_groups, 4, [[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        assert outcomes["gather"] == ("nothing", "was raised"), outcomes


# ------------------------------------------------------------------------------------------ optimizers that shard by themselves


def refuse_sharded_optimizers() -> dict[str, tuple[str, str]]:
    from fairscale.optim.oss import OSS

    outcomes = {}
    for name, make in {
        "ZeroRedundancyOptimizer": lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1),
        "OSS": lambda params: OSS(params, torch.optim.Adam, lr=0.1),
    }.items():
        model = in_ddp(nn.Linear(4, 3))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim = make(list(model.parameters()))
        optim.step()
        outcomes[name] = refusal(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim))  # noqa: B023
        optim.consolidate_state_dict(0)
        if dist.get_rank() == 0:  # the way out that the message names
            full = optim.state_dict()
            plain = torch.optim.Adam(nn.Linear(4, 3).parameters(), lr=0.1)
            shard = fsdp_optim.get_shard_from_optim_state_dict(
                model.module,
                adam(model.module.parameters()),
                {"state": full["state"], "param_groups": full["param_groups"]},
            )
            plain.load_state_dict(full)
            outcomes[f"{name}, loaded"] = (str(len(shard["state"])), str(len(plain.state)))
    return outcomes


def test_optimizers_that_shard_by_themselves_are_refused() -> None:
    for rank, outcomes in enumerate(run_on_ranks(refuse_sharded_optimizers, 2)):
        for name in ("ZeroRedundancyOptimizer", "OSS"):
            kind, message = outcomes[name]
            assert kind == "WrapperError", f"{kind}: {message}"
            assert name in message, message
            assert "consolidate_state_dict()" in message, message
            if rank == 0:
                assert outcomes[f"{name}, loaded"] == ("2", "2")


def test_placements_that_are_no_reduction_are_read() -> None:
    """A replicated value in the state of a sharded parameter is not a partial value."""
    for is_equal in run_on_ranks(gather_replica, 2):
        assert is_equal


def gather_replica() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=mesh)
    optim = stepped(model.parameters())
    norm = model.weight.detach().norm().redistribute(placements=[Replicate()])
    optim.state[model.weight]["norm"] = norm
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, "name")
    return bool(full is not None and torch.equal(full["state"]["weight"]["norm"], norm.full_tensor()))
