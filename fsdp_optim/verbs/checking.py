"""The restore check: what the live model and optimizer hold after a load, compared with what the checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checkpoint import Checkpoint
from fsdp_optim.formats.extents import Extent
from fsdp_optim.memory import dtype_name
from fsdp_optim.state.local import LocalParam, Optimizers
from fsdp_optim.state.shard import opaque_values
from fsdp_optim.state.values import Scalar, is_scalar, same
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure
from fsdp_optim.transport.reports import exchange_reports
from fsdp_optim.verbs.call import Local, read_local
from fsdp_optim.verbs.contents import may_be_cast, weights_of
from fsdp_optim.verbs.load_options import LoadOptions
from fsdp_optim.verbs.targets import State, Weights
from fsdp_optim.verbs.unfiling import Wanted, read_constants, runs_in

_CPU = torch.device("cpu")


def check_bitwise(
    reader: ModelReader,
    optim: Optimizers | None,
    callers: Callers,
    folder: Path,
    weights: Weights,
    state: State | None,
    options: LoadOptions,
) -> None:
    """Read everything once more, by its checksums, and compare it with what the live model and optimizer hold.

    Called by all ranks. Raises CheckpointError on all of them where something differs, or was held by no rank.
    """
    failure = Failure()
    live: list[_Live] = []
    compared = 0
    try:
        checkpoint = Checkpoint.open(folder, verify=True)
        model = weights_of(reader, callers.ranks, options.call)
        live = [_Live.of(model, one) for one in weights.wanted() if not _is_cast(model, one)]
        if state is not None and optim is not None:
            loaded = read_local(reader, optim, replace(options.call, collect="all"), callers.ranks)
            live += [_Live.of(loaded, one) for one in state.wanted() if one.fqn not in state.fit.missing]
            read_constants(checkpoint, [one for key, one in checkpoint.optim.items() if not one.entry.shape])
            _check_scalars(state, loaded)
            _check_opaque(state, loaded)
            _check_groups(state, loaded, options.keep)
        for batch in _batches(live, callers.bucket_nbytes):
            _compare(checkpoint, batch, callers.rank)
        compared = sum(one.counts_on(callers.rank) for one in live)
    except Exception as error:
        failure.note(error)
    told = exchange_reports(callers, b"%d" % compared, failure.error)
    total, expected = sum(map(int, told)), sum(one.wanted.nbytes for one in live)
    if total != expected:
        raise CheckpointError(f"{folder}: {total} of {expected} bytes were found in the live model and optimizer")


@dataclass(frozen=True)
class _Live:
    """One stored tensor, and this rank's elements of it as the live model or optimizer has them, 1-D; None: it has none."""

    wanted: Wanted
    flat: torch.Tensor | None

    @classmethod
    def of(cls, local: Local, wanted: Wanted) -> _Live:
        param: LocalParam | None = local.by_fqn.get(wanted.fqn)
        if param is None or wanted.placement.shard_of(local.view.rank) is None:
            return cls(wanted, None)
        if param.state is None or wanted.name not in param.state:
            raise CheckpointError(f"{wanted.fqn}: {wanted.name} was loaded and is not in the live optimizer")
        return cls(wanted, param.handle.local(param.state[wanted.name]))

    def counts_on(self, rank: int) -> int:
        """The bytes that count as this rank's: of replicas the first counts."""
        placement = self.wanted.placement
        shard = placement.shard_of(rank)
        if self.flat is None or shard is None or placement.holders(shard)[0] != rank:
            return 0
        return self.wanted.nbytes_on(rank)


def _is_cast(live: Local, wanted: Wanted) -> bool:
    """Whether it is a buffer that this model has in another dtype than it was saved in."""
    param = live.by_fqn.get(wanted.fqn)
    return (
        param is not None
        and may_be_cast(param.handle.param)
        and dtype_name(param.handle.weights().dtype) != wanted.stored.entry.dtype
    )


def _batches(live: Sequence[_Live], most_nbytes: int) -> Iterator[list[_Live]]:
    """Those of which this rank has elements, up to a size, but at least one."""
    batch: list[_Live] = []
    size = 0
    for one in live:
        if one.flat is None:
            continue
        if batch and size + one.flat.nbytes > most_nbytes:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.flat.nbytes
    if batch:
        yield batch


def _compare(checkpoint: Checkpoint, batch: Sequence[_Live], rank: int) -> None:
    """Read what the checkpoint has of some tensors, and compare it bit for bit."""
    pairs: list[tuple[_Live, Extent, Extent]] = []
    for one in batch:
        if one.flat is not None:
            held = one.flat.to(_CPU).contiguous()
            read, kept = (_extents(one.wanted, memory, rank) for memory in (torch.empty_like(held), held))
            pairs += [(one, saved, live) for saved, live in zip(read, kept, strict=True)]
    by_file: dict[str, list[Extent]] = {}
    for one, saved, _ in pairs:
        by_file.setdefault(one.wanted.stored.file.name, []).append(saved)
    checkpoint.read(by_file)
    for one, saved, live in pairs:
        a, b = (numpy.frombuffer(extent.memory, dtype=numpy.uint8) for extent in (saved, live))
        if not numpy.array_equal(a, b):
            at = int(numpy.flatnonzero(a != b)[0])
            raise CheckpointError(
                f"{one.wanted.fqn}: {one.wanted.name} on rank {rank} is not what "
                f"{checkpoint.folder / one.wanted.stored.file.name} has: the first difference is at byte {saved.start + at} of "
                "its data"
            )


def _extents(wanted: Wanted, flat: torch.Tensor, rank: int) -> list[Extent]:
    runs = runs_in(wanted.stored, wanted.placement, flat, rank)
    return [run for run in runs if isinstance(run, Extent)]  # on the host all are


def _check_scalars(state: State, loaded: Local) -> None:
    for fqn, param in loaded.by_fqn.items():
        for name, value in state.full.state.get(fqn, {}).items() if fqn not in state.fit.missing else ():
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
    """The hyperparameters of every live group, and the other keys of the optimizer's dict."""
    saved = {fqn: hyper for hyper, fqns in state.full.groups for fqn in fqns}
    for fqn, param in loaded.by_fqn.items():
        live = loaded.optim.groups[param.group_index]
        for key, value in saved.get(fqn, {}).items():
            if key not in keep and (key not in live or not same(live[key], value)):
                raise CheckpointError(
                    f"{fqn}: {key} of its group is {live.get(key)!r} in the live optimizer, {value!r} was saved"
                )
