"""One small awkward model in each of nine wrappers, trained without a forward pass on one common sequence of gradients.

How a wrapper has cut the model is read from the model itself, not from a formula: every element of the unwrapped model is
given a number of its own as its value, so that after wrapping the values of a live parameter say which elements it has.
Elementwise optimizers then train every wrapping, and the unwrapped model, to the same state, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.verbs.sharded_dict import is_sharded
from kit.elements import Numbers
from kit.local_parts import LocalSteps, access_of, like, local_of, steps_local_parts
from kit.models import Net
from kit.optimizers import adam, each_of, make_optimizer
from kit.options import as_options
from kit.wraps import WRAPPERS

STEPS = 3

_FSDP1_PART = "_fsdp_wrapped_module."


def take_steps(
    optims: Any,
    steps: Sequence[int],
    numbers: Numbers,
    parts: Iterable[tuple[Tensor, Tensor, bool]],
    by_torch: bool = False,
) -> None:
    """Step an optimizer, or each one of a list.

    `parts`: live parameters, the numbers of the elements that this rank has of each, and whether it gets a gradient. All other
    arguments are as for `Trained`.
    """
    own = [(param, local_of(param), index, trains and param.requires_grad) for param, index, trains in parts]
    quick = [LocalSteps(optim) for optim in each_of(optims) if not by_torch and steps_local_parts(optim)]
    others = [optim for optim in each_of(optims) if by_torch or not steps_local_parts(optim)]
    gradients: dict[Tensor, Tensor | None] = {}
    for number in steps:
        table = numbers.gradients(number)
        for param, local, index, trains in own:
            gradients[param] = table[index].reshape(local.shape).to(local.device, param.dtype) if trains else None
        for local_steps in quick:
            local_steps.step(gradients)
        if others or number == steps[-1]:
            for param, gradient in gradients.items():
                param.grad = None if gradient is None else like(gradient, param)
        for optim in others:
            optim.step()
    for local_steps in quick:
        local_steps.finish()


class Trained:
    """A wrapped model and an optimizer that this module has stepped. Never enters `forward`.

    `wrap` gets the unwrapped model and returns the wrapped one; `prepare` (frozen parameters, dtypes) comes before it, and
    also before the oracle's training. `by_torch`: DTensors are stepped by torch itself, not by `LocalSteps`. `values`: whole
    values of the parameters before the first step; without them, these are the elements' numbers.
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
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        unwrapped = model()
        if prepare is not None:
            prepare(unwrapped)
        self.by_torch = by_torch
        self.numbers = self.numbers_of(unwrapped)
        self.numbers.give(unwrapped)
        wrapper = WRAPPERS[wrap] if isinstance(wrap, str) else wrap
        self.adopt(wrapper(unwrapped), make)
        if values is not None:
            self.put(values)
        self.process_group = dist.group.WORLD if wrap == "plain" and dist.is_initialized() else None
        self.step(range(steps), unused)

    by_torch = False
    numbers_of: Callable[[nn.Module], Numbers] = Numbers

    def adopt(self, model: Any, make: Any) -> None:
        """Take a wrapped model whose values are still `self.numbers`."""
        self.model: Any = model
        self.params: list[nn.Parameter] = list(model.parameters())
        self.index = [self.numbers.read(local_of(param)) for param in self.params]
        empty = {name for name, numel in self.numbers.numel.items() if not numel}
        # Torch FSDP1 gives a rank no gradient for an original parameter whose elements other ranks hold.
        self.gets_gradient = [
            not getattr(param, "without_gradient", False)
            and (_FSDP1_PART not in name or bool(param.numel()) or name.replace(_FSDP1_PART, "") in empty)
            for name, param in model.named_parameters()
        ]
        self._make = make
        self.optim: Any = make_optimizer(make, model)
        self.process_group: dist.ProcessGroup | None = None

    def part_of(self, position: int, values: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of whole values by name, cut and padded as a live parameter; the padding is zero."""
        index = self.index[position]
        return self.numbers.table(values)[index].reshape(local_of(self.params[position]).shape)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Give the parameters other values, whole ones by name."""
        with torch.no_grad():
            for position, param in enumerate(self.params):
                local = local_of(param)
                local.copy_(self.part_of(position, values))
                access_of(param).put(local, param)

    def step(self, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        """`unused`: names of parameters; live parameters with elements of them, on any rank, get no gradient."""
        without = self._positions_of(unused) if unused else set()
        parts = [
            (param, index, trains and position not in without)
            for position, (param, index, trains) in enumerate(
                zip(self.params, self.index, self.gets_gradient, strict=True)
            )
        ]
        take_steps(self.optim, steps, self.numbers, parts, self.by_torch)

    def _positions_of(self, names: Collection[str]) -> set[int]:
        """The live parameters that have elements of these parameters on some rank."""
        positions = {i for i, index in enumerate(self.index) if self.numbers.names_of(index) & set(names)}
        of_all_ranks: list[set[int]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_all_ranks, positions)
        return set().union(*of_all_ranks)

    def forget_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def gather(self, recipient_rank: int | None = 0, key_by: Any = "id", **kwargs: Any) -> Any:
        kwargs.setdefault("process_group", self.process_group)
        door: Any = importlib.import_module("fsdp_optim.fairscale") if "collect" in kwargs else fsdp_optim
        return door.gather_full_optim_state_dict(
            self.model, self.optim, recipient_rank, key_by, **as_options(fsdp_optim.CallOptions, **kwargs)
        )

    def gather_model(self) -> dict[str, Any]:
        """The whole model dict, on every rank."""
        options = fsdp_optim.CallOptions(process_group=self.process_group)
        return fsdp_optim.gather_full_model_state_dict(self.model, None, options=options) or {}

    def shard(self, full: Any, **kwargs: Any) -> Any:
        """This rank's part, by the call that does not need the other ranks where these are not needed."""
        needs_others = isinstance(self.model, list) or is_sharded(full)
        call: Any = fsdp_optim.reshard_optim_state_dict if needs_others else fsdp_optim.get_shard_from_optim_state_dict
        return call(self.model, self.optim, full, **as_options(fsdp_optim.CallOptions, **kwargs))

    def scatter(self, full: Any, source_rank: int = 0, **kwargs: Any) -> Any:
        kwargs.setdefault("process_group", self.process_group)
        given = full if dist.get_rank() == source_rank else None
        return fsdp_optim.scatter_full_optim_state_dict(
            self.model, self.optim, given, source_rank, **as_options(fsdp_optim.CallOptions, **kwargs)
        )

    def load(self, full: Any) -> None:
        fsdp_optim.load_optim_state_dict(self.optim, self.shard(full))

    def fresh_optimizer(self) -> None:
        """Forget all state: a new optimizer, as after a restart."""
        self.forget_gradients()
        self.optim = make_optimizer(self._make, self.model)


class Oracle:
    """The same training of the unwrapped model."""

    def __init__(
        self,
        make: Any = adam,
        steps: int = STEPS,
        model: Callable[[], nn.Module] = Net,
        prepare: Callable[[nn.Module], Any] | None = None,
        unused: Collection[str] = (),
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model()
        if prepare is not None:
            prepare(self.model)
        self.numbers = Numbers(self.model)
        self.numbers.give(self.model)
        for name, value in (values or {}).items():
            self.model.get_parameter(name).data = value.detach().clone()
        self.optim: Any = make_optimizer(make, self.model)
        self.step(range(steps), unused)

    def step(self, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        parts = [(p, self.numbers.of(name), name not in unused) for name, p in self.model.named_parameters()]
        take_steps(self.optim, steps, self.numbers, parts)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def values(self) -> dict[str, Tensor]:
        """The values of the parameters, by name."""
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def full(self) -> dict[str, Any]:
        """The expected result of a gather by id: a copy of the optimizer's own dict, with names."""
        return copy.deepcopy(self.own_dict())

    def own_dict(self) -> dict[str, Any]:
        """The same with the tensors of the optimizer itself."""
        own = self.optim.state_dict()
        name_of = {id(param): name for name, param in self.model.named_parameters()}
        for packed, group in zip(own["param_groups"], self.optim.param_groups, strict=True):
            packed["param_names"] = [name_of[id(param)] for param in group["params"]]
        return own

    def by_name(self) -> dict[str, dict[str, Any]]:
        """{name: state} of the parameters that have state."""
        return state_by_name(self.model, self.optim)


def state_by_name(model: nn.Module, optims: Any) -> dict[str, dict[str, Any]]:
    """{name: state} of the parameters of an unwrapped model that have state."""
    states = {id(param): state for optim in each_of(optims) for param, state in optim.state.items()}
    return {name: dict(states[id(p)]) for name, p in model.named_parameters() if states.get(id(p))}


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
