"""Models under fairscale FSDP on any process groups, stepped without a forward pass, and comparisons that name the differences.

Initial values and gradients are a function of a parameter's name in the whole job, not of the elements' numbers as in
`kit.trained`, because a rank that has some of the experts does not know the whole model. Cuts, steps and comparisons are those of
the whole kit.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from kit import compare, wrapping
from kit.described import numbers
from kit.elements import Numbers
from kit.local_parts import params_of
from kit.trained import STEPS, take_steps

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


def gradient(name: str, step: int, shape: Sequence[int]) -> Tensor:
    return numbers(f"{name} gradient {step}", shape)


def fill(model: nn.Module, rename: Rename = str) -> None:
    """Set every parameter of an unwrapped model to the values of its name."""
    for name, param in model.named_parameters():
        param.data.copy_(numbers(f"{rename(name)} values", param.shape))


class NamedNumbers(Numbers):
    """Numbers of a model's elements on this rank, with values and gradients by the parameters' names in the whole job."""

    def __init__(self, model: nn.Module, rename: Rename = str) -> None:
        super().__init__(model)
        self._rename = rename

    def values(self) -> Tensor:
        return self.table({name: numbers(f"{self._rename(name)} values", shape) for name, shape in self.shape.items()})

    def gradients(self, step: int) -> Tensor:
        return self.table({name: gradient(self._rename(name), step, shape) for name, shape in self.shape.items()})


class Sharded:
    """A model that is wrapped unit by unit, with the numbers of the elements in every live parameter.

    `rename` makes a parameter's name on this rank its name in the whole job: a rank with some of the experts does not know the
    whole model, so that values and gradients come from names.
    """

    def __init__(self, model: nn.Module, rename: Rename = str) -> None:
        self._numbers = NamedNumbers(model, rename)
        self._names = {param: name for name, param in model.named_parameters()}
        self._live: list[tuple[nn.Parameter, Tensor, Sequence[str]]] = []
        fill(model, rename)

    def wrap(self, module: nn.Module, cls: type[nn.Module] = FSDP, **kwargs: Any) -> Any:
        """Make a unit of the parameters in `module` that are not in a unit yet."""
        params = list(dict.fromkeys(p for p in module.parameters() if not _is_in_a_unit(p)))
        names = [self._names[param] for param in params]
        for param, name in zip(params, names, strict=True):
            param.data = self._numbers.of(name).reshape(param.shape).to(param.dtype)
        unit: Any = cls(module, **kwargs)
        parts = [names] if kwargs.get("flatten_parameters", True) else [[name] for name in names]
        for param, part in zip(unit.params, parts, strict=True) if names else ():
            index = self._numbers.read(param)
            param.data.copy_(self._numbers.values()[index].reshape(param.shape))
            self._live.append((param, index, part))
        return unit

    def adopt(self, unit: Any, names: Sequence[str]) -> None:
        """Add a unit of one rank that was made elsewhere, with one parameter for each of `names`."""
        self._live += [(p, self._numbers.of(name), [name]) for p, name in zip(unit.params, names, strict=True)]

    def step(self, optim: Any, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        """One optimizer step for each number in `steps`. Units with a name in `unused` get no gradient."""
        known = {id(param) for param, *_ in self._live}
        free = [(p, n) for p, n in self._names.items() if not _is_in_a_unit(p) and id(p) not in known]
        held = {id(param) for param in params_of(optim)}
        parts = [
            (param, index, not set(names) & set(unused))
            for param, index, names in [*self._live, *((p, self._numbers.of(n), [n]) for p, n in free)]
            if id(param) in held
        ]
        take_steps(optim, steps, self._numbers, parts)


def _is_in_a_unit(param: Tensor) -> bool:
    return hasattr(param, "_is_sharded")


def step_plain(model: nn.Module, optim: Optim, steps: Sequence[int], unused: Collection[str] = ()) -> None:
    """The same steps on a model without FSDP."""
    numbered = NamedNumbers(model)
    parts = [(param, numbered.of(name), name not in unused) for name, param in model.named_parameters()]
    take_steps(optim, steps, numbered, parts)


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
    own_group = None
    for members in ranks:
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            own_group = group
    return own_group


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


def check_full(full: Any, optim: Optim, names: Sequence[str], what: str = "the full dict") -> None:
    """Raise unless a full dict by id is the dict of an optimizer of an unwrapped model, whose parameters have `names`."""
    compare.check_same(f"{what}, names of all parameters", len(names), len(params_of(optim)))
    wanted, left = optim.state_dict(), iter(names)
    for group in wanted["param_groups"]:
        group["param_names"] = list(itertools.islice(left, len(group["params"])))
    wrapping.check_full(what, full, wanted, in_order=False)


def check_gathered(result: Any, recipient: int | None, model: nn.Module, optim: Optim) -> None:
    """Raise unless the recipient has the dict of the plain model's optimizer, and other ranks have None."""
    rank = dist.get_rank()
    if recipient in (rank, None):
        check_full(result, optim, names_in(model), f"what rank {rank} got (recipient_rank={recipient})")
    elif result is not None:
        raise AssertionError(f"rank {rank} got {type(result).__name__} although recipient_rank is {recipient}")


def names_in(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def frozen_copy(optim: Any) -> Any:
    """A copy of the optimizer's own dict."""
    return copy.deepcopy(optim.state_dict())


def snapshot(model: nn.Module, optim: Any) -> dict[str, Any]:
    """Copies of the values of a model and its optimizer, buffers too."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return {**wrapping.copies_of(model, optim), "buffers": buffers}


def error_of(call: Callable[[], Any]) -> Error:
    """The error that a call raises, and the seconds that it took."""
    start = time.monotonic()
    kind, text = compare.error_text(call)
    return kind, text, time.monotonic() - start


def check_alike(errors: Sequence[Error], kind: str, *words: str, within: float = 30.0) -> None:
    """Raise unless all ranks had one and the same error, of one class, with all words in it, soon."""
    compare.check_refused("the call", [(name, message) for name, message, _ in errors], kind, *words)
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


def rename_experts(expert_ids: Sequence[int]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        parts = name.split(".")
        if parts[0] == "experts":
            parts[1] = str(expert_ids[int(parts[1])])
        return ".".join(parts)

    return rename


def name_of_experts(distribution: Distribution) -> Callable[[str, int], str]:
    def name_of(fqn: str, rank: int) -> str:
        return rename_experts(distribution[rank])(fqn)

    return name_of


def with_experts(
    expert_ids: Sequence[int], steps: int = STEPS, no_broadcast: bool = True, keys: Sequence[int | str] | None = None
) -> tuple[Any, torch.optim.Optimizer, Sharded]:
    """The model of this rank: each of its experts is a unit on a group of one rank, the rest is on all ranks."""
    rename = rename_experts(expert_ids) if keys is None else str
    net = Experts(range(len(expert_ids)) if keys is None else keys)
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
