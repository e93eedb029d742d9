"""From a full state to this rank's part: what each live parameter gets, memory for it, and the optimizer's own dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Layout, Shape, Whole
from fsdp_optim.memory import copy_in_memory, empty
from fsdp_optim.plan import plan_into
from fsdp_optim.state.full import FullState
from fsdp_optim.state.local import LocalOptim, LocalParam
from fsdp_optim.state.opaque import OpaqueShards
from fsdp_optim.state.values import Odd, Summary, is_plain, kind_of, own

Summaries = Mapping[str, Summary]
"""FQN -> what its state consists of; no entry for a parameter without state."""


def summarize(full: FullState, shapes: Mapping[str, Shape]) -> dict[str, Summary]:
    """What the state of every parameter of a full state consists of."""
    evidence = full.evidence(shapes)

    def summary(values: Mapping[str, Any], shape: Shape) -> Summary:
        return Summary.of(values, lambda name, value: kind_of(name, value, shape, evidence))

    return {fqn: summary(values, shapes[fqn]) for fqn, values in full.state.items() if fqn in shapes}


def summary_for(param: LocalParam, summaries: Summaries) -> Summary | None:
    """What one live parameter gets: what all its originals have in common, or an error that names two that disagree."""
    fqns = param.named.fqns
    first, summary = fqns[0], summaries.get(fqns[0])
    for fqn in fqns[1:]:
        _check_alike(first, summary, fqn, summaries.get(fqn))
    return summary


_FLAT = "they lie in one flat parameter of this model, which has one value for both"


def _check_alike(first: str, a: Summary | None, other: str, b: Summary | None) -> None:
    if a is None or b is None:
        if a is not b:
            has, lacks = (first, other) if b is None else (other, first)
            raise StateError(
                f"{has} has state and {lacks} has none, and {_FLAT}: wrap them in different units, or without flattening"
            )
        return
    mine, theirs = a.everything, b.everything
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise StateError(
                f"{name} is {mine.get(name, 'absent')} for {first} and {theirs.get(name, 'absent')} for {other}, and {_FLAT}: "
                "wrap them in different units, or without flattening"
            )


def allocate(param: LocalParam, summary: Summary | None, rank: int) -> dict[str, torch.Tensor]:
    """Local 1-D tensors for the sharded values of one live parameter, on its device, with zeros in the padding."""
    tensors = {}
    for name, dtype in (summary.dtypes if summary is not None else {}).items():
        flat = empty((param.handle.local_numel,), dtype, param.handle.device)
        for start, stop in _padding(param, rank):
            flat[start:stop].zero_()
        tensors[name] = flat
    return tensors


def _padding(param: LocalParam, rank: int) -> list[tuple[int, int]]:
    """The ranges of the local tensor that belong to no original parameter."""
    covered = []
    for original in param.handle.originals:
        shard = original.placement.shard_of(rank)
        for block in original.placement.blocks(shard) if shard is not None else ():
            covered.append((block.offset, block.offset + block.box.numel))
    gaps, at = [], 0
    for start, stop in sorted(covered):
        if at < start:
            gaps.append((at, start))
        at = max(at, stop)
    if at < param.handle.local_numel:
        gaps.append((at, param.handle.local_numel))
    return gaps


def local_values(
    param: LocalParam, summary: Summary, tensors: Mapping[str, torch.Tensor], opaque: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one live parameter as its optimizer keeps it. `opaque`: as `opaque_values` made them."""
    scalars = dict(summary.scalars)
    return {
        name: param.handle.from_local(tensors[name])
        if name in tensors
        else opaque[name]
        if name in opaque
        else own(scalars[name].value)
        for name in summary.names
    }


def opaque_values(
    param: LocalParam, summary: Summary | None, saved: Callable[[str, str], Any], rank: int
) -> dict[str, Any]:
    """This rank's opaque values of one live parameter; `saved(fqn, name)` gives that of the full dict.

    Raises StateError for a value that cannot be had for this layout.
    """
    fqn = param.named.fqns[0]
    return {name: _opaque(param, name, saved(fqn, name), rank) for name, _ in (summary.opaque if summary else ())}


def _opaque(param: LocalParam, name: str, value: Any, rank: int) -> Any:
    fqn, handle = param.named.fqns[0], param.handle
    placements = tuple(original.placement for original in handle.originals)
    if isinstance(value, OpaqueShards):
        return handle.rewrap(own(value.of_rank(fqn, name, placements, rank)))
    if len(placements) == 1 and isinstance(placements[0], Whole):
        return own(value)
    place = handle.place_like(tuple(value.shape)) if is_plain(value) else None
    if place is None:
        raise StateError(
            f"{fqn}: {name} is {Odd.of(value)}, not shaped like the parameter {list(placements[0].shape)}, so it cannot be "
            "cut into the shards of this model; load it into a model where the parameter is whole on each rank"
        )
    flat = empty((place.numel_on(rank),), value.dtype, handle.device)
    whole = Layout({fqn: Whole(place.shape, (rank,))})
    copy_in_memory(plan_into(whole, Layout({fqn: place}), rank), value.detach().reshape(-1), flat)
    return handle.from_placed(flat, place)


def shard_dict(
    local: LocalOptim,
    groups: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    state: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """The optimizer's own dict on this rank: its ids, the saved hyperparameters, this rank's part of the state."""
    param_groups = []
    for group, ids, names in zip(groups, local.group_ids, local.group_param_names, strict=True):
        kept = {key: own(value) for key, value in group.items()}
        param_groups.append(
            {**kept, "params": list(ids), **({"param_names": list(names)} if names is not None else {})}
        )
    return {**{key: own(value) for key, value in extra.items()}, "state": dict(state), "param_groups": param_groups}
