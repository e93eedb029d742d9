"""What one rank has of the weights, the moments and the gradients, as sums that the ranks add later. No communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from msgspec import Struct, structs
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.contents import TREE, WEIGHT, is_buffer, weights_of
from fsdp_optim.checkpoint.common.printing import PrintEnd, print_of
from fsdp_optim.checkpoint.common.trees import local_of
from fsdp_optim.checkpoint.proof.bounds import MOMENT_OF_STEPS, SECOND_MOMENTS, StepSize, spread_of
from fsdp_optim.checkpoint.proof.observed import evaluated_in, hyperparameters_of, why_ranks_matter
from fsdp_optim.checkpoint.proof.record import Measured
from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.plan import LocalRanges
from fsdp_optim.prints import LocalSums
from fsdp_optim.results.fingerprints import ValueFingerprint
from fsdp_optim.state.live.local import LocalOptim, LocalParam, Optimizers
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.tensors.memory import Budget, dtype_name, flat_slice, ordinary_tensors
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, read_local
from fsdp_optim.verbs.ends import LiveEnd

NUM_PROJECTIONS = 4
_MOST_NUMEL = 1 << 20  # of a second moment at a time
GRADIENT = "gradient"

Key = tuple[str, str]
"""(FQN, name of a value of the optimizer's state); the name is empty for weights, buffers and gradients."""


def measured_of(value: ValueFingerprint) -> Measured:
    """Return a fingerprint as records have it."""
    return Measured(
        bits=f"{value.bits:032x}",
        dtype=value.dtype,
        numel=math.prod(value.shape),
        norm=value.norm,
        num_nonfinite=value.num_nonfinite,
        projections=value.projections,
        has_dims=bool(value.shape),
    )


@dataclass(frozen=True)
class LocalMeasures:
    """The sums over this rank's elements of some values.

    Attributes:
        keys: the values that this rank has elements of, or could have.
        dtypes, shapes: torch's name of the dtype of each, and its unsharded shape.
        owners: of each, the lowest of the ranks that have it together, as this rank knows: those of its part of the mesh. Ranks
            with another owner have a replica. -1: each rank has a part of its own.
        sums: in the order of `keys`.
        own: values that are no elements of a tensor, and that every rank has alike: step counts.
    """

    keys: tuple[Key, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    sums: LocalSums
    own: Mapping[Key, Measured] = field(default_factory=dict)


NO_MEASURES = LocalMeasures((), (), (), (), LocalSums.zeros(0, NUM_PROJECTIONS))


class ModelMarks(Struct, frozen=True):
    """What one rank's model is, besides its elements: parts of `WentIn`, `CameOut` and `StepRecord`."""

    structure: str
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    evaluated: tuple[str, ...]
    aliases: Mapping[str, str]
    depends_on_ranks: str


class ModelMeter:
    """Measures a model and its optimizers on this rank.

    Args:
        group: the ranks of the model. Only its rank, its budget and its plans are used.
        places: the placements of parameters of which an adapter knows this rank's part alone, as all ranks together know them.
    """

    def __init__(
        self,
        model: Model,
        optim: Optimizers | None,
        group: RankGroup,
        options: CallArguments,
        places: Mapping[str, Placement],
    ) -> None:
        self.models = _called(model)
        self.optimizers: tuple[Any, ...] = (
            () if optim is None else tuple(optim) if isinstance(optim, (list, tuple)) else (optim,)
        )
        self._model, self._optim, self._group, self._options, self._places = model, optim, group, options, places

    def reader(self) -> ModelReader:
        """Return a new reader of the model, which may have changed."""
        return ModelReader(self._model, self._group.rank)

    def weights(self) -> LocalMeasures:
        """Return the sums of the parameters and buffers; without buffers where ranks may have different ones."""
        local = weights_of(self.reader(), self._group.ranks, self._options)
        if self._options.on_replica_mismatch != "lowest_rank":
            return self._measured(local)
        params = [param for param in local.optim.params if not is_buffer(param.handle.param)]
        return self._measured(Local(local.view, replace(local.optim, params=tuple(params))))

    def moments(self) -> LocalMeasures:
        """Return the sums of the optimizer's state."""
        return self._measured(self.local_state()) if self._optim is not None else NO_MEASURES

    def gradients(self) -> LocalMeasures:
        """Return the sums of the gradients, as the optimizer finds them."""
        if self._optim is None:
            return NO_MEASURES
        local = self.local_state()
        params = [structs.replace(param, state=_gradient_of(param)) for param in local.optim.params]
        of_gradients = LocalOptim(
            tuple(params), local.optim.groups, local.optim.group_ids, local.optim.group_param_names, {}
        )
        return self._measured(Local(local.view, of_gradients))

    def groups(self) -> tuple[Mapping[str, str], ...]:
        """Return the hyperparameters of the param groups of all optimizers, in their order."""
        return hyperparameters_of([group for optim in self.optimizers for group in optim.param_groups])

    def local_state(self) -> Local:
        """Return the live optimizer on this rank."""
        if self._optim is None:
            raise StateError("this run has no optimizer")
        return read_local(self.reader(), self._optim, self._options, self._group.ranks)

    def _measured(self, local: Local) -> LocalMeasures:
        """Return the sums of the values of one optimizer, or of what is read like one."""
        values, own = list[StateValue](), dict[Key, Measured]()
        evidence = local.optim.evidence
        for param in local.optim.params:
            if param.state is not None and not param.handle.skipped:
                kinds = param.kinds(evidence)
                for name, value in param.state.items():
                    if kinds[name] is Kind.SCALAR:
                        print_of_value = print_of(f"{param.named.fqns[0]}: {name}", value)
                        own.update(
                            dict.fromkeys(((fqn, _name(name)) for fqn in param.named.fqns), measured_of(print_of_value))
                        )
                    elif kinds[name] in (Kind.SHARDED, Kind.PLACED):
                        values += self._values_of(param, name, value, kinds[name])
        sums = self._sums(local, values)
        keys = tuple((value.fqn, _name(value.name)) for value in values)
        dtypes = tuple(dtype_name(value.dtype) for value in values)
        shapes = tuple(value.placement.shape for value in values)
        owner_of: dict[int, int] = {}
        owners = tuple(_owner(value.placement, owner_of) for value in values)
        return LocalMeasures(keys, dtypes, shapes, owners, sums, own)

    def _values_of(self, param: LocalParam, name: str, value: torch.Tensor, kind: Kind) -> Iterator[StateValue]:
        if kind is Kind.PLACED:
            placement = param.handle.placement_of(value)
            if placement is not None:
                yield StateValue(param.named.fqns[0], name, value.dtype, placement)
            return
        for fqn, placement in param.named.placements.items():
            yield StateValue(fqn, name, value.dtype, self._places.get(fqn, placement))

    def trees(self, tensors: Mapping[str, torch.Tensor]) -> LocalMeasures:
        """Return the sums of tensors in trees of `state=`, by key."""
        if not tensors:
            return NO_MEASURES
        return self._measured(local_of(tensors, self._group.rank, self._group.ranks))

    def spreads(self, tolerance: float, gradients: float) -> dict[str, float]:
        """Return FQN -> the square of how far this rank's elements of a weight may be away: see `bounds.py`.

        Where the optimizer has the moment of its own steps, "FQN: momentum_buffer" -> the square for that. `gradients`: the norm
        of all gradients together. Replicas share the square between them.
        """
        squares: dict[str, float] = {}
        local = self.local_state() if self._optim is not None and gradients else None
        for param in local.optim.params if local is not None else ():
            if local is not None:
                group, names = local.optim.groups[param.group_index], local.optim.classes[param.group_index].names
                for key, square in self._spread(param, group, names, tolerance * gradients):
                    squares[key] = squares.get(key, 0.0) + square
        return squares

    def _spread(
        self, param: LocalParam, group: Mapping[str, Any], names: Sequence[str], away: float
    ) -> Iterator[tuple[str, float]]:
        """Yield the squares of one parameter. `away`: the norm of how far its gradient may be away."""
        state = param.state or {}
        second = next((name for name in SECOND_MOMENTS if name in state), None)
        held = param.handle.held(state[second]) if second is not None else None
        is_linear = names[:1] == ("SGD",)
        if held is None and not is_linear:
            return
        step = StepSize.of(group, state)
        ranges = LocalRanges(self._group.rank)
        for fqn, placement in param.named.placements.items():
            start, stop = ranges.of(placement)
            share = 1.0 / max(placement.num_replicas, 1)
            if held is None:
                part = (stop - start) / max(math.prod(placement.shape), 1)
                yield fqn, share * part * step.linear(away) ** 2
                continue
            pieces = (
                flat_slice(held, first, min(first + _MOST_NUMEL, stop)) for first in range(start, stop, _MOST_NUMEL)
            )
            square = share * sum(spread_of(piece, step, away) for piece in pieces)
            yield fqn, square
            if MOMENT_OF_STEPS in state and step.lr:
                yield f"{fqn}: {MOMENT_OF_STEPS}", square / step.lr**2

    def marks(self) -> ModelMarks:
        """Return what the model is besides its elements."""
        reader = self.reader()
        local = weights_of(reader, self._group.ranks, self._options)
        cuts: dict[int, str] = {}
        digest = xxhash.xxh3_128(f"{self._group.ranks} {reader.wrappers}".encode())
        buffers, frozen = list[str](), list[str]()
        for param in local.optim.params:
            handle = param.handle
            digest.update(f"{handle.local_shape} {handle.device.type} {handle.weights_dtype}".encode())
            for fqn, placement in param.named.placements.items():
                cut = cuts.setdefault(id(placement), repr(placement))  # placements live as long as the Handles
                digest.update(f"{fqn} {cut}".encode())
            if is_buffer(handle.param):
                buffers += param.named.fqns
            elif not handle.param.requires_grad:
                frozen += param.named.fqns
        evaluated = [name for model in self.models for name in evaluated_in(model, local.view.wrapper_parts)]
        reason = next((why for model in self.models if (why := why_ranks_matter(model))), "")
        return ModelMarks(
            digest.hexdigest(), tuple(buffers), tuple(frozen), tuple(evaluated), dict(local.view.aliases), reason
        )

    def _sums(self, local: Local, values: Sequence[StateValue]) -> LocalSums:
        """Add up the elements of this rank. Every route is direct, so that `move` sends no messages."""
        group, failure = self._group, Failure()
        budget = Budget(group.bucket_nbytes).share(2, "windows of values that are not contiguous, and rows of them")
        end = PrintEnd(values, group.rank, budget, group.world.plans, NUM_PROJECTIONS)
        with torch.no_grad(), ordinary_tensors():
            move(values, LiveEnd(local), end, group, budget, failure)
        if failure.error is not None:
            raise failure.error
        return end.sums()


def _called(model: Model) -> tuple[nn.Module, ...]:
    """Return the modules whose forward passes a step makes: of several models in one ModuleDict, each."""
    models = (model,) if isinstance(model, nn.Module) else tuple(model)
    return tuple(inner for each in models for inner in (each.values() if isinstance(each, nn.ModuleDict) else (each,)))


def _owner(placement: Placement, known: dict[int, int]) -> int:
    """Return the lowest rank of a placement; -1 where others list their own shards. `known`: by id, for placements that stay."""
    if id(placement) not in known:
        known[id(placement)] = -1 if placement.is_open else min(placement.ranks, default=-1)
    return known[id(placement)]


def _name(name: str) -> str:
    return "" if name in (WEIGHT, GRADIENT, TREE) else str(name)


def _gradient_of(param: LocalParam) -> dict[str, Any] | None:
    gradient = param.handle.param.grad
    return {GRADIENT: gradient} if gradient is not None else None
