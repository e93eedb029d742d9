"""The optimizer on this rank: which live parameter each of its state entries belongs to. Knows local ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import Shape
from fsdp_optim.state.classes import OptimizerClass
from fsdp_optim.state.full import LOOSE, RESERVED_KEYS
from fsdp_optim.state.kinds import Evidence, Kind, Sight, is_scalar
from fsdp_optim.state.packed import LocalId, packed_ids
from fsdp_optim.state.same import Incomparable, key_of, same
from fsdp_optim.state.supported import check_supported, check_values
from fsdp_optim.state.values import Summary
from fsdp_optim.view import Handle, ModelView, NamedHandle


class OptimizerLike(Protocol):
    """What this library asks of an optimizer: torch.optim's, fairseq's, Accelerate's, DeepSpeed's wrappers have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...


Optimizers = OptimizerLike | Sequence[OptimizerLike]
"""One optimizer, or several over one model: one per parameter, or one per part of the model."""


class _Look(NamedTuple):
    """A state value by itself: whether it is a tensor, a scalar, cut like its parameter, and says itself how it is cut."""

    is_tensor: bool
    is_scalar: bool
    fits: bool
    is_marked: bool

    @classmethod
    def at(cls, value: object, handle: Handle) -> _Look:
        if not isinstance(value, torch.Tensor):
            return _SCALAR if is_scalar(value) else _OBJECT
        return cls(True, value.dim() == 0, handle.is_held(value), handle.is_marked(value))


_SCALAR, _OBJECT = _Look(False, True, False, False), _Look(False, False, False, False)


class _Form(NamedTuple):
    """What can be seen of a parameter's state values by themselves. Those of equal layers have one form.

    `shape`: of the local part; `marks`: its own values say how they are cut.
    """

    shape: Shape
    marks: bool
    looks: tuple[tuple[str, _Look], ...]

    def sights(self) -> Iterator[Sight]:
        """What the values show of what values of their names are."""
        for name, look in self.looks if self.shape else ():
            if look.fits or not look.is_marked:  # a DTensor that is cut in its own way says nothing
                yield Sight(name, self.shape, look.fits, look.is_scalar, look.is_tensor and not look.is_scalar)

    @property
    def is_marked(self) -> bool:
        """Whether there is a state value that is cut as the parameter is and says so."""
        return self.marks and any(look.is_marked and not look.is_scalar for _, look in self.looks)

    @property
    def tells_all(self) -> bool:
        """Whether the kinds of the values follow from it alone; else a value has to say where it is."""
        return not any(look.is_marked and not look.fits for _, look in self.looks)


@dataclass(frozen=True)
class LocalParam:
    """One parameter as the optimizer has it: its id in the optimizer's own dict, its group, its state (None: absent).

    `owner`: where several optimizers are read as one, which of them has it, and its id there.
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
    def form(self) -> _Form:
        """What can be seen of the state values, looked up once."""
        handle = self.named.handle
        looks = [(name, _Look.at(value, handle)) for name, value in (self.state or {}).items()]
        return _Form(handle.local_shape, handle.marks, tuple(looks))

    def summary(self, evidence: Evidence, kinds: Mapping[str, Kind] | None = None) -> Summary | None:
        """What the state consists of. `kinds`: where they are known already, those of its values."""
        if self.state is None:
            return None
        little = self.handle.local_numel < 2 and self.handle.is_cut
        known = self.kinds(evidence) if kinds is None else kinds
        return Summary.of(
            self.state,
            lambda name, value: known[name],
            self.handle.placement_of,
            unsure=(lambda name: evidence.follows(name) is None) if little else None,
        )

    def kinds(self, evidence: Evidence) -> dict[str, Kind]:
        """What the values of this parameter's state are."""
        state = self.state or {}
        return {name: self._kind(name, state[name], look, evidence) for name, look in self.form.looks}

    def _kind(self, name: str, value: object, look: _Look, evidence: Evidence) -> Kind:
        """What a value of this parameter's state is.

        A DTensor says itself how it is cut. Another tensor follows the parameter where it has the shape of its local part,
        and where nothing says that it has it by coincidence.
        """
        if look.is_tensor and look.is_scalar and not self.handle.local_shape:
            return Kind.SCALAR if evidence.says_scalar(name) else Kind.SHARDED
        if look.is_scalar:
            return Kind.SCALAR
        if not isinstance(value, torch.Tensor):
            return Kind.OPAQUE
        if look.is_marked:
            if look.fits:
                return Kind.SHARDED
            return Kind.PLACED if self.handle.placement_of(value) is not None else Kind.OPAQUE
        apart = evidence.follows(name) is False or (evidence.marked and self.handle.marks)
        return Kind.SHARDED if look.fits and not apart else Kind.OPAQUE


@dataclass(frozen=True)
class LocalOptim:
    """An optimizer on this rank, read without changing it.

    Attributes:
        params: its parameters in the order of their local ids; where these are names, as its groups list them.
        groups: each group's hyperparameters, without `params` and `param_names`.
        group_ids, group_param_names: each group's local ids, and its `param_names` where the optimizer has them.
        extra: the other top-level keys of its dict (`loss_scale`); under `LOOSE` its state under keys that are no parameters.
        parts: the optimizers that were read as one, where several were given.
        classes: the class of each group's optimizer; empty where nobody has shown one.
    """

    params: tuple[LocalParam, ...]
    groups: tuple[Mapping[str, Any], ...]
    group_ids: tuple[tuple[LocalId, ...], ...]
    group_param_names: tuple[Sequence[str] | None, ...]
    extra: Mapping[str, Any]
    parts: tuple[LocalOptim, ...] = ()
    classes: tuple[OptimizerClass, ...] = ()

    @property
    def values_by_class(self) -> dict[str, frozenset[str]]:
        """The names of the state values that the parameters have here, by the class of their optimizer."""
        names: dict[str, set[str]] = {}
        for param in self.params:
            if self.classes and param.state is not None:
                names.setdefault(self.classes[param.group_index].name, set()).update(map(str, param.state))
        return {name: frozenset(its) for name, its in names.items()}

    @cached_property
    def evidence(self) -> Evidence:
        """What the values of the parameters that have dimensions are."""
        forms = Counter(param.form for param in self.params)
        sights: Counter[Sight] = Counter()
        for form, number in forms.items():
            for sight in form.sights():
                sights[sight] += number
        return Evidence.of(sights, marked=any(form.is_marked for form in forms))

    @cached_property
    def summaries(self) -> tuple[Summary | None, ...]:
        """What the state of each parameter consists of. Values that look alike are judged once."""
        known: dict[_Form, Mapping[str, Kind]] = {}
        found = []
        for param in self.params:
            kinds = known.get(param.form)
            if kinds is None:
                kinds = param.kinds(self.evidence)
                if param.form.tells_all:
                    known[param.form] = kinds
            found.append(param.summary(self.evidence, kinds))
        return tuple(found)


def read_optimizer(optim: Optimizers, view: ModelView) -> LocalOptim:
    """Match an optimizer's parameters, by identity, with those of the model it was built from.

    Several optimizers over one model (one per parameter, say, stepped in the backward pass) are read as one, in which
    groups of equal hyperparameters are one group.

    Raises WrapperError when model and optimizer do not belong together.
    """
    if isinstance(optim, (list, tuple)):
        if not optim:
            raise WrapperError(
                "optim is an empty list, which has no state: give the optimizers, or None where there is to be none"
            )
        return _as_one([_read(one, view) for one in optim])
    return _read(optim, view)  # type: ignore[arg-type]


def _as_one(parts: list[LocalOptim]) -> LocalOptim:
    groups: dict[tuple[str, str], tuple[OptimizerClass, Mapping[str, Any], list[LocalParam]]] = {}
    seen: set[str] = set()
    for index, part in enumerate(parts):
        for group_index, hyper in enumerate(part.groups):
            of = part.classes[group_index]
            *_, members = groups.setdefault((of.name, _key_of_group(hyper, len(groups))), (of, hyper, []))
            for param in part.params:
                if param.group_index == group_index:
                    if param.named.fqns[0] in seen:
                        raise WrapperError(f"{param.named.fqns[0]} is in two of the {len(parts)} optimizers")
                    seen.add(param.named.fqns[0])
                    members.append(replace(param, owner=(index, param.local_id)))
    params: list[LocalParam] = []
    ids = []
    for group_index, (*_, members) in enumerate(groups.values()):
        first = len(params)
        params += [replace(p, local_id=first + i, group_index=group_index) for i, p in enumerate(members)]
        ids.append(tuple(range(first, len(params))))
    extra: dict[str, Any] = {}
    for part in parts:
        for key, value in part.extra.items():
            if key in extra and not same(extra[key], value):
                raise WrapperError(
                    f"{key} is {extra[key]!r} in one of the {len(parts)} optimizers and {value!r} in another: a full dict has "
                    "one for all; gather them one by one"
                )
            extra[key] = value
    hypers, classes = tuple(hyper for _, hyper, _ in groups.values()), tuple(of for of, *_ in groups.values())
    return LocalOptim(tuple(params), hypers, tuple(ids), (None,) * len(hypers), extra, tuple(parts), classes)


def _key_of_group(hyper: Mapping[str, Any], number: int) -> str:
    """Equal for groups that can be one: those with a hyperparameter that cannot be compared stay apart."""
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
                check_values(named.fqns[0] if named.fqns else f"parameter {place} of group {index}", state)
            _check_master(named, state, optim)
            params.append(LocalParam(local_id, index, named, state, (0, local_id)))
    if all(isinstance(param.local_id, int) for param in params):
        params.sort(key=lambda p: p.local_id)
    loose = _loose(saved["state"], [p.local_id for p in params], view)
    return LocalOptim(
        params=tuple(params),
        groups=tuple({k: v for k, v in group.items() if k not in ("params", "param_names")} for group in packed),
        group_ids=tuple(tuple(group["params"]) for group in packed),
        group_param_names=tuple(group.get("param_names") for group in packed),
        extra={
            **{key: value for key, value in saved.items() if key not in RESERVED_KEYS},
            **({LOOSE: loose} if loose else {}),
        },
        classes=(OptimizerClass.of(optim),) * len(packed),
    )


def _check_master(named: NamedHandle, state: Mapping[str, Any] | None, optim: OptimizerLike) -> None:
    """Refuse a master that is neither in the model nor in the optimizer's own dict: it would not be restored."""
    master = named.handle.master
    if master is not None and master not in (state or {}):
        raise WrapperError(
            f"{named.fqns[0]}: {type(optim).__name__} holds a master of it, and its state_dict() has no {master!r} in the state "
            "of this parameter, so that it would be neither saved nor loaded: it has to be there before the first step too"
        )


def _handle_of(param: torch.Tensor, group_index: int, place: int, view: ModelView) -> NamedHandle:
    named = view.handle_of(param)
    if named is None:
        raise WrapperError(
            f"parameter {place} of group {group_index} (shape {list(param.shape)}) is not in the model: build the "
            "optimizer from the wrapped model's parameters(), and pass that same model"
        )
    return named


def _loose(state: Mapping[Any, Any], ids: Sequence[LocalId], view: ModelView) -> dict[Any, Any]:
    """What torch keeps as it is: the state under keys that are no parameters, as MADGRAD's `k`.

    Raises WrapperError for a key that looks like that of a parameter.
    """
    known = set(ids)
    loose = {key: value for key, value in state.items() if key not in known}
    wrong = [key for key in loose if isinstance(key, int) or key in view.order or any(isinstance(i, str) for i in ids)]
    if wrong:
        raise WrapperError(f"the optimizer's state has ids {sorted(map(str, wrong))} that are in none of its groups")
    return loose


def _state_of(state: Mapping[LocalId, Mapping[str, Any]], local_id: LocalId) -> Mapping[str, Any] | None:
    values = state.get(local_id)
    return values if values else None
