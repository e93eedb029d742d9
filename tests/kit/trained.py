"""One small awkward model in each of nine wrappers, trained without a forward pass on one common sequence of gradients.

How a wrapper has cut the model is read from the model itself, not from a formula: every element of the unwrapped model is
given a number of its own as its value, so that after wrapping the values of a live parameter say which elements it has.
Elementwise optimizers then train every wrapping, and the unwrapped model, to the same state, bit for bit.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_optim
from kit.wraps import (
    WRAPPERS,
    Net,
    Optim,
    adam,
)

STEPS = 3

_FIRST = 64  # wrappers fill padding with smaller values


class Numbers:
    """A unique number for every element of an unwrapped model, and gradients by these numbers."""

    least = _FIRST

    def __init__(self, model: nn.Module) -> None:
        self.start: dict[str, int] = {}
        self.numel: dict[str, int] = {}
        self._total = _FIRST
        for name, param in model.named_parameters():
            self.start[name] = self._total
            self.numel[name] = param.numel()
            self._total += param.numel()

    def give(self, model: nn.Module) -> None:
        """Give every element its number as its value."""
        for name, param in model.named_parameters():
            numbers = torch.arange(self.start[name], self.start[name] + param.numel())
            param.data = numbers.reshape(param.shape).to(param.dtype)

    def gradients(self, step: int) -> Tensor:
        """The gradients by number; the gradient of padding is zero."""
        generator = torch.Generator().manual_seed(1000 + step)
        table = torch.randn(self._total, generator=generator)
        table[:_FIRST] = 0.0
        return table

    def read(self, values: Tensor) -> Tensor:
        """The numbers of the elements, from their values."""
        found = values.detach().cpu().reshape(-1).to(torch.float64)
        if not torch.equal(found, found.round()) or (found.numel() and not 0 <= float(found.max()) < self._total):
            raise AssertionError(f"{found.tolist()}: not numbers of elements: the wrapper has changed them")
        return found.long()

    def names_of(self, numbers: Tensor) -> set[str]:
        """The names of the parameters that have these elements."""
        stop = {name: start + self.numel[name] for name, start in self.start.items()}
        return {name for name, start in self.start.items() if bool(((numbers >= start) & (numbers < stop[name])).any())}


def local_of(param: Tensor) -> Tensor:
    """This rank's part of a live parameter or a state value."""
    return access_of(param).local_of(param)


class LocalAccess:
    """Access to this rank's elements of one class of live parameters, and construction of tensors of that class."""

    @staticmethod
    def local_of(param: Tensor) -> Tensor:
        return param

    @staticmethod
    def like(local: Tensor, param: Tensor) -> Tensor:
        return local

    @staticmethod
    def put(local: Tensor, param: Tensor) -> None:
        """Write changes of `local_of` back, if that is a copy."""


class DTensorAccess(LocalAccess):
    @staticmethod
    def local_of(param: Any) -> Tensor:
        return param.to_local()

    @staticmethod
    def like(local: Tensor, param: Any) -> Tensor:
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


LOCAL_ACCESS: list[tuple[Callable[[Tensor], bool], type[LocalAccess]]] = [
    (lambda param: isinstance(param, DTensor), DTensorAccess)
]
"""The classes of live parameters; the first that fits counts, and kit.shards puts others first."""


def access_of(param: Tensor) -> type[LocalAccess]:
    return next((access for fits, access in LOCAL_ACCESS if fits(param)), LocalAccess)


def like(local: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the live parameter's gradient, or its state value."""
    return access_of(param).like(local, param)


def steps_local_parts(optim: Any) -> bool:
    """Whether `LocalSteps` can take the place of `optim.step()`, and there is a DTensor that makes it worth while."""
    options = ("foreach", "fused", "capturable", "differentiable")
    return (
        type(optim) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        and all(not group.get(option) for group in optim.param_groups for option in options)
        and any(access_of(param) is not LocalAccess for group in optim.param_groups for param in group["params"])
    )


class LocalSteps:
    """What `optim.step()` does to DTensors where every element is stepped by itself, without torch's dispatch of DTensors.

    That dispatch takes more time than everything else that most tests do. `StepTest` in test_torch_optimizers.py compares both.
    The optimizer itself has its state again after `finish`.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._twin = object.__new__(type(optim))
        self._twin.__dict__.update(optim.__dict__)
        self._twin.state = collections.defaultdict(dict)
        self._local = {param: local_of(param).detach() for param in params_of(optim)}
        for param, local in self._local.items():
            if param in optim.state:
                self._twin.state[local] = {name: local_of(value) for name, value in optim.state[param].items()}
        self._twin.param_groups = [
            {**group, "params": [self._local[param] for param in group["params"]]} for group in optim.param_groups
        ]

    def step(self, gradients: Mapping[Tensor, Tensor | None]) -> None:
        """`gradients`: local tensors, by live parameter."""
        for param, local in self._local.items():
            local.grad = gradients.get(param)
        self._twin.step()

    def finish(self) -> None:
        """Give the optimizer what its twin has."""
        for param, local in self._local.items():
            access_of(param).put(local, param)
            if local in self._twin.state:
                self._optim.state[param] = {
                    name: like(value, param) if name != "step" and isinstance(value, Tensor) else value
                    for name, value in self._twin.state[local].items()
                }


def params_of(optim: Any) -> list[Tensor]:
    return [param for group in optim.param_groups for param in group["params"]]


_FSDP1_PART = "_fsdp_wrapped_module."


class Trained:
    """A wrapped model and an optimizer that this module has stepped. Never enters `forward`.

    `wrap` gets the unwrapped model and returns the wrapped one; `prepare` (frozen parameters, dtypes) comes before it, and
    also before the oracle's training. `by_torch`: DTensors are stepped by torch itself, not by `LocalSteps`.
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
        empty = {name for name, numel in self.numbers.numel.items() if not numel}
        # Torch FSDP1 gives a rank no gradient for an original parameter whose elements other ranks hold.
        self.gets_gradient = [
            _FSDP1_PART not in name or bool(param.numel()) or name.replace(_FSDP1_PART, "") in empty
            for name, param in model.named_parameters()
        ]
        self._make = make
        self.optim: Any = _make(make, model)
        self.process_group: dist.ProcessGroup | None = None

    def step(self, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        """`unused`: names of parameters; live parameters with elements of them, on any rank, get no gradient."""
        without = self._positions_of(unused) if unused else set()
        quick = [LocalSteps(optim) for optim in each_of(self.optim) if not self.by_torch and steps_local_parts(optim)]
        by_torch = [optim for optim in each_of(self.optim) if self.by_torch or not steps_local_parts(optim)]
        locals_ = [local_of(param) for param in self.params]
        gradients: dict[Tensor, Tensor | None] = {}
        for number in steps:
            table = self.numbers.gradients(number)
            for position, (param, index) in enumerate(zip(self.params, self.index, strict=True)):
                trains = param.requires_grad and position not in without and self.gets_gradient[position]
                local = locals_[position]
                gradients[param] = table[index].reshape(local.shape).to(local.device, param.dtype) if trains else None
            for one in quick:
                one.step(gradients)
            if by_torch or number == steps[-1]:
                for param, gradient in gradients.items():
                    param.grad = None if gradient is None else like(gradient, param)
            for optim in by_torch:
                optim.step()
        for one in quick:
            one.finish()

    def _positions_of(self, names: Collection[str]) -> set[int]:
        """The live parameters that have elements of these parameters on some rank."""
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfModel) and self.of_model == other.of_model

    def __hash__(self) -> int:
        return hash(self.of_model)


def _make(make: Any, model: nn.Module) -> Any:
    return make.of_model(model) if hasattr(make, "of_model") else make(model.parameters())


def each_of(optim: Any) -> list[Optim]:
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
            for optim in each_of(self.optim):
                optim.step()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def full(self) -> dict[str, Any]:
        """The expected result of a gather by id: the optimizer's own dict, with names."""
        own = copy.deepcopy(self.optim.state_dict())
        name_of = {id(param): name for name, param in self.model.named_parameters()}
        for packed, group in zip(own["param_groups"], self.optim.param_groups, strict=True):
            packed["param_names"] = [name_of[id(param)] for param in group["params"]]
        return own

    def by_name(self) -> dict[str, dict[str, Any]]:
        """{name: state} of the parameters that have state."""
        states = {id(p): s for optim in each_of(self.optim) for p, s in optim.state.items()}
        return {name: dict(states[id(p)]) for name, p in self.model.named_parameters() if states.get(id(p))}


def known_oracle(
    make: Any,
    steps: int,
    model: Callable[[], nn.Module] = Net,
    prepare: Callable[[nn.Module], Any] | None = None,
    unused: Collection[str] = (),
) -> Oracle:
    """An oracle that is only looked at: training without a wrapper is the same in every world of this process."""
    return _known_oracle(make, steps, model, prepare, tuple(unused), torch.get_default_dtype())


@functools.lru_cache(maxsize=32)
def _known_oracle(make: Any, steps: int, model: Any, prepare: Any, unused: Any, dtype: torch.dtype) -> Oracle:
    return Oracle(make, steps, model, prepare, unused)
