"""One small awkward model in each of nine wrappers, trained without a forward pass on one common sequence of gradients.

How a wrapper has cut the model is read from the model itself, not from a formula: every element of the unwrapped model is
given a number of its own as its value, so that after wrapping the values of a live parameter say which elements it has.
Elementwise optimizers then train every wrapping, and the unwrapped model, to the same state, bit for bit.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_optim
from fsdp_optim import FullyShardedDataParallel as FairscaleFSDP
from fsdp_optim.testing import fairscale_on_cpu

Optim = torch.optim.Optimizer
Make = Callable[[Any], Optim]

WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3


class Net(nn.Module):
    """Nested, with parameters of the root beside and before its units, and hardly a dimension that ranks divide."""

    units = ("stem", "block.0", "block", "")
    tensor_parallel = {"stem": ColwiseParallel(), "block.0": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.mix = nn.Parameter(torch.empty(3, 2, 5))
        self.stem = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x))) * self.scale + self.mix.sum()


def adam(params: Any) -> Optim:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Any) -> Optim:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def adamw_tensor_lr(params: Any) -> Optim:
    return torch.optim.AdamW(params, lr=torch.tensor(0.01), weight_decay=0.1)


# ------------------------------------------------------------------------------------------ wrapping


def wrap_units(model: nn.Module, wrap: Callable[[nn.Module], Any], paths: Sequence[str] | None = None) -> Any:
    """Wrap the modules at these paths, inner ones first as they are listed; "" is the model itself."""
    for path in getattr(model, "units", ("",)) if paths is None else paths:
        if not path:
            return wrap(model)
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, wrap(model.get_submodule(path)))
    return model


def in_fairscale(model: nn.Module, **kwargs: Any) -> Any:
    return wrap_units(model, lambda module: FairscaleFSDP(module, **kwargs))


def in_fsdp1(model: nn.Module, **kwargs: Any) -> Any:
    options = {"device_id": torch.device("cpu"), "use_orig_params": False, **kwargs}
    return wrap_units(model, lambda module: TorchFSDP(module, **options))


def in_fsdp2(model: nn.Module, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return wrap_units(model, lambda module: fully_shard(module, mesh=mesh, **kwargs))


def in_hsdp(model: nn.Module, shape: tuple[int, int], **kwargs: Any) -> Any:
    return in_fsdp2(model, mesh_2d(shape), **kwargs)


def in_fsdp2_over_tp(model: nn.Module, shape: tuple[int, int], **kwargs: Any) -> Any:
    mesh = mesh_2d(shape, ("dp", "tp"))
    parallelize_module(model, mesh["tp"], dict(model.tensor_parallel))
    return in_fsdp2(model, mesh["dp"], **kwargs)


def in_ddp(model: nn.Module, **kwargs: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def mesh_2d(shape: tuple[int, int], names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp1_hybrid(shape: tuple[int, int], strategy: ShardingStrategy, orig: bool) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp1(model, device_mesh=mesh_2d(shape), sharding_strategy=strategy, use_orig_params=orig)


def fsdp1_hybrid_groups(model: nn.Module) -> Any:
    """HYBRID_SHARD over two process groups; the shards of a replica are not neighbours: ranks 0, 2 and 1, 3."""
    rank = dist.get_rank()
    within = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return in_fsdp1(model, process_group=(within, across), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


_HSDP_SHAPES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
_TP_SHAPES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "fairscale flat": in_fairscale,
    "fairscale non-flat": lambda model: in_fairscale(model, flatten_parameters=False),
    "FSDP1 flat": in_fsdp1,
    "FSDP1 orig": lambda model: in_fsdp1(model, use_orig_params=True),
    "FSDP2": in_fsdp2,
    "HSDP": lambda model: in_hsdp(model, _HSDP_SHAPES[dist.get_world_size()]),
    "FSDP2 x TP": lambda model: in_fsdp2_over_tp(model, _TP_SHAPES[dist.get_world_size()]),
    "DDP": in_ddp,
    "plain": lambda model: model,
}


# ------------------------------------------------------------------------------------------ numbers

_FIRST = 64  # smaller values are what wrappers fill padding with


class Numbers:
    """A number for every element of an unwrapped model, and gradients by these numbers."""

    least = _FIRST

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)  # as it was, for the oracle
        self.start: dict[str, int] = {}
        self._total = _FIRST
        for name, param in model.named_parameters():
            self.start[name] = self._total
            self._total += param.numel()

    def give(self, model: nn.Module) -> None:
        """Give every element its number as its value."""
        for name, param in model.named_parameters():
            numbers = torch.arange(self.start[name], self.start[name] + param.numel())
            param.data = numbers.reshape(param.shape).to(param.dtype)

    def gradients(self, step: int) -> Tensor:
        """By number. Padding has a gradient of zero."""
        generator = torch.Generator().manual_seed(1000 + step)
        table = torch.randn(self._total, generator=generator)
        table[:_FIRST] = 0.0
        return table

    def read(self, values: Tensor) -> Tensor:
        """The numbers that the values are."""
        found = values.detach().reshape(-1).to(torch.float64)
        if not torch.equal(found, found.round()) or (found.numel() and not 0 <= float(found.max()) < self._total):
            raise AssertionError(f"{found.tolist()}: not numbers of elements: the wrapper has changed them")
        return found.long()

    def names_of(self, numbers: Tensor) -> set[str]:
        """The parameters that these elements are of."""
        stop = {name: self.start[name] + param.numel() for name, param in self.model.named_parameters()}
        return {name for name, start in self.start.items() if bool(((numbers >= start) & (numbers < stop[name])).any())}


def local_of(param: Tensor) -> Tensor:
    """This rank's part of a live parameter or a state value."""
    return param.to_local() if isinstance(param, DTensor) else param


def like(local: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the live parameter's gradient, or its state value."""
    if isinstance(param, DTensor):
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return local


def steps_local_parts(optim: Any) -> bool:
    """Whether `step_local_parts` can take the place of `optim.step()`, and there is a DTensor that makes it worth while."""
    options = ("foreach", "fused", "capturable", "differentiable")
    return (
        type(optim) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        and all(not group.get(option) for group in optim.param_groups for option in options)
        and any(isinstance(param, DTensor) for group in optim.param_groups for param in group["params"])
    )


def step_local_parts(optim: torch.optim.Optimizer) -> None:
    """What `optim.step()` does to DTensors where every element is stepped by itself, without torch's dispatch of DTensors.

    That dispatch takes more time than everything else that most tests do. `StepTest` in test_torch_optimizers.py compares both.
    """
    twin = object.__new__(type(optim))
    twin.__dict__.update(optim.__dict__)
    twin.state, local_of_param = collections.defaultdict(dict), {}
    for group in optim.param_groups:
        for param in group["params"]:
            local = local_of_param[param] = local_of(param).detach()
            local.grad = None if param.grad is None else local_of(param.grad)
            if param in optim.state:
                twin.state[local] = {name: local_of(value) for name, value in optim.state[param].items()}
    twin.param_groups = [
        {**group, "params": [local_of_param[param] for param in group["params"]]} for group in optim.param_groups
    ]
    twin.step()
    for param, local in local_of_param.items():
        if local in twin.state:
            optim.state[param] = {
                name: like(value, param) if name != "step" and isinstance(value, Tensor) else value
                for name, value in twin.state[local].items()
            }


_FSDP1_PART = "_fsdp_wrapped_module."


class Trained:
    """A wrapped model and an optimizer that this module has stepped. Never enters `forward`.

    `wrap` gets the unwrapped model and returns the wrapped one; `prepare` (frozen parameters, dtypes) comes before it, and
    also before the oracle's training. `by_torch`: DTensors are stepped by torch itself, not by `step_local_parts`.
    """

    def __init__(
        self,
        wrap: str | Callable[[nn.Module], Any],
        make: Any = adam,
        steps: int = STEPS,
        model: Callable[[], nn.Module] = Net,
        prepare: Callable[[nn.Module], Any] | None = None,
        unused: Collection[str] = (),
        by_torch: bool = False,
    ) -> None:
        unwrapped = model()
        if prepare is not None:
            prepare(unwrapped)
        self.by_torch = by_torch
        self.numbers = Numbers(unwrapped)
        self.numbers.give(unwrapped)
        wrapper = WRAPPERS[wrap] if isinstance(wrap, str) else wrap
        self.adopt(wrapper(unwrapped), make)
        self.process_group = dist.group.WORLD if wrap == "plain" and dist.is_initialized() else None
        self.step(range(steps), unused)

    by_torch = False

    def adopt(self, model: Any, make: Any) -> None:
        """Take a wrapped model whose values are still `self.numbers`."""
        self.model: Any = model
        self.params: list[nn.Parameter] = list(model.parameters())
        self.index = [self.numbers.read(local_of(param)) for param in self.params]
        empty = {name for name, param in self.numbers.model.named_parameters() if not param.numel()}
        # Torch FSDP1 gives a rank no gradient for an original parameter whose elements other ranks hold.
        self.gets_gradient = [
            bool(param.numel()) or _FSDP1_PART not in name or name.replace(_FSDP1_PART, "") in empty
            for name, param in model.named_parameters()
        ]
        self._make = make
        self.optim: Any = _make(make, model)
        self.process_group: dist.ProcessGroup | None = None

    def step(self, steps: Collection[int], unused: Collection[str] = ()) -> None:
        """`unused`: names of parameters; live parameters with elements of them, on any rank, get no gradient."""
        without = self._positions_of(unused) if unused else set()
        for number in steps:
            table = self.numbers.gradients(number)
            for position, (param, index) in enumerate(zip(self.params, self.index, strict=True)):
                if param.requires_grad and position not in without and self.gets_gradient[position]:
                    param.grad = like(table[index].reshape(local_of(param).shape).to(param.dtype), param)
                else:
                    param.grad = None
            for optim in _each(self.optim):
                if self.by_torch or not steps_local_parts(optim):
                    optim.step()
                else:
                    step_local_parts(optim)

    def _positions_of(self, names: Collection[str]) -> set[int]:
        """Of the live parameters that have elements of these parameters on some rank."""
        mine = {i for i, index in enumerate(self.index) if self.numbers.names_of(index) & set(names)}
        everyones: list[set[int]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, mine)
        return set().union(*everyones)

    def forget_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def gather(self, recipient_rank: int | None = 0, key_by: Any = "id", **kwargs: Any) -> Any:
        kwargs.setdefault("process_group", self.process_group)
        return fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, recipient_rank, key_by, **kwargs)

    def shard(self, full: Any, **kwargs: Any) -> Any:
        return fsdp_optim.get_shard_from_optim_state_dict(self.model, self.optim, full, **kwargs)

    def scatter(self, full: Any, source_rank: int = 0, **kwargs: Any) -> Any:
        kwargs.setdefault("process_group", self.process_group)
        given = full if dist.get_rank() == source_rank else None
        return fsdp_optim.scatter_full_optim_state_dict(self.model, self.optim, given, source_rank, **kwargs)

    def load(self, full: Any) -> None:
        fsdp_optim.load_optim_state_dict(self.optim, self.shard(full))

    def fresh_optimizer(self) -> None:
        """Forget all state: a new optimizer, as after a restart."""
        self.forget_gradients()
        self.optim = _make(self._make, self.model)


class OfModel:
    """Makes an optimizer, or a list of them, of the whole model instead of its parameters()."""

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self.of_model = make


def _make(make: Any, model: nn.Module) -> Any:
    return make.of_model(model) if hasattr(make, "of_model") else make(model.parameters())


def _each(optim: Any) -> list[Optim]:
    return list(optim) if isinstance(optim, (list, tuple)) else [optim]


class Oracle:
    """The same training of the unwrapped model."""

    def __init__(
        self,
        make: Any = adam,
        steps: int = STEPS,
        model: Callable[[], nn.Module] = Net,
        prepare: Callable[[nn.Module], Any] | None = None,
        unused: Collection[str] = (),
    ) -> None:
        self.model = model()
        if prepare is not None:
            prepare(self.model)
        self.numbers = Numbers(self.model)
        self.numbers.give(self.model)
        self.optim: Any = _make(make, self.model)
        self.step(range(steps), unused)

    def step(self, steps: Collection[int], unused: Collection[str] = ()) -> None:
        for number in steps:
            table = self.numbers.gradients(number)
            for name, param in self.model.named_parameters():
                numbers = table[self.numbers.start[name] :][: param.numel()].reshape(param.shape)
                param.grad = numbers.to(param.dtype) if param.requires_grad and name not in unused else None
            for optim in _each(self.optim):
                optim.step()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def full(self) -> dict[str, Any]:
        """What a gather by id has to give: the optimizer's own dict, and names."""
        own = copy.deepcopy(self.optim.state_dict())
        name_of = {id(param): name for name, param in self.model.named_parameters()}
        for packed, group in zip(own["param_groups"], self.optim.param_groups, strict=True):
            packed["param_names"] = [name_of[id(param)] for param in group["params"]]
        return own

    def by_name(self) -> dict[str, dict[str, Any]]:
        """{name: state} of the parameters that have state."""
        states = {id(p): s for optim in _each(self.optim) for p, s in optim.state.items()}
        return {name: dict(states[id(p)]) for name, p in self.model.named_parameters() if states.get(id(p))}


# ------------------------------------------------------------------------------------------ comparing


class Differs(AssertionError):
    """Two things that should be the same are not."""


def differences(got: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Every difference of types, shapes, dtypes, keys, order of keys, and bits."""
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape) or isinstance(got, DTensor):
            kind = type(got).__name__
            yield f"{where}: {kind} {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        elif not torch.equal(_bytes(got), _bytes(wanted)):
            wrong = (_bytes(got) != _bytes(wanted)).reshape(-1, got.element_size()).any(1).nonzero().flatten()
            a, b = got.reshape(-1)[wrong[:4]].tolist(), wanted.reshape(-1)[wrong[:4]].tolist()
            yield f"{where}: {len(wrong)} of {got.numel()} elements, at {wrong[:4].tolist()}: {a}, not {b}"
    elif isinstance(got, Mapping) and isinstance(wanted, Mapping):
        if list(got) != list(wanted):
            yield f"{where}: keys {list(got)}, not {list(wanted)}"
        for key in wanted:
            if key in got:
                yield from differences(got[key], wanted[key], f"{where}[{key!r}]")
    elif type(got) is not type(wanted):
        yield f"{where}: {got!r} ({type(got).__name__}), not {wanted!r} ({type(wanted).__name__})"
    elif dataclasses.is_dataclass(wanted):
        yield from differences(vars(got), vars(wanted), where)
    elif isinstance(wanted, (list, tuple)) and len(got) == len(wanted):
        for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
            yield from differences(one, other, f"{where}[{place}]")
    elif got != wanted:
        yield f"{where}: {got!r}, not {wanted!r}"


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def check_same(what: str, got: Any, wanted: Any) -> None:
    """Raise, and say where, unless two values are the same to the bit."""
    found = list(differences(got, wanted))
    if found:
        shown = "\n  ".join(found[:10])
        raise Differs(f"{what}: {len(found)} differences:\n  {shown}")


def check_full(what: str, full: Any, wanted: Mapping[str, Any]) -> None:
    """Raise unless a gathered dict is what the oracle has: `Oracle.full()`, by id."""
    if full is None:
        raise Differs(f"{what}: None")
    names = [group["param_names"] for group in full["param_groups"]]
    check_same(f"{what}, param_names", names, [group["param_names"] for group in wanted["param_groups"]])
    name_of = {i: n for g in full["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    found, right = (
        {name_of.get(i, i): values for i, values in d["state"].items()} for d in (full, wanted)
    )  # by name, because that says more
    check_same(f"{what}, state", found, right)
    check_same(f"{what}, state by id", list(full["state"]), list(wanted["state"]))
    groups = [{key: group[key] for key in sorted(group)} for group in full["param_groups"]]
    check_same(f"{what}, groups", groups, [{k: group[k] for k in sorted(group)} for group in wanted["param_groups"]])


def check_named(what: str, full: Any, wanted: Mapping[str, Any]) -> None:
    """Raise unless a gathered dict by name has the state of `Oracle.by_name()`."""
    if full is None:
        raise Differs(f"{what}: None")
    check_same(what, full["state"], wanted)


def snapshot(trained: Trained) -> dict[str, Any]:
    """Everything that a call must not change: state and groups with identities, parameters and gradients."""
    return {
        "optim": [_detached(optim.state_dict()) for optim in _each(trained.optim)],
        "identities": [
            (id(param), name, id(value))
            for optim in _each(trained.optim)
            for param, values in optim.state.items()
            for name, value in values.items()
        ],
        "groups": [id(group) for optim in _each(trained.optim) for group in optim.param_groups],
        "values": [local_of(param).detach().clone() for param in trained.params],
        "gradients": [None if p.grad is None else local_of(p.grad).clone() for p in trained.params],
        "gradient identities": [id(param.grad) for param in trained.params],
        "names": [name for name, _ in trained.model.named_parameters()],
        "live": [id(param) for param in trained.model.parameters()],
        "modes": [module.training for module in trained.model.modules()],
        "random": torch.get_rng_state(),
    }


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_of(value).detach().clone()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detached(item) for item in value]
    return copy.deepcopy(value)


def check_trip(
    wrap: str | Callable[[nn.Module], Any],
    make: Any = adam,
    model: Callable[[], nn.Module] = Net,
    prepare: Callable[[nn.Module], Any] | None = None,
    before_calls: Callable[[Trained], Any] | None = None,
    ranks: Sequence[int] | None = None,
    unused: Collection[str] = (),
    oracle_make: Any = None,
    key_by: Any = "id",
    by_torch: bool = False,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """On all `ranks` of a model (None: the world): every verb on one wrapping, compared with the oracle.

    `before_calls` gets every trained wrapping before anything is asked of the library (a forward pass, say).
    `unused`: parameters that never get a gradient. `oracle_make`: the optimizer whose full dict is wanted, where it is not
    what `make` makes. `key_by`: "name" where no order of ids is known. `kwargs` go to the collective verbs. Returns the first
    rank's full dict.
    """
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    rank, first, last = dist.get_rank(), ranks[0], ranks[-1]
    plain_make = oracle_make or make
    oracle, further = (Oracle(plain_make, steps, model, prepare, unused) for steps in (STEPS, STEPS + 2))
    trained, target = (Trained(wrap, make, steps, model, prepare, unused, by_torch) for steps in (STEPS, 0))
    if trained.process_group is not None:
        kwargs.setdefault("process_group", trained.process_group)
    for one in (trained, target) if before_calls is not None else ():
        before_calls(one)
    before = snapshot(trained)
    full = trained.gather(None, key_by, **kwargs)
    named = trained.gather(last, "name", **kwargs)
    listed = dict(fsdp_optim.iter_full_optim_state(trained.model, trained.optim, last, **kwargs))
    check_same("the model and the optimizer, after gathering", snapshot(trained), before)

    untouched = snapshot(target)
    kept = copy.deepcopy((full, named))
    shard = target.shard(full)
    scattered = target.scatter(named, last, **kwargs)
    check_same("the model and the optimizer, after shard and scatter", snapshot(target), untouched)
    check_same("the full dicts, after shard and scatter", (full, named), kept)
    check_same("scatter's from names and get_shard's from ids", _detached(scattered), _detached(shard))
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    with torch.no_grad():  # some optimizers' state depends on the parameters
        for param, source in zip(target.params, trained.params, strict=True):
            local_of(param).copy_(local_of(source))
    target.step(range(STEPS, STEPS + 2), unused)
    again = target.gather(last, key_by, **kwargs)

    def check(what: str, full: Any, wanted: Oracle) -> None:
        if key_by == "id":
            check_full(what, full, wanted.full())
        else:
            check_named(what, {"state": dict(sorted(full["state"].items()))}, dict(sorted(wanted.by_name().items())))

    check(f"rank {rank}, gathered to all", full, oracle)
    if rank != last and named is not None:
        raise Differs(f"rank {rank} got a {type(named).__name__}, but recipient_rank was {last}")
    wanted = oracle.by_name()
    order = oracle.names if key_by == "id" else list(full["param_groups"][0]["params"])
    if list(listed) != order:
        raise Differs(f"iter_full_optim_state names {list(listed)}, not {order}")
    if rank == last:
        check_named("gathered by name", named, {name: wanted[name] for name in order if name in wanted})
        check_same("iterated", {name: s for name, s in listed.items() if s}, named["state"])
        check("loaded, trained on, gathered again", again, further)
    return full if rank == first else None


@contextlib.contextmanager
def cpu() -> Iterator[None]:
    """fairscale runs without a GPU inside."""
    with fairscale_on_cpu():
        yield


def error_text(call: Callable[[], Any]) -> tuple[str, str]:
    """(class, message) of what a call raises; ("", "") if it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def check_refused(what: str, errors: Sequence[tuple[str, str]], kind: str, *words: str) -> None:
    """Raise unless all ranks had one and the same error, of one class, with all these words."""
    told = "\n".join(f"  rank {rank}: {name or 'no error'}: {text}" for rank, (name, text) in enumerate(errors))
    if {name for name, _ in errors} != {kind}:
        raise Differs(f"{what}: not {kind} on all ranks:\n{told}")
    if len({text for _, text in errors}) != 1:
        raise Differs(f"{what}: not the same words on all ranks:\n{told}")
    lacking = [word for word in words if word not in errors[0][1]]
    if lacking:
        raise Differs(f"{what}: {lacking} not in {errors[0][1]!r}")
