"""The restore check: what the live model and optimizer hold after a load, compared with what the checkpoint has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checkpoint import Checkpoint
from fsdp_optim.formats.extents import Extent
from fsdp_optim.memory import dtype_name, dtype_named, pieces
from fsdp_optim.state.kinds import is_scalar
from fsdp_optim.state.local import LocalParam, Optimizers
from fsdp_optim.state.same import same
from fsdp_optim.state.shard import opaque_values
from fsdp_optim.state.values import Scalar
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure
from fsdp_optim.transport.reports import exchange_reports
from fsdp_optim.verbs.call import Local, read_local
from fsdp_optim.verbs.casting import castable
from fsdp_optim.verbs.contents import weights_of
from fsdp_optim.verbs.load_options import LoadOptions
from fsdp_optim.verbs.runs import bytes_of, in_host_memory
from fsdp_optim.verbs.targets import State, Weights
from fsdp_optim.verbs.unfiling import Wanted, elements_in, read_constants, runs_in

_RUNS_AT_ONCE = 512  # of short rows there are many


def check_bitwise(
    reader: ModelReader,
    optim: Optimizers | None,
    callers: Callers,
    loaded_from: Checkpoint,
    weights: Weights,
    state: State | None,
    options: LoadOptions,
) -> None:
    """Read the whole checkpoint once more, by its checksums, and compare it with what the live model and optimizer hold.

    Called by all ranks. Raises CheckpointError on all of them where something differs, or was held by no rank.
    """
    failure = Failure()
    live: list[_Live] = []
    cast: set[tuple[str, str]] = set()
    compared = 0
    try:
        checkpoint = loaded_from.verified()
        model = weights_of(reader, callers.ranks, options.call)
        live = [_Live.of(model, one) for one in weights.wanted()]
        weights.values.check(model.module_values)
        cast = {(one.wanted.fqn, one.wanted.name) for one in live if one.is_cast(castable_with=options.cast)}
        cast |= state.cast if state is not None else frozenset()
        if state is not None and optim is not None:
            loaded = read_local(reader, optim, replace(options.call, collect="all"), callers.ranks)
            live += [_Live.of(loaded, one) for one in state.wanted() if one.fqn not in state.fit.missing]
            read_constants(checkpoint, [one for key, one in checkpoint.optim.items() if not one.entry.shape])
            _check_scalars(state, loaded)
            _check_opaque(state, loaded)
            _check_groups(state, loaded, options.keep)
            _check_extra(state, loaded)
        comparison = _Comparison(checkpoint, callers.rank, max(callers.bucket_nbytes // 4, 1))
        for one in live:
            comparison.add(one, cast=(one.wanted.fqn, one.wanted.name) in cast)
        comparison.finish()
        compared = comparison.nbytes
    except Exception as error:
        failure.note(error)
    told = exchange_reports(callers, b"%d" % compared, failure.error)
    total, expected = sum(map(int, told)), sum(one.wanted.nbytes for one in live)
    if total != expected:
        raise CheckpointError(
            f"{loaded_from.folder}: {total} of {expected} bytes were found in the live model and optimizer"
        )


@dataclass(frozen=True)
class _Live:
    """One stored tensor, and what the live model or optimizer has for it on this rank; `param` None: nothing."""

    wanted: Wanted
    param: LocalParam | None

    @classmethod
    def of(cls, local: Local, wanted: Wanted) -> _Live:
        param: LocalParam | None = local.by_fqn.get(wanted.fqn)
        if param is None or param.handle.skipped or wanted.placement.shard_of(local.view.rank) is None:
            return cls(wanted, None)
        if param.state is None or wanted.name not in param.state:
            raise CheckpointError(f"{wanted.fqn}: {wanted.name} was loaded and is not in the live optimizer")
        return cls(wanted, param)

    def held(self) -> torch.Tensor | None:
        """This rank's part as it lies in memory; None where it has none, or something else in its place."""
        if self.param is None or self.param.state is None:
            return None
        return self.param.handle.held(self.param.state[self.wanted.name])

    def is_cast(self, *, castable_with: bool) -> bool:
        """Whether the model has it in another dtype than it was saved in, and may have. `castable_with`: as for load."""
        dtype = self.wanted.stored.entry.dtype
        held = self.param.handle if self.param is not None else None
        return (
            held is not None and dtype_name(held.weights().dtype) != dtype and castable(held, dtype, cast=castable_with)
        )

    def counts_on(self, rank: int) -> int:
        """The bytes that count as this rank's: of replicas the first counts."""
        placement = self.wanted.placement
        shard = placement.shard_of(rank)
        first = shard is not None and placement.holders(shard)[0] == rank
        return self.wanted.nbytes_on(rank) if first else 0


class _Comparison:
    """Compares what is on this rank with what is in the files, a bounded number of bytes and of runs at a time."""

    def __init__(self, checkpoint: Checkpoint, rank: int, most_nbytes: int) -> None:
        self.nbytes = 0  # of those that count as this rank's
        self._checkpoint, self._rank, self._most_nbytes = checkpoint, rank, most_nbytes
        self._pending: list[tuple[Wanted, Extent]] = []
        self._keys: set[tuple[str, str]] = set()  # of what is pending
        self._left = most_nbytes

    def add(self, live: _Live, *, cast: bool) -> None:
        """One tensor. `cast`: the load has cast it."""
        held, entry = live.held(), live.wanted.stored.entry
        if held is None:
            return
        if not cast and dtype_name(held.dtype) != entry.dtype:
            raise CheckpointError(
                f"{live.wanted.fqn}: {live.wanted.name} is {dtype_name(held.dtype)} now, {entry.dtype} was saved"
            )
        for start, flat in pieces(held, max(self._most_nbytes // max(held.itemsize, entry.itemsize), 1)):
            if cast:
                self._compare_cast(live.wanted, start, flat)
                continue
            runs = runs_in(live.wanted.stored, live.wanted.placement, flat, self._rank, start)
            while few := list(itertools.islice(runs, _RUNS_AT_ONCE)):
                for batch in in_host_memory(few, self._most_nbytes):
                    batch.bring()
                    for extent in batch.extents:
                        self._add(live.wanted, extent)
        self.nbytes += live.counts_on(self._rank)

    def _add(self, wanted: Wanted, extent: Extent) -> None:
        at, key = 0, (wanted.stored.file.name, wanted.stored.entry.key)
        if key in self._keys and self._pending[-1][0] is not wanted:  # tied when it was saved: read for each
            self.finish()
        while at < len(extent.memory):
            part = Extent(extent.start + at, extent.memory[at : at + self._left])
            self._pending.append((wanted, part))
            self._keys.add(key)
            at, self._left = at + len(part.memory), self._left - len(part.memory)
            if not self._left or len(self._pending) >= _RUNS_AT_ONCE:
                self.finish()

    def finish(self) -> None:
        """Read what the files have of what was added, and compare it."""
        pending, self._pending, self._left = self._pending, [], self._most_nbytes
        self._keys = set()
        memory, at = memoryview(bytearray(sum(len(live.memory) for _, live in pending))), 0
        read: dict[str, list[Extent]] = {}
        saved = []
        for wanted, live in pending:
            saved.append(Extent(live.start, memory[at : at + len(live.memory)]))
            read.setdefault(wanted.stored.file.name, []).append(saved[-1])
            at += len(live.memory)
        self._checkpoint.read(read)
        for (wanted, live), one in zip(pending, saved, strict=True):
            if live.memory != one.memory:
                self._tell(wanted, live, one)

    def _compare_cast(self, wanted: Wanted, start: int, flat: torch.Tensor) -> None:
        """Cast what the files have as the load did: floating weights and buffers of another dtype, and their state."""
        saved = torch.empty(len(flat), dtype=dtype_named(wanted.stored.entry.dtype), device="cpu")
        here = list(elements_in(wanted.stored, wanted.placement, self._rank, start, len(flat)))
        for first in range(0, len(here), _RUNS_AT_ONCE):
            extents = [
                Extent(wanted.stored.entry.start + there * saved.itemsize, bytes_of(saved[at : at + num]))
                for there, at, num in here[first : first + _RUNS_AT_ONCE]
            ]
            self._checkpoint.read({wanted.stored.file.name: extents})
        for there, at, num in here:
            live, cast = flat[at : at + num].cpu(), saved[at : at + num].to(flat.dtype)
            differs = ((live != cast) & ~(live.isnan() & cast.isnan())).nonzero()
            if len(differs):
                raise CheckpointError(
                    f"{wanted.fqn}: {wanted.name} on rank {self._rank} is not what "
                    f"{self._checkpoint.folder / wanted.stored.file.name} has, cast to {dtype_name(flat.dtype)}: the first "
                    f"difference is at its element {there + int(differs[0])}"
                )

    def _tell(self, wanted: Wanted, live: Extent, saved: Extent) -> NoReturn:
        at = next(i for i, (a, b) in enumerate(zip(live.memory, saved.memory, strict=True)) if a != b)
        raise CheckpointError(
            f"{wanted.fqn}: {wanted.name} on rank {self._rank} is not what "
            f"{self._checkpoint.folder / wanted.stored.file.name} has: the first difference is at byte {saved.start + at} of its "
            "data"
        )


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
