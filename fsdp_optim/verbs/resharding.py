"""A sharded optimizer dict, of which every rank has its part, to where a live model needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.sharded_values import is_sharded_value, read_sharded_value
from fsdp_optim.errors import StateError
from fsdp_optim.layout import Layout, Placement
from fsdp_optim.state.local import Optimizers
from fsdp_optim.state.reading import FullState, normalize
from fsdp_optim.state.same import key_of
from fsdp_optim.state.shard import Shard, summarize
from fsdp_optim.transport.agree import compare
from fsdp_optim.transport.callers import Callers
from fsdp_optim.verbs.call import Options, calling, meet, read_local
from fsdp_optim.verbs.scatter import Contents, deliver


def is_sharded(full: Any) -> bool:
    """Whether the values of a dict's state are spread over ranks (DTensor, ShardedTensor): then all ranks have to meet."""

    def any_sharded(value: Any) -> bool:
        return any(map(any_sharded, value.values())) if isinstance(value, Mapping) else is_sharded_value(value)

    return isinstance(full, Mapping) and any_sharded(full.get("state", full))


def reshard(model: nn.Module, optim: Optimizers, given: Mapping[str, Any], options: Options) -> Shard | list[Shard]:
    """The optimizer's own dict for this rank. Called by all ranks, each with its part of the same state."""
    with calling("get_shard_from_optim_state_dict", [model], options, options) as ((reader,), callers):
        local, picture = meet(
            callers, lambda: read_local(reader, optim, options), options, "of a sharded dict", with_state=False
        )
        full = normalize(given, local.names)
        placements: dict[str, Placement] = {}
        parts: dict[tuple[str, str], torch.Tensor] = {}
        described = replace(full, state=_described(full, placements, parts))
        live = replace(local.live_optimizer(picture), names=local.names)
        described, fit = live.fit(described, strict=options.strict, groups=options.groups)
        _check_same_dict(callers, described, placements)
        contents = Contents(summarize(described, live.shapes), described.groups, described.extra, {}, fit)
        source = Layout({fqn: placements[fqn] for fqn in picture.params if fqn in placements})
        return deliver(callers, local, picture, contents, source, lambda fqn, name: parts[fqn, name])


def _check_same_dict(callers: Callers, described: FullState, placements: Mapping[str, Placement]) -> None:
    """Every rank has its part of one dict: all but the elements has to be the same."""
    told = [
        (fqn, placements.get(fqn), [(name, _told(value)) for name, value in sorted(values.items())])
        for fqn, values in sorted(described.state.items())
    ]
    groups = [(key_of(hyper), fqns) for hyper, fqns in described.groups]
    if not compare(callers, "sharded dict", repr((told, groups)).encode()):
        raise StateError(
            "the ranks have different sharded dicts: the parameters, scalars or groups of one differ from those of another; "
            "give every rank its part of the same checkpoint"
        )


def _told(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) and value.is_meta else key_of(value)


def _described(
    full: FullState, placements: dict[str, Placement], parts: dict[tuple[str, str], torch.Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """The state with tensors without memory where values are sharded; fills in where they live, and this rank's part."""
    described: dict[str, dict[str, Any]] = {}
    for fqn, values in full.state.items():
        described[fqn] = {}
        for name, value in values.items():
            if is_sharded_value(value):
                placement, parts[fqn, name] = read_sharded_value(f"{fqn}: {name}", value)
                if placements.setdefault(fqn, placement) != placement:
                    raise StateError(f"{fqn}: {name} is sharded in another way than its other values: {placement}")
                described[fqn][name] = torch.empty(tuple(value.size()), dtype=value.dtype, device="meta")
            else:
                described[fqn][name] = value
    return described
