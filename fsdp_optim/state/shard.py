"""From a full state to this rank's part: what each live parameter gets, memory for it, and the optimizer's own dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.layout import Shape, Whole
from fsdp_optim.memory import empty
from fsdp_optim.state.full import FullState
from fsdp_optim.state.local import LocalOptim, LocalParam
from fsdp_optim.state.values import Kind, Scalar, Summary, dtype_name, kind_of, own

Summaries = Mapping[str, Summary]
"""FQN -> what its state consists of; no entry for a parameter without state."""


def summarize(full: FullState, shapes: Mapping[str, Shape]) -> dict[str, Summary]:
    """What the state of every parameter of a full state consists of."""
    sharded_names = full.sharded_names(shapes)
    return {fqn: _summary(values, shapes[fqn], sharded_names) for fqn, values in full.state.items() if fqn in shapes}


def _summary(values: Mapping[str, Any], shape: Shape, sharded_names: frozenset[str]) -> Summary:
    sharded, scalars, opaque = [], [], []
    for name, value in values.items():
        match kind_of(name, value, shape, sharded_names):
            case Kind.SHARDED:
                sharded.append((name, dtype_name(value.dtype)))
            case Kind.SCALAR:
                scalars.append((name, Scalar.of(value)))
            case Kind.OPAQUE:
                opaque.append((name, type(value).__name__))
    return Summary(tuple(sharded), tuple(scalars), tuple(opaque), tuple(values))


def summary_for(param: LocalParam, summaries: Summaries) -> Summary | None:
    """What one live parameter gets: what all its originals have in common, or an error that names two that disagree."""
    fqns = param.named.fqns
    first, summary = fqns[0], summaries.get(fqns[0])
    for fqn in fqns[1:]:
        _check_alike(first, summary, fqn, summaries.get(fqn))
    if summary is not None and summary.opaque and not _is_whole(param):
        name, kind = summary.opaque[0]
        raise StateError(
            f"{first}: {name} is a {kind} that is not shaped like the parameter, so it cannot be cut into the shards of "
            "this model; load it into a model where the parameter is whole on each rank"
        )
    return summary


def _is_whole(param: LocalParam) -> bool:
    return len(param.handle.originals) == 1 and isinstance(param.handle.originals[0].placement, Whole)


_FLAT = "they lie in one flat parameter of this model, which has one value for both"


def _check_alike(first: str, a: Summary | None, other: str, b: Summary | None) -> None:
    if a is None or b is None:
        if a is not b:
            has, lacks = (first, other) if b is None else (other, first)
            raise StateError(
                f"{has} has state and {lacks} has none, and {_FLAT}: wrap them in different units, or without flattening"
            )
        return
    mine, theirs = ({**dict(s.sharded), **dict(s.scalars), **dict(s.opaque)} for s in (a, b))
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
    """The state of one live parameter as its optimizer keeps it."""
    scalars = dict(summary.scalars)
    return {
        name: param.handle.from_local(tensors[name])
        if name in tensors
        else own(scalars[name].value if name in scalars else opaque[name])
        for name in summary.names
    }


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
