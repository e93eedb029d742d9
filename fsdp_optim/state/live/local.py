"""The optimizer on this rank: its live parameters with their local ids and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import Struct, structs

from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import Shape
from fsdp_optim.state.dicts.full import NON_PARAM_STATE, RESERVED_KEYS
from fsdp_optim.state.dicts.packed import LocalId, packed_ids
from fsdp_optim.state.values.classes import OptimizerClass
from fsdp_optim.state.values.kinds import Evidence, Kind, Observation, is_scalar
from fsdp_optim.state.values.same import Incomparable, key_of, same
from fsdp_optim.state.values.summary import Scalar, Scalars, Summary
from fsdp_optim.state.values.supported import check_supported, check_values, copyable
from fsdp_optim.view import Handle, ModelView, NamedHandle


class OptimizerLike(Protocol):
    """The interface of an optimizer that this library needs. torch.optim, fairseq, Accelerate and DeepSpeed have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...


Optimizers = OptimizerLike | Sequence[OptimizerLike]
"""One optimizer, or several over one model: one per parameter, or one per part of the model."""


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


class LocalParam(Struct, frozen=True, dict=True):
    """One live parameter of an optimizer: its id in the optimizer's own dict, its group, its state (None: absent).

    `owner`: of several optimizers that are read as one, the index of the parameter's optimizer, and the parameter's id there.
    """

    local_id: LocalId
    group_index: int
    named: NamedHandle
    state: Mapping[str, Any] | None
    owner: tuple[int, LocalId] = (0, 0)

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
        return Summary.of(
            self.state,
            lambda name, value: known[name],
            self.handle.placement_of,
            unsure=(lambda name: evidence.follows(name) is None) if self.is_little else None,
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
    """

    params: tuple[LocalParam, ...]
    groups: tuple[Mapping[str, Any], ...]
    group_ids: tuple[tuple[LocalId, ...], ...]
    group_param_names: tuple[Sequence[str] | None, ...]
    other_keys: Mapping[str, Any]
    optimizers: tuple[LocalOptim, ...] = ()
    classes: tuple[OptimizerClass, ...] = ()

    @property
    def values_by_class(self) -> dict[str, frozenset[str]]:
        """Optimizer class -> names of the state values of the parameters on this rank."""
        names: dict[str, set[str]] = {}
        for param in self.params:
            if self.classes and param.state is not None:
                names.setdefault(self.classes[param.group_index].name, set()).update(map(str, param.state))
        return {name: frozenset(values) for name, values in names.items()}

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


def read_optimizer(optim: Optimizers, view: ModelView) -> LocalOptim:
    """Match the parameters of an optimizer, by identity, with the live parameters of a model.

    Several optimizers over one model (for example one per parameter, stepped in the backward pass) are read as one
    optimizer, in which groups of equal hyperparameters are one group.

    Raises WrapperError when the optimizer has parameters that are not in the model.
    """
    if isinstance(optim, (list, tuple)):
        if not optim:
            raise WrapperError(
                "optim is an empty list, which has no state: give the optimizers, or None for a call without optimizer"
            )
        return _as_one([_read(each, view) for each in optim])
    return _read(optim, view)  # type: ignore[arg-type]


def _as_one(optimizers: list[LocalOptim]) -> LocalOptim:
    groups: dict[tuple[str, str], tuple[OptimizerClass, Mapping[str, Any], list[LocalParam]]] = {}
    fqns: set[str] = set()
    for index, optimizer in enumerate(optimizers):
        for group_index, hyper in enumerate(optimizer.groups):
            of = optimizer.classes[group_index]
            *_, members = groups.setdefault((of.name, _key_of_group(hyper, len(groups))), (of, hyper, []))
            for param in optimizer.params:
                if param.group_index == group_index:
                    if param.named.fqns[0] in fqns:
                        raise WrapperError(
                            f"{param.named.fqns[0]} is in two of the {len(optimizers)} optimizers: give each parameter to one"
                        )
                    fqns.add(param.named.fqns[0])
                    members.append(structs.replace(param, owner=(index, param.local_id)))
    params: list[LocalParam] = []
    ids = []
    for group_index, (*_, members) in enumerate(groups.values()):
        first = len(params)
        params += [structs.replace(p, local_id=first + i, group_index=group_index) for i, p in enumerate(members)]
        ids.append(tuple(range(first, len(params))))
    other_keys: dict[str, Any] = {}
    for optimizer in optimizers:
        for key, value in optimizer.other_keys.items():
            if key in other_keys and not same(other_keys[key], value):
                raise WrapperError(
                    f"{key} is {other_keys[key]!r} in one of the {len(optimizers)} optimizers and {value!r} in another: "
                    "a full dict has one value for all of them; gather the optimizers one by one"
                )
            other_keys[key] = value
    hypers, classes = tuple(hyper for _, hyper, _ in groups.values()), tuple(of for of, *_ in groups.values())
    unnamed = (None,) * len(hypers)
    return LocalOptim(tuple(params), hypers, tuple(ids), unnamed, other_keys, tuple(optimizers), classes=classes)


def _key_of_group(hyper: Mapping[str, Any], number: int) -> str:
    """Return a key that is equal for groups that can be merged; groups with an incomparable hyperparameter stay separate."""
    try:
        return key_of(hyper)
    except Incomparable:
        return f"group {number}"


def _read(optim: OptimizerLike, view: ModelView) -> LocalOptim:
    check_supported(optim)
    saved = optim.state_dict()
    missing = {"state", "param_groups"} - set(saved)
    if missing:
        raise WrapperError(f"state_dict() of {type(optim).__name__} has no {' and no '.join(sorted(missing))}")
    live, packed = optim.param_groups, saved["param_groups"]
    if len(live) != len(packed):
        raise WrapperError(
            f"{type(optim).__name__} has {counted_noun(len(live), 'param group')}, its state_dict() has {len(packed)}"
        )
    params: list[LocalParam] = []
    for index, (live_group, packed_group) in enumerate(zip(live, packed, strict=True)):
        if len(live_group["params"]) != len(packed_group["params"]):
            raise WrapperError(
                f"group {index} of {type(optim).__name__} has {counted_noun(len(live_group['params']), 'parameter')}, "
                f"in its state_dict() {len(packed_group['params'])}"
            )
        handles = [_handle_of(param, index, place, view) for place, param in enumerate(live_group["params"])]
        ids = packed_ids(optim, handles, packed_group["params"], index, view)
        for place, (named, local_id) in enumerate(zip(handles, ids, strict=True)):
            state = _state_of(saved["state"], local_id)
            if state is not None:
                name = named.fqns[0] if named.fqns else f"parameter {place} of group {index}"
                check_values(name, state, inner=not named.handle.marks)
            _check_master(named, state, optim)
            params.append(LocalParam(local_id, index, named, state, (0, local_id)))
    if all(isinstance(param.local_id, int) for param in params):
        params.sort(key=lambda p: p.local_id)
    non_param = _non_param_state(saved["state"], [p.local_id for p in params], view)
    return LocalOptim(
        params=tuple(params),
        groups=tuple(_hyperparameters(index, group) for index, group in enumerate(packed)),
        group_ids=tuple(tuple(group["params"]) for group in packed),
        group_param_names=tuple(group.get("param_names") for group in packed),
        other_keys={
            **{key: copyable(f"{key} of state_dict()", saved[key]) for key in saved if key not in RESERVED_KEYS},
            **({NON_PARAM_STATE: copyable("the state of no parameter", non_param)} if non_param else {}),
        },
        classes=(OptimizerClass.of(optim),) * len(packed),
    )


def _hyperparameters(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    kept = (item for item in group.items() if item[0] not in ("params", "param_names"))
    return {key: copyable(f"{key} of param group {index}", value) for key, value in kept}


def _check_master(named: NamedHandle, state: Mapping[str, Any] | None, optim: OptimizerLike) -> None:
    """Refuse a master that is neither in the model nor in the optimizer's own dict, because a load would not restore it."""
    master = named.handle.master
    if master is not None and master not in (state or {}):
        raise WrapperError(
            f"{named.fqns[0]}: {type(optim).__name__} holds a master of this parameter, and its state_dict() has no {master!r} "
            "in the state of this parameter, so the master would be neither saved nor loaded: state_dict() must contain the "
            "master, also before the first step"
        )


def _handle_of(param: torch.Tensor, group_index: int, place: int, view: ModelView) -> NamedHandle:
    named = view.handle_of(param)
    if named is None:
        raise WrapperError(
            f"parameter {place} of group {group_index} (shape {list(param.shape)}) is not in the model: build the "
            "optimizer from the wrapped model's parameters(), and pass that same model"
        )
    return named


def _non_param_state(state: Mapping[Any, Any], ids: Sequence[LocalId], view: ModelView) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, such as MADGRAD's `k`, which torch keeps unchanged.

    Raises WrapperError for a key that looks like the key of a parameter.
    """
    known = set(ids)
    non_param = {key: value for key, value in state.items() if key not in known}
    wrong = [
        key for key in non_param if isinstance(key, int) or key in view.order or any(isinstance(i, str) for i in ids)
    ]
    if wrong:
        raise WrapperError(
            f"the optimizer's state has the ids {sorted(map(str, wrong))}, which are in none of its param groups: remove this "
            "state, or add its parameters to a group"
        )
    return non_param


def _state_of(state: Mapping[LocalId, Mapping[str, Any]], local_id: LocalId) -> Mapping[str, Any] | None:
    values = state.get(local_id)
    return values if values else None
