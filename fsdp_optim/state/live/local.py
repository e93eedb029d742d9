"""The optimizer on this rank: its live parameters with their local ids and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import Struct

from fsdp_optim.layout import Shape
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.values.classes import OptimizerClass
from fsdp_optim.state.values.kinds import Evidence, Kind, Observation, is_scalar
from fsdp_optim.state.values.summary import Scalar, Scalars, Summary
from fsdp_optim.view import Handle, NamedHandle


class OptimizerLike(Protocol):
    """The interface of an optimizer that this library needs. torch.optim, fairseq, Accelerate and DeepSpeed have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...


Optimizers = OptimizerLike | Sequence[OptimizerLike]
"""One optimizer, or several over one model: one per parameter, or one per part of the model."""


class OptimizersOfModels(list[OptimizerLike]):
    """The optimizers of several models that are read as one. `models`: for each optimizer the name of its model.

    Its groups, and the other keys of its dict, are not those of another model.
    """

    def __init__(self, by_model: Mapping[str, Optimizers]) -> None:
        super().__init__()
        self.models: list[str] = []
        for model, optim in by_model.items():
            listed = list(optim) if isinstance(optim, (list, tuple)) else [optim]
            self += listed  # type: ignore[arg-type]
            self.models += [model] * len(listed)


class _ValueTraits(NamedTuple):
    """The visible traits of a state value.

    Attributes:
        fits: whether the value is cut like its parameter.
        is_marked: whether the value records its own cut.
    """

    is_tensor: bool
    is_scalar: bool
    fits: bool
    is_marked: bool

    @classmethod
    def at(cls, value: object, handle: Handle) -> _ValueTraits:
        if not isinstance(value, torch.Tensor):
            return _SCALAR if is_scalar(value) else _OBJECT
        return cls(True, value.dim() == 0, handle.is_held(value), handle.is_marked(value))


_SCALAR, _OBJECT = _ValueTraits(False, True, False, False), _ValueTraits(False, False, False, False)


class _StateTraits(NamedTuple):
    """The visible traits of all state values of a parameter. The parameters of equal layers have one form.

    `shape`: the shape of the local part; `marks`: whether the wrapper's own values record how they are cut.
    """

    shape: Shape
    marks: bool
    values: tuple[tuple[str, _ValueTraits], ...]

    def observations(self) -> Iterator[Observation]:
        """Yield the observations that the values give about their names."""
        for name, traits in self.values if self.shape else ():
            if traits.fits or not traits.is_marked:  # a DTensor with a cut of its own is no evidence
                is_tensor = traits.is_tensor and not traits.is_scalar
                yield Observation(name, self.shape, traits.fits, traits.is_scalar, is_tensor)

    @property
    def is_marked(self) -> bool:
        """Whether a state value is cut like the parameter and records that cut."""
        return self.marks and any(traits.is_marked and not traits.is_scalar for _, traits in self.values)

    @property
    def decides_kinds(self) -> bool:
        """Whether the kinds of the values follow from the form alone, without a look at the values' own placements."""
        return not any(traits.is_marked and not traits.fits for _, traits in self.values)


_CPU = torch.device("cpu")


def says_on_cpu(optim: object) -> bool:
    """Return whether an optimizer says, by an attribute `keeps_state_on_cpu`, that it keeps its state on the CPU."""
    return getattr(optim, "keeps_state_on_cpu", False) is True


def is_on_cpu(value: object) -> bool:
    """Return whether a state value is a tensor with dimensions on the CPU."""
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.device.type == "cpu"


class LocalParam(Struct, frozen=True, dict=True):
    """One live parameter of an optimizer: its id in the optimizer's own dict, its group, its state (None: absent).

    `owner`: of several optimizers that are read as one, the index of the parameter's optimizer, and the parameter's id there.
    `offloaded`: whether its optimizer keeps state on the CPU, and not beside the parameters.
    """

    local_id: LocalId
    group_index: int
    named: NamedHandle
    state: Mapping[str, Any] | None
    owner: tuple[int, LocalId] = (0, 0)
    offloaded: bool = False

    def device_of(self, name: str, beside: torch.device | None = None) -> torch.device:
        """Return where a loaded value belongs: on the CPU if its live value, or what state there is, was moved there.

        Else on the parameter's device, where torch's optimizers make their state. `beside`: that device, if the caller knows it.
        """
        if beside is None:
            beside = self.handle.device
        if beside.type == "cpu":
            return beside
        live = (self.state or {}).get(name)
        is_moved = is_on_cpu(live) if isinstance(live, torch.Tensor) and live.dim() else self.offloaded
        return _CPU if is_moved else beside

    @property
    def handle(self) -> Handle:
        return self.named.handle

    @cached_property
    def form(self) -> _StateTraits:
        """The visible traits of the state values, computed once."""
        handle = self.named.handle
        values = [(name, _ValueTraits.at(value, handle)) for name, value in (self.state or {}).items()]
        return _StateTraits(handle.local_shape, handle.marks, tuple(values))

    @property
    def sort(self) -> tuple[object, ...]:
        """A key that is equal only for parameters with values of the same names, traits and dtypes.

        They differ in the contents of scalars and opaque values alone, but for the cuts of marked values that do not fit.
        """
        handle, state = self.named.handle, self.state
        of_handle = handle.sort
        if state is None:
            return of_handle is None, self.form.shape, self.form.marks
        if of_handle is None:
            dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in state.values()]
            return self.form, self.is_little, *dtypes
        return *of_handle, *state, *map(handle.sort_of, state.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the state values that are tensors."""
        values = self.state.values() if self.state is not None else ()
        return tuple(value.dtype for value in values if isinstance(value, torch.Tensor))

    @property
    def is_little(self) -> bool:
        """Whether this rank holds at most one element of a parameter that is cut, so that shapes are weak evidence."""
        return self.handle.local_numel < 2 and self.handle.is_cut

    def summary(
        self,
        evidence: Evidence,
        kinds: Mapping[str, Kind] | None = None,
        scalar: Callable[[object], Scalar] = Scalar.of,
    ) -> Summary | None:
        """Return the summary of the state. `kinds`: the kinds of the values, where they are known; `scalar` reads a scalar."""
        if self.state is None:
            return None
        known = self.kinds(evidence) if kinds is None else kinds
        marked = {name for name, traits in self.form.values if traits.is_marked} if self.is_little else ()
        return Summary.of(
            self.state,
            lambda name, value: known[name],
            self.handle.placement_of,
            # A DTensor says itself how it is cut.
            unsure=(lambda name: evidence.follows(name) is None and name not in marked) if self.is_little else None,
            scalar=scalar,
        )

    def kinds(self, evidence: Evidence) -> dict[str, Kind]:
        """Return the kinds of this parameter's state values."""
        state = self.state or {}
        return {name: self._kind(name, state[name], traits, evidence) for name, traits in self.form.values}

    def _kind(self, name: str, value: object, traits: _ValueTraits, evidence: Evidence) -> Kind:
        """Return the kind of a value of this parameter's state.

        A DTensor records its own cut. Any other tensor follows the parameter if it has the shape of the parameter's local part,
        unless the evidence shows that this is a coincidence.
        """
        if traits.is_tensor and traits.is_scalar and not self.handle.local_shape:
            return Kind.SCALAR if evidence.says_scalar(name) else Kind.SHARDED
        if traits.is_scalar:
            return Kind.SCALAR
        if not isinstance(value, torch.Tensor):
            return Kind.OPAQUE
        if traits.is_marked:
            if traits.fits:
                return Kind.SHARDED
            return Kind.PLACED if self.handle.placement_of(value) is not None else Kind.OPAQUE
        apart = evidence.follows(name) is False or (evidence.marked and self.handle.marks)
        return Kind.SHARDED if traits.fits and not apart else Kind.OPAQUE


@dataclass(frozen=True)
class LocalOptim:
    """An optimizer on this rank, read without changing it.

    Attributes:
        params: the parameters in the order of their local ids; if the ids are names, in the order of the groups.
        groups: each group's hyperparameters, without `params` and `param_names`.
        group_ids, group_param_names: each group's local ids, and its `param_names` where the optimizer has them.
        other_keys: the optimizer's own top-level keys (`loss_scale`), and under `NON_PARAM_STATE` the state that belongs to no
            parameter.
        optimizers: the optimizers that were read as one; empty for a single optimizer.
        classes: the class of each group's optimizer; empty where the call has no optimizer.
        model: of one of `optimizers`, the name of its model if there are several; else empty.
        joined_groups: of each of `optimizers`, by the number of its group the number of the group that it is joined in.
    """

    params: tuple[LocalParam, ...]
    groups: tuple[Mapping[str, Any], ...]
    group_ids: tuple[tuple[LocalId, ...], ...]
    group_param_names: tuple[Sequence[str] | None, ...]
    other_keys: Mapping[str, Any]
    optimizers: tuple[LocalOptim, ...] = ()
    classes: tuple[OptimizerClass, ...] = ()
    model: str = ""
    joined_groups: tuple[tuple[int, ...], ...] = ()

    def joined_key(self, key: str) -> str:
        """Return how one of `other_keys` is called in the dict of all optimizers that are read as one."""
        return f"{self.model}.{key}" if self.model else key

    @property
    def values_by_class(self) -> dict[str, frozenset[str]]:
        """Optimizer class -> names of the state values of the parameters on this rank."""
        names: dict[str, set[str]] = {}
        for param in self.params:
            if self.classes and param.state is not None:
                names.setdefault(self.classes[param.group_index].name, set()).update(map(str, param.state))
        return {name: frozenset(values) for name, values in names.items()}

    @property
    def samples(self) -> Sequence[LocalParam]:
        """One parameter of each sort. The others have values of the same names, traits and dtypes."""
        return self._sorts[0]

    @cached_property
    def _sorts(self) -> tuple[tuple[LocalParam, ...], tuple[int, ...]]:
        """One parameter of each sort, and the number of each parameter's sort."""
        known: dict[tuple[object, ...], int] = {}
        samples, numbers = list[LocalParam](), list[int]()
        for param in self.params:
            sort = param.sort
            number = known.get(sort)
            if number is None:
                number = known[sort] = len(samples)
                samples.append(param)
            numbers.append(number)
        return tuple(samples), tuple(numbers)

    @cached_property
    def evidence(self) -> Evidence:
        """The evidence about the values, from the parameters that have dimensions."""
        samples, numbers = self._sorts
        observations: Counter[Observation] = Counter()
        for number, times in Counter(numbers).items():
            for observation in samples[number].form.observations():
                observations[observation] += times
        return Evidence.of(observations, marked=any(sample.form.is_marked for sample in samples))

    @cached_property
    def summaries(self) -> tuple[Summary | None, ...]:
        """The summary of each parameter's state. Values of one sort are classified once; equal summaries are one object."""
        samples, numbers = self._sorts
        shared: dict[object, Summary | None] = {}
        of_sorts = [self._of_sort(sample) for sample in samples]
        scalars = Scalars(
            param.state[name]
            for param, number in zip(self.params, numbers, strict=True)
            for name in of_sorts[number].scalars
            if param.state is not None
        )
        known: dict[tuple[int, ...], tuple[list[Scalar], Summary | None]] = {}
        summaries = []
        for param, number in zip(self.params, numbers, strict=True):
            state, (kinds, names, is_alike) = param.state, of_sorts[number]
            if not is_alike or state is None:
                summaries.append(_shared(param.summary(self.evidence, kinds, scalars.of), shared))
                continue
            read = [scalars.of(state[name]) for name in names]
            key = number, *map(id, read)  # everything that a summary contains
            summary = known.get(key)
            if summary is None:
                in_turn = partial(_next, iter(read))
                made = _shared(param.summary(self.evidence, kinds, in_turn), shared)
                summary = known[key] = read, made  # the reference keeps the ids unique
            summaries.append(summary[1])
        return tuple(summaries)

    def _of_sort(self, sample: LocalParam) -> _SortKinds:
        """Return what the parameters of one sort have in common."""
        scalars = tuple([name for name, traits in sample.form.values if traits.is_scalar])
        if not sample.form.decides_kinds:
            return _SortKinds(None, scalars, False)
        kinds = sample.kinds(self.evidence)
        is_alike = all(kind in (Kind.SHARDED, Kind.SCALAR) for kind in kinds.values())
        return _SortKinds(kinds, tuple([name for name in kinds if kinds[name] is Kind.SCALAR]), is_alike)


class _SortKinds(NamedTuple):
    """What parameters of one sort have in common.

    Attributes:
        kinds: the kinds of the values; None: they depend on each value.
        scalars: the names of the scalars.
        is_alike: whether the summaries differ in scalars alone.
    """

    kinds: Mapping[str, Kind] | None
    scalars: tuple[str, ...]
    is_alike: bool


def _next(scalars: Iterator[Scalar], _: object) -> Scalar:
    """Return the Scalar of the next value, which has been read already."""
    return next(scalars)


def _shared(summary: Summary | None, shared: dict[object, Summary | None]) -> Summary | None:
    """Return the first summary that is equal, whose NaNs are the same objects."""
    scalar_ids = [id(scalar.value) for _, scalar in summary.scalars] if summary is not None else ()
    return shared.setdefault((summary, *scalar_ids), summary)
