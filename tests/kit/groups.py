"""Models under fairscale FSDP on any process groups, stepped without a forward pass, and comparisons that say what differs.

Initial values and gradients are a function of a parameter's name in the whole job, so that a model of any wrapping, on any
ranks, and the plain model with all parts train alike, bit for bit (optimizers are elementwise).
"""

from __future__ import annotations

import copy
import pickle
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_optim import FullyShardedDataParallel as FSDP
from kit import compare

STEPS = 3

Rename = Callable[[str], str]
Optim = torch.optim.Optimizer
Error = tuple[str, str, float]
"""(class, message, seconds); the class is "" where there was no error."""


class Net(nn.Module):
    """A model whose root unit has the first and the last parameters, so that parameters and units have different orders."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.middle = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


NUM_NET_PARAMS = 7


def numbers(key: str, shape: Sequence[int]) -> Tensor:
    """Random numbers that are a function of a key, equal in all processes."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(tuple(shape), generator=generator)


def gradient(name: str, step: int, shape: Sequence[int]) -> Tensor:
    return numbers(f"{name} gradient {step}", shape)


def fill(model: nn.Module, rename: Rename = str) -> None:
    """Set every parameter of an unwrapped model to the values of its name."""
    for name, param in model.named_parameters():
        param.data.copy_(numbers(f"{rename(name)} values", param.shape))


class Sharded:
    """A model that is wrapped unit by unit, with a record of the originals in every live parameter.

    `rename` makes a parameter's name on this rank its name in the whole job, which its numbers come from.
    """

    def __init__(self, model: nn.Module, rename: Rename = str) -> None:
        fill(model, rename)
        self._rename = rename
        self._names = {param: name for name, param in model.named_parameters()}
        self._live: list[tuple[nn.Parameter, nn.Module | None, list[tuple[str, torch.Size]]]] = []

    def wrap(self, module: nn.Module, cls: type[nn.Module] = FSDP, **kwargs: Any) -> Any:
        """Make a unit of the parameters in `module` that are not in a unit yet."""
        params = list(dict.fromkeys(p for p in module.parameters() if not hasattr(p, "_is_sharded")))
        originals = [(self._names[param], param.shape) for param in params]
        unit: Any = cls(module, **kwargs)
        parts = [originals] if kwargs.get("flatten_parameters", True) else [[original] for original in originals]
        self._live += [(p, unit, part) for p, part in zip(unit.params, parts, strict=True)] if originals else []
        return unit

    def adopt(self, unit: Any, names: Sequence[str]) -> None:
        """Add a unit that was made elsewhere, with one parameter for each of `names`."""
        self._live += [(p, unit, [(n, p._orig_size)]) for p, n in zip(unit.params, names, strict=True)]

    def step(self, optim: Any, steps: Collection[int], unused: Collection[str] = ()) -> None:
        """One optimizer step for each number in `steps`. Units with a name in `unused` get no gradient."""
        known = {id(param) for param, *_ in self._live}
        loose = [(p, None, [(n, p.shape)]) for p, n in self._names.items() if not _is_empty(p) and id(p) not in known]
        held = {id(p) for group in optim.param_groups for p in group["params"]}
        for number in steps:
            for param, unit, parts in [*self._live, *loose]:
                if id(param) in held and not any(name in unused for name, _ in parts):
                    full = torch.cat([gradient(self._rename(n), number, shape).reshape(-1) for n, shape in parts])
                    mine = unit._get_shard(full)[0] if unit is not None and param._is_sharded else full
                    param.grad = mine.view(param.shape).to(param.dtype)
            optim.step()


def _is_empty(param: Tensor) -> bool:
    """Whether a wrapper has emptied an original parameter."""
    return hasattr(param, "_is_sharded")


def step_plain(model: nn.Module, optim: Optim, steps: Collection[int], unused: Collection[str] = ()) -> None:
    """The same steps on a model without FSDP."""
    for number in steps:
        for name, param in model.named_parameters():
            param.grad = None if name in unused else gradient(name, number, param.shape).to(param.dtype)
        optim.step()


def adam(params: Any) -> Optim:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def plain_net(steps: int = 3, make: Callable[[Any], Optim] = adam, model: nn.Module | None = None) -> tuple[Any, Optim]:
    """The oracle: a model without FSDP and its optimizer after some steps."""
    model = model or Net()
    fill(model)
    optim = make(model.parameters())
    step_plain(model, optim, range(steps))
    return model, optim


def nested_net(
    steps: int = 3, make: Callable[[Any], Optim] = adam, cls: type[nn.Module] = FSDP, width: int = 7, **kwargs: Any
) -> tuple[Any, Optim, Sharded]:
    """`Net` in three units: each Linear of the middle, and the rest; its optimizer after some steps."""
    net = Net(width)
    sharded = Sharded(net)
    net.middle[0] = sharded.wrap(net.middle[0], cls, **kwargs)
    net.middle[2] = sharded.wrap(net.middle[2], cls, **kwargs)
    model = sharded.wrap(net, cls, **kwargs)
    optim = make(model.parameters())
    sharded.step(optim, range(steps))
    return model, optim, sharded


def new_groups(*ranks: Sequence[int]) -> Any:
    """Make these process groups on all ranks; returns the group with this rank."""
    mine = None
    for members in ranks:
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group
    return mine


def told_by(rank: int, value: Any) -> Any:
    """The value of one rank, on all ranks of the world."""
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return copy.deepcopy(box[0])


class Meeting:
    """An exchange of values through the rendezvous store, which works even if the process group is broken."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._number = 0

    def tell(self, value: Any) -> list[Any]:
        self._number += 1
        self._store.set(f"test/{self._number}/{dist.get_rank()}", pickle.dumps(value))
        keys = [f"test/{self._number}/{rank}" for rank in range(dist.get_world_size())]
        self._store.wait(keys, timedelta(seconds=60))
        return [pickle.loads(self._store.get(key)) for key in keys]


# ---------------------------------------------------------------------------------------------- comparing


def raw(tensor: Tensor) -> bytes:
    """All bytes of a tensor's elements."""
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def check_same(got: Any, wanted: Any, what: str) -> None:
    """The same as in `kit.compare`, but keys may be in any order."""
    compare.check_same(what, got, wanted, in_order=False)


def check_full(full: Any, optim: Optim, names: Sequence[str], what: str = "the full dict") -> None:
    """Raise unless a full dict by id is the dict of an optimizer of an unwrapped model, whose parameters have `names`."""
    if full is None:
        raise AssertionError(f"{what} is None")
    wanted = optim.state_dict()
    groups = [dict(group) for group in full["param_groups"]]
    flat = [name for group in groups for name in group.pop("param_names")]
    check_same(full["state"], wanted["state"], f"{what}, state")
    check_same(groups, wanted["param_groups"], f"{what}, param_groups")
    check_same(flat, list(names), f"{what}, param_names")


def by_name(full: Any) -> dict[str, Any]:
    """The state of a full dict by id, as {name: state}; the parameters without state are left out."""
    name_of = {
        key: name
        for group in full["param_groups"]
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {name_of[key]: values for key, values in full["state"].items()}


def plain_by_name(model: nn.Module, optim: Optim) -> dict[str, Any]:
    """The state of a plain optimizer as {name: state}."""
    return {name: dict(optim.state[p]) for name, p in model.named_parameters() if optim.state.get(p)}


def check_gathered(found: Any, recipient: int | None, model: nn.Module, optim: Optim) -> None:
    """Raise unless the recipient has the dict of the plain model's optimizer, and other ranks have None."""
    rank = dist.get_rank()
    if recipient in (rank, None):
        check_full(found, optim, names_in(model), f"what rank {rank} got (recipient_rank={recipient})")
    elif found is not None:
        raise AssertionError(f"rank {rank} got {type(found).__name__} although recipient_rank is {recipient}")


def names_in(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def frozen_copy(optim: Any) -> Any:
    """A copy of the optimizer's own dict."""
    return copy.deepcopy(optim.state_dict())


def snapshot(model: nn.Module, optim: Any) -> Any:
    """A copy of every byte of a model and its optimizer: parameters, gradients, state and groups."""

    def copied(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().clone()

    return {
        "params": {name: copied(param) for name, param in model.named_parameters()},
        "grads": {name: copied(param.grad) for name, param in model.named_parameters()},
        "buffers": {name: copied(buffer) for name, buffer in model.named_buffers()},
        "optim": frozen_copy(optim),
    }


def error_of(call: Callable[[], Any]) -> Error:
    """The error that a call raises."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def check_alike(errors: Sequence[Error], kind: str, *words: str, within: float = 5.0) -> None:
    """Raise unless all ranks had one and the same error, of one class, with all words in it, soon."""
    what = "\n".join(f"rank {rank}: {name or 'no error'}: {message}" for rank, (name, message, _) in enumerate(errors))
    if {name for name, *_ in errors} != {kind}:
        raise AssertionError(f"not {kind} on all ranks:\n{what}")
    if len({message for _, message, _ in errors}) != 1:
        raise AssertionError(f"the message is not the same on all ranks:\n{what}")
    missing = [word for word in words if word not in errors[0][1]]
    if missing:
        raise AssertionError(f"{missing} not in the message:\n{errors[0][1]}")
    slowest = max(seconds for *_, seconds in errors)
    if slowest > within:
        raise AssertionError(f"it took {slowest:.1f} s until all ranks had the error")


# ------------------------------------------------------------------------------------------ experts


class Experts(nn.Module):
    """A trunk, some experts, a head. The plain model has all experts, a rank has some of them."""

    def __init__(self, keys: Sequence[int | str]) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.experts = nn.ModuleDict({str(key): nn.Linear(5, 3) for key in keys})
        self.head = nn.Linear(3, 2)


Distribution = Sequence[Sequence[int]]


def rename_experts(mine: Sequence[int]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        parts = name.split(".")
        if parts[0] == "experts":
            parts[1] = str(mine[int(parts[1])])
        return ".".join(parts)

    return rename


def name_of_experts(distribution: Distribution) -> Callable[[str, int], str]:
    def name_of(fqn: str, rank: int) -> str:
        return rename_experts(distribution[rank])(fqn)

    return name_of


def with_experts(
    mine: Sequence[int], steps: int = STEPS, no_broadcast: bool = True, keys: Sequence[int | str] | None = None
) -> tuple[Any, torch.optim.Optimizer, Sharded]:
    """The model of this rank: each of its experts is a unit on a group of one rank, the rest is on all ranks."""
    rename = rename_experts(mine) if keys is None else str
    net = Experts(range(len(mine)) if keys is None else keys)
    sharded = Sharded(net, rename)
    alone = new_groups(*([rank] for rank in range(dist.get_world_size())))
    for key, expert in net.experts.items():
        net.experts[key] = sharded.wrap(expert, process_group=alone, no_broadcast_optim_state=no_broadcast)
    model = sharded.wrap(net)
    optim = adam(model.parameters())
    sharded.step(optim, range(steps))
    return model, optim, sharded


def plain_experts(num: int, steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    return plain_net(steps, model=Experts(range(num)))
