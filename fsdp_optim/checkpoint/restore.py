"""Load a checkpoint: from whole, in files, to the live wrapper. Every rank reads its own bytes, and verifies them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from torch import nn

from fsdp_optim.checkpoint.checking import check_bitwise
from fsdp_optim.checkpoint.formats import open_checkpoint
from fsdp_optim.checkpoint.pending import pending
from fsdp_optim.checkpoint.places import common_store
from fsdp_optim.checkpoint.progress import Progress
from fsdp_optim.checkpoint.reading import CheckpointEnd, StoredFlats
from fsdp_optim.checkpoint.restored import Restored, read_extras
from fsdp_optim.checkpoint.results import LoadSummary
from fsdp_optim.checkpoint.stores import Place, name_of, store_at
from fsdp_optim.checkpoint.targets import State, Weights
from fsdp_optim.errors import CheckpointError, ReplacedError, StateError, WrapperError
from fsdp_optim.formats.base import Format, Reader
from fsdp_optim.move import move
from fsdp_optim.options import LoadOptions
from fsdp_optim.state.shard import Shard
from fsdp_optim.storage.base import Store
from fsdp_optim.transport.agree import agree, compare
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import calling
from fsdp_optim.verbs.load_state import Before, LoadableOptimizer
from fsdp_optim.verbs.load_state import load as load_shard

_LOOKS = 5  # at a path that is given to another checkpoint while this one is loaded

log = logging.getLogger("fsdp_optim")


def restore(
    path: Place,
    model: nn.Module | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadOptions,
    format: Format | None = None,
) -> Restored:
    """Load a checkpoint into a live model and optimizer. Called by all ranks of the model."""
    for _ in range(_LOOKS - 1):
        try:
            return _restore(path, model, optim, options, format)
        except ReplacedError as error:  # on all ranks alike; what is at the path by now is as good
            log.info("looking again: %s", error)
    return _restore(path, model, optim, options, format)


def _restore(
    path: Place,
    model: nn.Module | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadOptions,
    format: Format | None,
) -> Restored:
    if model is None:
        if optim is not None:
            raise StateError("an optimizer is loaded together with the model that it was built from: give model= too")
        options.validate()
        pending.settle()
        store = store_at(path)
        with closing(open_checkpoint(store, verify=options.verify, format=format)) as checkpoint:
            restored = read_extras(checkpoint, store, _position(options), options, format)
            restored.summary = LoadSummary(world_size=checkpoint.world_size, step=checkpoint.step)
            return restored
    with (
        calling("load", [model], options, options.call, all_of_plain=True) as ((reader,), callers),
        ExitStack() as stack,
    ):
        about = f"{name_of(path)!r}, {'an' if optim is not None else 'no'} optimizer"
        pending.settle()
        store = common_store(callers, path)
        checkpoint = stack.enter_context(closing(_open_on_all(callers, store, options, format)))
        weights = Weights.meet(reader, callers, checkpoint, options, about)
        state = State.meet(reader, optim, callers, checkpoint, options, weights) if optim is not None else None
        restored = read_extras(checkpoint, store, callers.position, options, format)
        wanted = [*weights.wanted(), *(state.wanted() if state is not None else ())]
        total = sum(one.nbytes_on(callers.rank) for one in wanted)
        failure = Failure()
        with Progress(options.progress, "loading", total, shown=callers.rank == callers.ranks[0]) as progress:
            host = callers.budget.share(2, "what lies on a device, by way of the host")
            source = CheckpointEnd(checkpoint, callers.rank, host, progress.up_to)
            move(wanted, source, StoredFlats(), callers, callers.budget, failure)
            made = None
            with failure:
                if failure.error is None:
                    checkpoint.check_unchanged()
                    made = state.dict_of() if state is not None else None
            agree(callers, "read", failure.error, fatal=failure.fatal)
            progress.done()
        had = _install_values(callers, weights)
        if optim is not None and made is not None:
            try:
                _load_on_all(callers, optim, made, options.keep)
            except BaseException:
                weights.values.put_back(had)
                raise
        weights.install()
        reader.reshard()
        agree(callers, "installed")
        if options.check == "bitwise":
            check_bitwise(reader, optim, callers, checkpoint, weights, state, options)
    return _summarized(restored, checkpoint, weights, state, source.nbytes, callers, len(wanted))


def _position(options: LoadOptions) -> int:
    """Which rank's `per_rank_extra` this process gets: its place in the process group that was given, or in the job."""
    world = world_here()
    position = world.group_rank(options.call.process_group)
    if position < 0:
        raise WrapperError(f"rank {world.rank} is not in process_group=: it gets no per_rank_extra through it")
    return position


def _open_on_all(callers: RankGroup, store: Store, options: LoadOptions, format: Format | None) -> Reader:
    """The same checkpoint on all ranks, open. They look again where it was replaced after some of them had opened it."""
    for _ in range(_LOOKS):
        checkpoint = open_checkpoint(store, verify=options.verify, format=format)
        alike = False
        try:
            identity = json.dumps(checkpoint.identity, sort_keys=True).encode()
            alike = compare(callers, f"opened with {options.compared_text()}", identity)
        finally:
            if not alike:
                checkpoint.close()
        if alike:
            return checkpoint
    raise CheckpointError(
        f"{store.where}: the ranks see different checkpoints there: it has to be on a file system that all ranks share, and "
        "nobody may save to it again and again meanwhile"
    )


def _install_values(callers: RankGroup, weights: Weights) -> dict[str, Any]:
    """Give modules what state_dict() has of them besides tensors; where one refuses, on any rank, all have what they had.

    Returns what they had.
    """
    if not weights.picture.module_values and not weights.picture.module_takers:
        return {}
    failure, had = Failure(), weights.values.before()
    with failure:
        weights.values.install()
    try:
        agree(callers, "modules loaded", failure.error)
    except Exception:
        weights.values.put_back(had)
        raise
    return had


def _load_on_all(
    callers: RankGroup,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    made: Shard | list[Shard],
    keep: Sequence[str],
) -> None:
    """Load the optimizer on all ranks; where one fails, all have what they had before."""
    before = Before([*optim] if isinstance(optim, (list, tuple)) else [optim])  # type: ignore[list-item]
    failure = Failure()
    with failure:  # this rank has put back what it had
        load_shard(optim, made, keep, logs=callers.rank == callers.ranks[0])
    try:
        agree(callers, "optimizer loaded", failure.error)
    except Exception:
        if failure.error is None:
            before.put_back()
        raise


def _summarized(
    restored: Restored,
    checkpoint: Reader,
    weights: Weights,
    state: State | None,
    nbytes: int,
    callers: RankGroup,
    num_tensors: int,
) -> Restored:
    absent = state.absent if state is not None else ()
    if state is not None:
        restored.unmatched_hyperparameters, restored.unmatched_values = (
            state.fit.unmatched_hyperparameters,
            state.fit.unmatched_values,
        )
    restored.missing = _each_once(weights.missing, state.fit.missing if state is not None else ())
    restored.unexpected = _each_once(weights.unexpected, state.fit.unexpected if state is not None else ())
    restored.summary = LoadSummary(num_tensors, nbytes, absent, checkpoint.world_size, checkpoint.step)
    if callers.rank == callers.ranks[0]:
        log.info(
            "loaded %s, saved by %d ranks, on %d: %d tensors, %d bytes read on this rank; without optimizer state: %s",
            checkpoint.where,
            restored.summary.world_size,
            len(callers.ranks),
            num_tensors,
            nbytes,
            ", ".join(absent[:8]) or "none",
        )
    return restored


def _each_once(*names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
