"""Memory for the local values that a load fills: one tensor for each sharded value of each live parameter."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_optim.layout import Shape
from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.allocation import Slabs
from fsdp_optim.view import Handle


class StateMemory:
    """Memory for the local values of live parameters: contiguous tensors on their devices, with zeros in the padding.

    Tensors that are made together live equally long (`Slabs`). Parameters that are cut alike have the same padding, found once.
    """

    def __init__(self, rank: int, missing: frozenset[str] = frozenset(), *, shaped: bool = False) -> None:
        """`missing`: FQNs of parameters that keep their live values; tensors of a live parameter with such originals begin as
        copies. `shaped`: small tensors may have the local shape, where the Handle takes that. All others are 1-D.
        """
        self._rank, self._missing, self._slabs, self._shaped = rank, missing, Slabs(), shaped
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def of(self, param: LocalParam, summary: Summary | None) -> dict[str, torch.Tensor]:
        """Allocate a tensor for each sharded value of one live parameter."""
        if summary is None or not summary.sharded:
            return {}
        handle = param.named.handle
        kind = self._kind_of(handle, summary)
        if not self._missing and kind.examples is not None:  # nearly always, where there are many
            return {name: torch.empty_like(example) for name, example in kind.examples}
        return self._filled(param, summary, kind)

    def _filled(self, param: LocalParam, summary: Summary, kind: _Kind) -> dict[str, torch.Tensor]:
        tensors, handle = {}, param.named.handle
        beside = handle.device
        keeps = bool(self._missing) and param.state is not None and not self._missing.isdisjoint(param.named.fqns)
        for name, dtype in summary.dtypes.items():
            flat = tensors[name] = self._slabs.empty((handle.local_numel,), dtype, param.device_of(name, beside))
            for start, stop in kind.padding:
                flat[start:stop].zero_()
            live = handle.local(param.state[name]) if keeps and param.state is not None else None
            if live is not None:
                flat.copy_(live)
        return tensors

    def _kind_of(self, handle: Handle, summary: Summary) -> _Kind:
        """Return what parameters that are cut alike, with values of the same names and dtypes, have in common."""
        originals = handle.originals
        if len(originals) == 1:
            key: tuple[object, ...] = summary.sharded, id(originals[0].placement)
        else:
            key = summary.sharded, *[id(original.placement) for original in originals]
        kind = self._kinds.get(key)
        if kind is None or kind.seen != (type(handle), handle.local_shape, handle.device):
            kind = self._kinds[key] = self._new_kind(handle, summary)
        return kind

    def _new_kind(self, handle: Handle, summary: Summary) -> _Kind:
        is_shaped = self._shaped and handle.takes_shaped
        shape = handle.local_shape if is_shaped else (handle.local_numel,)
        device, padding = handle.device, _padding(handle, self._rank)
        examples: list[tuple[str, torch.Tensor]] | None = None
        if device.type == "cpu" and not padding:  # where no value is on another device than the parameter
            listed = [(name, self._slabs.example(shape, dtype, device)) for name, dtype in summary.dtypes.items()]
            small = [(name, example) for name, example in listed if example is not None]
            examples = small if len(small) == len(listed) else None
        return _Kind((type(handle), handle.local_shape, device), padding, examples, handle)


class _Kind(NamedTuple):
    """What the local tensors of parameters that are cut alike have in common.

    Attributes:
        seen: the class, the local shape and the device of their Handles.
        padding: the ranges of the local tensor that belong to no original parameter.
        examples: a tensor like each value, which is small and has no padding; None: another kind of memory is needed.
        first: the Handle of the first of them, which keeps the ids of its placements unique.
    """

    seen: tuple[type[Handle], Shape, torch.device]
    padding: list[tuple[int, int]]
    examples: list[tuple[str, torch.Tensor]] | None
    first: Handle


def _padding(handle: Handle, rank: int) -> list[tuple[int, int]]:
    """Return the ranges of the local tensor that belong to no original parameter."""
    covered = []
    for original in handle.originals:
        shard = original.placement.shard_of(rank)
        for block in original.placement.blocks(shard) if shard is not None else ():
            covered.append((block.offset, block.end))
    gaps, at = [], 0
    for start, stop in sorted(covered):
        if at < start:
            gaps.append((at, start))
        at = max(at, stop)
    if at < handle.local_numel:
        gaps.append((at, handle.local_numel))
    return gaps
