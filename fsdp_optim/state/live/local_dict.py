"""This rank's shard of a full state: the summary and memory of each live parameter, and the optimizer's own dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Placement, Shape, Whole
from fsdp_optim.plan import copies_into
from fsdp_optim.state.dicts.full import NON_PARAM_STATE, FullState
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.fit_check import Fit
from fsdp_optim.state.live.fused import check_follows, why_together
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.state.live.saved_groups import hypers_of_each
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.state.values.opaque import OpaqueShards, depends_on_cut, holds_all
from fsdp_optim.state.values.summary import OpaqueType, Scalar, Scalars, Summary
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.dtensors import is_dtensor, local_of
from fsdp_optim.tensors.memory import copy_in_memory, detached_copy, flatten, is_plain, laid_out_like

Summaries = Mapping[str, Summary]
"""FQN -> summary of the state; without entries for parameters without state."""

_SHARDED, _SCALAR = Kind.SHARDED.value, Kind.SCALAR.value


def summarize(full: FullState, shapes: Mapping[str, Shape]) -> dict[str, Summary]:
    """Return the summary of the state of every parameter in a full state."""
    evidence = full.evidence(shapes)
    scalars = Scalars(value for values in full.state.values() for value in values.values())

    def made(fqn: str, values: Mapping[str, Any]) -> Summary:
        return Summary.of(
            values,
            lambda name, value: full.kind_of(fqn, name, value, shapes[fqn], evidence),
            cut=lambda name: full.cut_of(fqn, name),
            scalar=scalars.of,
        )

    shared: dict[object, tuple[object, Summary]] = {}  # beside each summary what keeps the ids in the key unique

    def summary(fqn: str, values: Mapping[str, Any]) -> Summary:
        alike = _alike(values, full.kinds.get(fqn), scalars)
        if alike is None:
            return made(fqn, values)
        key, *kept = alike
        if key not in shared:
            shared[key] = kept, made(fqn, values)
        return shared[key][1]

    return {fqn: summary(fqn, values) for fqn, values in full.state.items() if fqn in shapes}


def _alike(
    values: Mapping[str, Any], words: Mapping[Any, str] | None, scalars: Scalars
) -> tuple[tuple[object, ...], object] | None:
    """Return what values with one summary have in common: their names, kinds, and dtypes or numbers; None where that is more.

    Beside it the numbers, whose ids are in it.
    """
    key: list[object] = []
    numbers = []
    for name, value in values.items():
        word = words.get(name) if words is not None else None
        if word == _SHARDED and isinstance(value, torch.Tensor):
            key += name, value.dtype
        elif word == _SCALAR:
            numbers.append(scalars.of(value))
            key += name, id(numbers[-1])
        else:
            return None
    return tuple(key), numbers


def summary_for(param: LocalParam, summaries: Summaries, missing: frozenset[str], live: LocalOptim) -> Summary | None:
    """Return the summary of one live parameter, which must be equal for all its originals; StateError names two that differ.

    Originals in `missing` keep their state in the live optimizer, whose summary must agree with the other originals' summary.
    """
    if not missing and len(param.named.fqns) == 1:
        summary = summaries.get(param.named.fqns[0])  # nearly always
        if param.named.handle.fused:
            check_follows(param, summary)
        return summary
    kept = param.summary(live.evidence) if missing and not missing.isdisjoint(param.named.fqns) else None
    by_original = [(fqn, kept if fqn in missing else summaries.get(fqn)) for fqn in param.named.fqns]
    for _, each in by_original if param.handle.fused else ():
        check_follows(param, each)
    (first, summary), *others = by_original
    for fqn, other in others:
        _check_equal(first, summary, fqn, other, why_together(param))
    return summary


def _check_equal(first: str, a: Summary | None, other: str, b: Summary | None, why: str) -> None:
    if a is None or b is None:
        if a is not b:
            has, lacks = (first, other) if b is None else (other, first)
            raise StateError(f"{has} has state and {lacks} has none, and {why}")
        return
    # The opaque values of a flat parameter are in the state of the first original only.
    of_first, of_other = (
        {
            name: description
            for name, description in s.everything.items()
            if not (isinstance(description, OpaqueType) and description.class_name == OpaqueShards.__name__)
        }
        for s in (a, b)
    )
    for name in {**of_first, **of_other}:
        if of_first.get(name) != of_other.get(name):
            raise StateError(
                f"{name} is {of_first.get(name, 'absent')} for {first} and {of_other.get(name, 'absent')} for {other}, and {why}"
            )


class Numbers:
    """Copies of the scalars of some summaries, one for each parameter, which an optimizer changes in place.

    Parameters share their Scalars, so the copies of a tensor are made together.
    """

    def __init__(self, summaries: Iterable[Summary]) -> None:
        shared: Counter[int] = Counter()
        of_id: dict[int, Scalar] = {}
        for summary in summaries:
            for _, scalar in summary.scalars:
                shared[id(scalar)] += 1
                of_id[id(scalar)] = scalar
        self._scalars = of_id  # keeps the ids unique
        self._copies: dict[int, Iterator[torch.Tensor]] = {
            key: iter(_copies(scalar.value, shared[key]))
            for key, scalar in of_id.items()
            if is_plain(scalar.value) and scalar.value.device.type == "cpu"
        }

    def copy_of(self, scalar: Scalar) -> Any:
        """Return the next copy of one of these scalars."""
        copies = self._copies.get(id(scalar))
        return next(copies) if copies is not None else detached_copy(scalar.value)


def _copies(value: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    """Return copies of a tensor, each with a storage of its own."""
    copies: Sequence[torch.Tensor] = torch.unbind_copy(value.detach().expand(number))  # type: ignore[func-returns-value,assignment]
    return copies


def local_values(
    param: LocalParam,
    summary: Summary,
    tensors: Mapping[str, torch.Tensor],
    opaque: Mapping[str, Any],
    numbers: Numbers,
    rank: int,
) -> dict[str, Any]:
    """Return the state of one live parameter in its optimizer's form. `opaque`: the result of `opaque_values`."""
    scalars, handle = dict(summary.scalars), param.named.handle
    has_state = bool(param.state)
    may_have_own_cut = has_state and holds_all(handle)
    values: dict[str, Any] = {}
    for name in summary.names:
        if name in tensors:
            value = _as_live(param, name, tensors[name]) if has_state else handle.from_local(tensors[name])
            cut = _cut_as_live(param, name, value, rank) if may_have_own_cut else None
            values[name] = value if cut is None else cut
        elif name in opaque:
            values[name] = opaque[name]
        elif name in scalars:
            values[name] = numbers.copy_of(scalars[name])
    return values


def _as_live(param: LocalParam, name: str, flat: torch.Tensor) -> torch.Tensor:
    """Return a value that is cut like its parameter in the optimizer's form, from this rank's elements.

    An optimizer that has moved its state to the CPU may keep plain local tensors where the wrapper has a class of its own.
    """
    handle, live = param.handle, (param.state or {}).get(name)
    if handle.marks and isinstance(live, torch.Tensor) and is_plain(live) and live.shape == handle.local_shape:
        return laid_out_like(flat, live)
    return handle.from_local(flat)


def opaque_values(
    param: LocalParam, summary: Summary | None, saved: Callable[[str, str], Any], rank: int, *, is_own: bool = False
) -> dict[str, Any]:
    """Return this rank's opaque values of one live parameter; `saved(fqn, name)` gives a value of the full dict.

    The values are copied, unless `is_own`: `saved` gives values that no other code uses.

    Raises StateError for a value that does not fit this layout.
    """
    if summary is None or not summary.opaque:
        return {}
    fqn = param.named.fqns[0]
    values = {name: (saved(fqn, name), description.cut) for name, description in summary.opaque}
    placements = tuple(original.placement for original in param.handle.originals)
    # A single number may depend on the cut as well, if another opaque value beside it does.
    is_free = not any(
        depends_on_cut(value) for value, cut in values.values() if not cut and not isinstance(value, OpaqueShards)
    )
    return {
        name: _opaque(
            param,
            name,
            value,
            cut=cut,
            rank=rank,
            is_free=is_free,
            copied=(lambda value: value) if is_own else detached_copy,
        )
        for name, (value, cut) in values.items()
        if not isinstance(value, OpaqueShards) or value.has(placements, rank)
    }


def _opaque(
    param: LocalParam, name: str, value: Any, cut: str, rank: int, is_free: bool, copied: Callable[[Any], Any]
) -> Any:
    """Return this rank's part of one opaque value.

    `is_free`: every shard can have the value, because it does not depend on the cut. `copied`: copies a value if necessary.
    """
    fqn, handle = param.named.fqns[0], param.handle
    placements = tuple(original.placement for original in handle.originals)
    if isinstance(value, OpaqueShards):
        return handle.rewrap(copied(value.of_rank(fqn, name, placements, rank, alone=holds_all(handle))))
    in_live_form = _cut_as_live(param, name, value, rank) if is_plain(value) else None
    if in_live_form is not None:
        return in_live_form
    if len(placements) == 1 and isinstance(placements[0], Whole):
        return copied(value)
    place = handle.place_like(tuple(value.shape), cut) if is_plain(value) else None
    if place is None and (is_free or holds_all(handle)):
        return copied(value)
    if place is None:
        raise StateError(
            f"{fqn}: {name} is {OpaqueType.of(value)}, not cut like the parameter {list(placements[0].shape)}, so it cannot be "
            "cut into the shards of this model; load it into a model where the parameter is whole on each rank"
        )
    return handle.from_placed(_cut_here(value, place, rank, param.device_of(name)), place)


def _cut_as_live(param: LocalParam, name: str, value: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return this rank's part of a complete value, cut as the live value of that name; None if it has no cut of its own."""
    live = (param.state or {}).get(name)
    place = param.handle.own_place(live)
    if place is None or place.shape != value.shape:
        return None
    return param.handle.like_live(_cut_here(value, place, rank, param.device_of(name)), live)


def _cut_here(value: torch.Tensor, place: Placement, rank: int, device: torch.device) -> torch.Tensor:
    """Return this rank's elements of a complete value, 1-D."""
    flat = empty((place.numel_on(rank),), value.dtype, device)
    if len(flat):
        held = local_of(value) if is_dtensor(value) else value
        copy_in_memory(copies_into(Whole(place.shape, (rank,)), place, rank), flatten(held), flat)
    return flat


Shard = dict[str, Any]
"""An optimizer's own dict on one rank; an ordinary dict, because some code compares types or restricts unpickling."""

INCOMPATIBLE = "incompatible"
"""The key of a shard for the differences that `strict=False` accepted, which `load_optim_state_dict` returns; else absent."""


def shard_dicts(
    local: LocalOptim,
    groups: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]],
    other_keys: Mapping[str, Any],
    state: Mapping[LocalId, Mapping[str, Any]],
    fit: Fit,
) -> Shard | list[Shard]:
    """Return the optimizer's own dict on this rank: its ids, the saved hyperparameters, this rank's part of the state.

    `groups`: hyperparameters and FQNs of each saved group. The result is a list if several optimizers were read as one.
    """
    if not local.optimizers:
        return _shard_dict(local, [hyper for hyper, _ in groups], other_keys, state, fit)
    of_each = hypers_of_each(local, groups, fit.live_groups)
    by_owner = {param.owner: state[param.local_id] for param in local.params if param.local_id in state}
    return [
        _shard_dict(
            optimizer,
            hypers,
            {
                key: other_keys[joined]
                for key in optimizer.other_keys
                if (joined := optimizer.joined_key(key)) in other_keys
            },
            {own_id: values for (owner, own_id), values in by_owner.items() if owner == index},
            fit,
        )
        for index, (optimizer, hypers) in enumerate(zip(local.optimizers, of_each, strict=True))
    ]


def _shard_dict(
    local: LocalOptim,
    groups: Sequence[Mapping[str, Any]],
    other_keys: Mapping[str, Any],
    state: Mapping[LocalId, Mapping[str, Any]],
    fit: Fit,
) -> Shard:
    param_groups = []
    for group, ids, names in zip(groups, local.group_ids, local.group_param_names, strict=True):
        kept = {key: detached_copy(value) for key, value in group.items()}
        param_groups.append(
            {**kept, "params": list(ids), **({"param_names": list(names)} if names is not None else {})}
        )
    differences = {INCOMPATIBLE: fit.as_plain()} if fit.as_plain() else {}
    return {
        **{key: detached_copy(value) for key, value in other_keys.items() if key != NON_PARAM_STATE},
        "state": {**state, **detached_copy(other_keys.get(NON_PARAM_STATE, {}))},
        "param_groups": param_groups,
        **differences,
    }
