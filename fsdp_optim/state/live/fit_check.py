"""The check that a full state fits a model and its optimizer, complete before any shard is made."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Shape
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.values.kinds import Evidence, Kind, is_scalar
from fsdp_optim.state.values.opaque import OpaqueShards
from fsdp_optim.state.values.supported import is_sparse, sparse
from fsdp_optim.tensors.elements import is_usual
from fsdp_optim.tensors.memory import is_plain

_SCALAR = Kind.SCALAR.value
_NO_DIFFERENCE = frozenset({"kept", "live_groups"})


@dataclass(frozen=True)
class Fit:
    """The differences between a full state and a live optimizer.

    Attributes:
        missing: FQNs that only the live optimizer has.
        unexpected: FQNs that only the full state has.
        unmatched_hyperparameters, unmatched_values: the names that only one side has, where the optimizers' classes differ.
        kept: FQN -> names of live state values that stay beside the loaded values.
        begun_anew: FQNs whose live parameter begins without state, because the full state has state of some of its parts alone.
        live_groups: no difference: the FQNs of each group of the live optimizer, on all ranks that have agreed on it.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()
    kept: Mapping[str, frozenset[str]] = field(default_factory=dict)
    begun_anew: tuple[str, ...] = ()
    live_groups: tuple[tuple[str, ...], ...] = ()

    def as_plain(self) -> dict[str, list[str]]:
        """Return the differences as a dict of lists, without empty lists."""
        public = {"missing": "missing_keys", "unexpected": "unexpected_keys"}
        return {
            public.get(name, name): list(names)
            for name, names in vars(self).items()
            if names and name not in _NO_DIFFERENCE
        }


LIVE_GROUPS = (
    "build the optimizer with the saved groups, or give param_groups='live', which finds every parameter by its name and leaves "
    "the optimizer's groups and hyperparameters as they are"
)


def check_fits(
    full: FullState,
    names: Names,
    shapes: Mapping[str, Shape],
    *,
    live: frozenset[str] = frozenset(),
    strict: bool = True,
    others: Collection[str] = (),
    regroup: bool = False,
) -> Fit:
    """Refuse a full state that is not of this model and optimizer, before any shard is made.

    Args:
        live: FQNs that have state in the live optimizer. Such a parameter is missing also if the full state lists it without
            state while other parameters have state: it was frozen or unused when saved, and its live state must not be
            dropped silently.
        strict: also refuse missing and unexpected parameters.
        others: parameters of the full state that only other ranks hold; they do not count as unexpected.
        regroup: several optimizers share the groups of the full state, so the live groups may differ from the saved groups.

    Raises StateError that names the parameter, both numbers and the fix.
    """
    saved = {fqn: index for index, (_, fqns) in enumerate(full.groups) for fqn in fqns}
    unexpected = [fqn for fqn in saved if fqn not in names.known and fqn not in others]
    # A flat parameter counts only if none of its originals has state; originals that disagree are another error.
    known = full.state.keys()
    units = [fqns for fqns in names.units if known.isdisjoint(fqns)] if full.state else []
    without_state = live.intersection(fqn for fqns in units for fqn in fqns)
    missing = [fqn for group in names.groups for fqn in group if fqn not in saved or fqn in without_state]
    if unexpected and strict:
        raise StateError(
            _not_found(unexpected, sorted(names.known), "the full dict has", "the model's optimizer does not")
        )
    if missing and strict and missing[0] in saved:
        raise StateError(
            f"{missing[0]}: the full dict has no state for this parameter (it was frozen or unused when saved), the "
            "optimizer has; load into an optimizer without state to start from scratch, or give strict=False, which keeps "
            "the live state"
        )
    if missing and strict:
        raise StateError(_not_found(missing, list(saved), "the model's optimizer has", "the full dict does not"))
    for fqns in names.units:
        if len(fqns) > 1:
            group_of_unit([fqn for fqn in fqns if strict or fqn in saved], saved)
    if not regroup:
        _check_groups(full, names, saved)
    check_shapes(full, shapes)
    return Fit(tuple(missing), tuple(unexpected), live_groups=names.groups)


def begun_anew(
    full: FullState, fit: Fit, fused: Sequence[tuple[str, ...]], live: frozenset[str]
) -> tuple[FullState, Fit]:
    """Leave out the state of each fused parameter if only some of its parts have state (`strict=False`).

    Args:
        fused: the FQNs of each fused parameter.
        live: FQNs that have state in the live optimizer, which the missing ones of them keep.
    """
    known = full.state.keys() | live.intersection(fit.missing)
    parts = [fqns for fqns in fused if not full.state.keys().isdisjoint(fqns) and not known.issuperset(fqns)]
    anew = {fqn: None for fqns in parts for fqn in fqns}
    if not anew:
        return full, fit
    state = {fqn: values for fqn, values in full.state.items() if fqn not in anew}
    missing = tuple(fqn for fqn in fit.missing if fqn not in anew)
    return replace(full, state=state), replace(fit, missing=missing, begun_anew=tuple(anew))


def group_of_unit(fqns: Sequence[str], group_of: Mapping[str, int]) -> int | None:
    """Return the saved group of a live parameter, which all its originals have in common.

    Raises StateError for a flat parameter whose originals are in two groups.
    """
    groups = [group_of.get(fqn) for fqn in fqns]
    for fqn, group in zip(fqns, groups, strict=True):
        if group != groups[0]:
            first, other = (f"group {g}" if g is not None else "no group" for g in (groups[0], group))
            raise StateError(
                f"{fqns[0]} is in {first} of the full dict and {fqn} is in {other}, and both lie in one flat or fused parameter "
                "of this model, which can be in one group only: give param_groups='live', which leaves the live groups as they "
                "are, or wrap the two in different units, or without flattening"
            )
    return groups[0] if groups else None


def _check_groups(full: FullState, names: Names, saved: Mapping[str, int]) -> None:
    if len(full.groups) != len(names.groups):
        raise StateError(
            f"the full dict has {counted_noun(len(full.groups), 'param group')}, the optimizer has "
            f"{len(names.groups)}: {LIVE_GROUPS}"
        )
    for index, group in enumerate(names.groups):
        for fqn in group:
            if saved.get(fqn, index) != index:
                raise StateError(
                    f"{fqn}: in param group {saved[fqn]} of the full dict, in group {index} of the optimizer: {LIVE_GROUPS}"
                )


def check_shapes(full: FullState, shapes: Mapping[str, Shape]) -> None:
    """Raise StateError for values that should have the shape of their parameter and do not."""
    evidence = full.evidence(shapes)
    fitting: set[tuple[object, ...]] = set()  # of tensors without elements, which parameters share: what was checked
    for fqn, values in full.state.items():
        shape, words = shapes.get(fqn), full.kinds.get(fqn, {})
        for name, value in values.items() if shape is not None else ():
            word = words.get(name)
            if word == _SCALAR and is_usual(value) and not value.dim():
                continue
            key = id(value), word, shape
            if key in fitting or shape is None:
                continue
            if is_sparse(value):
                raise StateError(sparse(fqn, name, value))
            recorded = full.recorded(fqn, name)
            if recorded is None:
                wrong = _is_cut_short(name, value, shape, full.kind_of(fqn, name, value, shape, evidence), evidence)
            else:
                wrong = _is_not(recorded, value, shape)
                fitting.add(key)
            if wrong:
                got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise StateError(
                    f"{fqn}: {name} has shape {got} in the full dict, the parameter has {list(shape)}: the dict is of "
                    "another model, was cut short, or its ids are in another order than the unwrapped model's parameters(): give "
                    "the dict of this model, by name if the order of its ids is in doubt"
                )
    _check_order(full, shapes)


def _check_order(full: FullState, shapes: Mapping[str, Shape]) -> None:
    """Raise StateError where the values of a name have the shapes of parameters, but of other ones than their own.

    Ids that were counted in another order lead there, and nothing else shows it for a name that torch.optim does not have.
    Values may have shapes of their own: Adafactor's rows have those of biases, Shampoo's factors those of square weights,
    and a momentum may be transposed. So the values, all together, must have the shapes of these parameters, or of others
    beside them and then be larger here and smaller there than their own parameter.
    """
    tensors: dict[object, list[tuple[str, Shape, Shape]]] = {}
    for fqn, values in full.state.items():
        shape = shapes.get(fqn)
        if not shape or fqn in full.kinds:
            continue
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and is_plain(value) and value.dim():
                tensors.setdefault(name, []).append((fqn, tuple(value.shape), shape))
    listed = Counter(shapes[fqn] for _, fqns in full.groups for fqn in fqns if fqn in shapes)
    for value_name, seen in tensors.items():
        moved = [(fqn, got, shape) for fqn, got, shape in seen if sorted(got) != sorted(shape)]
        if not moved:
            continue
        stored, own = Counter(got for _, got, _ in seen), Counter(shape for *_, shape in seen)
        is_larger, is_smaller = (
            any(sign * (prod(got) - prod(shape)) > 0 for _, got, shape in moved) for sign in (1, -1)
        )
        if stored == own or (is_larger and is_smaller and stored <= listed):
            fqn, got, shape = moved[0]
            raise StateError(
                f"{fqn}: {value_name} has shape {list(got)} in the full dict, the parameter has {list(shape)}, and all values of "
                "this name have shapes of parameters of the model: the ids of the dict count the parameters in another order: "
                "give the dict by name or, in a conversion, param_names=[...], the FQNs in the order of the ids"
            )


def _is_not(recorded: Kind, value: object, shape: Shape) -> bool:
    """Return whether a value contradicts the kind that the dict records for it."""
    match recorded:
        case Kind.SHARDED:
            return not isinstance(value, torch.Tensor) or tuple(value.shape) != shape
        case Kind.SCALAR:
            return not is_scalar(value)
        case Kind.PLACED:
            return not is_plain(value)
        case Kind.OPAQUE:
            return False


def _is_cut_short(name: str, value: object, shape: Shape, kind: Kind, evidence: Evidence) -> bool:
    """Return whether a value should have the shape of its parameter: by the value's name, except for tensor subclasses."""
    if kind is Kind.SCALAR:
        return value is not None and bool(shape) and evidence.must_follow(name)
    of_own_class = isinstance(value, (torch.Tensor, OpaqueShards)) and not is_plain(value)
    return kind is Kind.OPAQUE and not of_own_class and evidence.must_follow(name)


def _not_found(fqns: list[str], candidates: list[str], has: str, has_not: str) -> str:
    close = difflib.get_close_matches(fqns[0], candidates, n=1)
    hint = f" (it has {close[0]})" if close else ""
    more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
    return (
        f"{fqns[0]}{more}: {has} it, {has_not}{hint}; {counted_noun(len(candidates), 'parameter')} there. "
        "Give the dict of this model, and an optimizer with the parameters of the saved optimizer (frozen layers may differ), or "
        "give strict=False, which loads the parameters that both have and lists the rest"
    )
