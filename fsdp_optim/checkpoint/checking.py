"""The restore check: what the live model and optimizer hold after a load, compared with what the checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.casting import castable
from fsdp_optim.checkpoint.contents import weights_of
from fsdp_optim.checkpoint.reading import CheckpointEnd, StoredValue, elements_in, read_constants, stored_value
from fsdp_optim.checkpoint.targets import State, Weights
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import Reader
from fsdp_optim.memory import dtype_name, flat_slice
from fsdp_optim.move import End, Key, Slice, move
from fsdp_optim.options import LoadOptions
from fsdp_optim.state.kinds import is_scalar
from fsdp_optim.state.local import LocalParam, Optimizers
from fsdp_optim.state.same import same
from fsdp_optim.state.shard import opaque_values
from fsdp_optim.state.values import Scalar
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.reports import exchange_reports
from fsdp_optim.verbs.call import Local, read_local


def check_bitwise(
    reader: ModelReader,
    optim: Optimizers | None,
    callers: RankGroup,
    loaded_from: Reader,
    weights: Weights,
    state: State | None,
    options: LoadOptions,
) -> None:
    """Read the whole checkpoint once more, by its checksums, and compare it with what the live model and optimizer hold.

    Called by all ranks. Raises CheckpointError on all of them where something differs, or was held by no rank.
    """
    failure = Failure()
    values: list[StoredValue] = [*weights.wanted(), *(state.wanted() if state is not None else ())]
    values = [one for one in values if state is None or not one.is_state or one.fqn not in state.fit.missing]
    target = _CompareEnd(callers.rank, {}, frozenset())
    with failure:
        checkpoint = loaded_from.verified()
        model = weights_of(reader, callers.ranks, options.call)
        live: dict[Key, torch.Tensor | None] = {one.key: _held(model, one) for one in values if not one.is_state}
        weights.values.check(model.module_values)
        state_cast = state.cast if state is not None else frozenset()
        cast = frozenset(
            one.key
            for one in values
            if ((one.fqn, one.name) in state_cast if one.is_state else _is_cast(model, one, castable_with=options.cast))
        )
        if state is not None and optim is not None:
            loaded = read_local(reader, optim, replace(options.call, collect="all"), callers.ranks)
            live.update((one.key, _held(loaded, one)) for one in values if one.is_state)
            read_constants(checkpoint, [one for key, one in checkpoint.optim.items() if not one.shape])
            _check_scalars(state, loaded)
            _check_opaque(state, loaded)
            _check_groups(state, loaded, options.keep)
            _check_extra(state, loaded)
        target = _CompareEnd(callers.rank, live, cast)
        budget = callers.budget.share(
            4, "what the files have, and what is live: windows of it, on the host, and in the making"
        )
        source = CheckpointEnd(checkpoint, callers.rank, budget, as_needed=True)
        move(values, source, target, callers, budget, failure)
    told = exchange_reports(callers, b"%d" % target.nbytes, failure.error)
    total, expected = sum(map(int, told)), sum(one.nbytes for one in values)
    if total != expected:
        raise CheckpointError(
            f"{loaded_from.where}: {total} of {expected} bytes were found in the live model and optimizer"
        )


@dataclass
class _CompareEnd(End):
    """What the live model and optimizer have, compared with what comes. `nbytes`: of those that count as this rank's.

    `live`: by value, this rank's part as it lies in memory; None where it has none. `cast`: those that the load has cast.
    """

    rank: int
    live: Mapping[Key, torch.Tensor | None]
    cast: frozenset[Key]
    nbytes: int = 0

    is_stored = True

    def drain(self, parts: Sequence[Slice]) -> None:
        for part in parts:
            held, shard = self.live[part.value.key], part.cut.shard_of(self.rank)
            if held is None or part.flat is None or shard is None:
                continue
            if held.dtype != part.value.dtype and part.value.key not in self.cast:
                raise CheckpointError(
                    f"{part.value.fqn}: {part.value.name} is {dtype_name(held.dtype)} now, {dtype_name(part.value.dtype)} was "
                    "saved"
                )
            live = flat_slice(held, part.start, part.start + part.flat.numel()).cpu()
            differs = _first_difference(live, part.flat)
            if differs is not None:
                self._tell(part, part.start + differs)
            if part.cut.holders(shard)[0] == self.rank:  # of replicas the first counts
                self.nbytes += part.flat.nbytes

    def _tell(self, part: Slice, index: int) -> NoReturn:
        value, stored = part.value, stored_value(part.value).stored
        rank, there, _, _ = next(elements_in(stored.placement, part.cut, self.rank, index, 1))
        file, start = stored.place_on(rank)
        where = (
            f"element {there}" if part.value.key in self.cast else f"byte {start + there * stored.itemsize} of its data"
        )
        cast = (
            f", cast to {dtype_name(held.dtype)}"
            if (held := self.live[value.key]) is not None and value.key in self.cast
            else ""
        )
        raise CheckpointError(
            f"{value.fqn}: {value.name} on rank {self.rank} is not what {file} has{cast}: the "
            f"first difference is at {where}"
        )


def _first_difference(live: torch.Tensor, saved: torch.Tensor) -> int | None:
    """The first element that differs in a bit, or in its value once it is cast."""
    if live.dtype == saved.dtype:
        a, b = (flat.contiguous().view(torch.uint8) for flat in (live, saved))
        return None if torch.equal(a, b) else int((a != b).nonzero()[0]) // live.itemsize
    cast = saved.to(live.dtype)
    differs = ((live != cast) & ~(live.isnan() & cast.isnan())).nonzero()
    return int(differs[0]) if len(differs) else None


def _held(local: Local, value: StoredValue) -> torch.Tensor | None:
    """This rank's part of a value as it lies in memory; None where it has none, or something else in its place."""
    param = _param_of(local, value)
    return param.handle.held((param.state or {})[value.name]) if param is not None else None


def _param_of(local: Local, value: StoredValue) -> LocalParam | None:
    """The live parameter that has a value on this rank."""
    param = local.by_fqn.get(value.fqn)
    if param is None or param.handle.skipped or value.placement.shard_of(local.view.rank) is None:
        return None
    if param.state is None or value.name not in param.state:
        raise CheckpointError(f"{value.fqn}: {value.name} was loaded and is not in the live optimizer")
    return param


def _is_cast(local: Local, value: StoredValue, *, castable_with: bool) -> bool:
    """Whether the model has a weight in another dtype than it was saved in, and may have. `castable_with`: as for load."""
    param = _param_of(local, value)
    if param is None or param.handle.weights().dtype == value.dtype:
        return False
    return castable(param.handle, value.stored.dtype, cast=castable_with)


def _check_scalars(state: State, loaded: Local) -> None:
    for fqn, param in loaded.by_fqn.items():
        is_checked = fqn not in state.fit.missing and not param.handle.skipped
        for name, value in state.full.state.get(fqn, {}).items() if is_checked else ():
            if is_scalar(value) and not (isinstance(value, torch.Tensor) and value.is_meta):
                found = (param.state or {}).get(name)
                if Scalar.of(found) != Scalar.of(value):
                    raise CheckpointError(f"{fqn}: {name} is {found!r} in the live optimizer, {value!r} was saved")


def _check_opaque(state: State, loaded: Local) -> None:
    """Values of another shape than their parameter, and those that are no plain tensors, made once more from what was saved."""
    for param, summary in state.plan.given:
        fqn = param.named.fqns[0]
        if not state.fit.missing or fqn not in state.fit.missing:
            wanted = opaque_values(param, summary, lambda fqn, name: state.full.state[fqn][name], loaded.view.rank)
            found = loaded.by_fqn[fqn].state or {}
            for name, value in wanted.items():
                if name not in found or not same(found[name], value):
                    raise CheckpointError(f"{fqn}: {name} in the live optimizer is not what was saved")


def _check_groups(state: State, loaded: Local, keep: Sequence[str]) -> None:
    """The hyperparameters of every live group."""
    saved = {fqn: hyper for hyper, fqns in state.full.groups for fqn in fqns}
    for fqn, param in loaded.by_fqn.items():
        live = loaded.optim.groups[param.group_index]
        for key, value in saved.get(fqn, {}).items():
            if key not in keep and (key not in live or not same(live[key], value)):
                raise CheckpointError(
                    f"{fqn}: {key} of its group is {live.get(key)!r} in the live optimizer, {value!r} was saved"
                )


def _check_extra(state: State, loaded: Local) -> None:
    """The other keys of the optimizer's own dict."""
    for key, value in state.full.extra.items():
        if key in loaded.optim.extra and not same(loaded.optim.extra[key], value):
            raise CheckpointError(f"{key} is {loaded.optim.extra[key]!r} in the live optimizer, {value!r} was saved")
