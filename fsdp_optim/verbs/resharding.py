"""A sharded optimizer dict, of which every rank has its part, to where a live model needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.sharded_values import is_sharded_value, read_sharded_value
from fsdp_optim.errors import StateError
from fsdp_optim.layout import Layout, Placement
from fsdp_optim.state.full import FullState, check_fits
from fsdp_optim.state.shard import Shard, summarize
from fsdp_optim.transport.agree import all_hear
from fsdp_optim.transport.collective import BUCKET_NBYTES
from fsdp_optim.verbs.call import Local, Options, callers_of_readers, meet
from fsdp_optim.verbs.scatter import Contents, deliver


def is_sharded(full: FullState) -> bool:
    """Whether the values of a state are spread over ranks (DTensor, ShardedTensor)."""
    return any(is_sharded_value(value) for values in full.state.values() for value in values.values())


def reshard(
    reader: ModelReader, local: Local, full: FullState, options: Options, bucket_nbytes: int = BUCKET_NBYTES
) -> Shard | list[Shard]:
    """The optimizer's own dict for this rank. Called by all ranks, each with its part of the same state."""
    callers = callers_of_readers([reader], options)
    with all_hear(callers):
        _, picture = meet(callers, lambda: local, "get_shard_from_optim_state_dict(sharded)", with_state=False)
        placements: dict[str, Placement] = {}
        parts: dict[tuple[str, str], torch.Tensor] = {}
        described = replace(full, state=_described(full, placements, parts))
        shapes = {fqn: param.placement.shape for fqn, param in picture.params.items()}
        fit = check_fits(
            described,
            local.names,
            shapes,
            live=local.with_state,
            strict=options.strict,
            regroup=bool(local.optim.parts),
        )
        contents = Contents(summarize(described, shapes), full.groups, full.extra, {}, fit)
        source = Layout({fqn: placements[fqn] for fqn in picture.params if fqn in placements})
        return deliver(callers, local, picture, contents, source, lambda fqn, name: parts[fqn, name], bucket_nbytes)


def _described(
    full: FullState, placements: dict[str, Placement], parts: dict[tuple[str, str], torch.Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """The state with tensors without memory where values are sharded; fills in where they live, and this rank's part."""
    described: dict[str, dict[str, Any]] = {}
    for fqn, values in full.state.items():
        described[fqn] = {}
        for name, value in values.items():
            if is_sharded_value(value):
                placement, parts[fqn, name] = read_sharded_value(fqn, value)
                if placements.setdefault(fqn, placement) != placement:
                    raise StateError(f"{fqn}: {name} is sharded in another way than its other values: {placement}")
                described[fqn][name] = torch.empty(tuple(value.size()), dtype=value.dtype, device="meta")
            else:
                described[fqn][name] = value
    return described
