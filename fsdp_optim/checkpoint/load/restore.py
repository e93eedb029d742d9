"""Load: from the files of a checkpoint to a live model and optimizer. Every rank reads and verifies its own bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.paths import common_store
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.results import LoadSummary
from fsdp_optim.checkpoint.common.stores import Place, name_of, store_at, with_cache
from fsdp_optim.checkpoint.load.compare import check_bitwise
from fsdp_optim.checkpoint.load.installing import TrainerObjects, Trainers, install_all
from fsdp_optim.checkpoint.load.opening import open_on_all
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, FlatsEnd
from fsdp_optim.checkpoint.load.restored import Restored, read_extras
from fsdp_optim.checkpoint.load.targets import State, Weights, check_halves
from fsdp_optim.errors import ReplacedError, StateError, WrapperError, shortened
from fsdp_optim.formats.base.protocols import Format, Reader
from fsdp_optim.move import move
from fsdp_optim.options import LoadOptions, Model
from fsdp_optim.speed import speed_of
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer

_LOOKS = 5  # times, for a path where another checkpoint replaces the one that is being loaded

log = logging.getLogger("fsdp_optim")


def restore(
    path: Place,
    model: Model | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadOptions,
    format: Format | None = None,
    objects: TrainerObjects | None = None,
) -> Restored:
    """Load a checkpoint into a live model and optimizer. Called by all ranks of the model."""
    for _ in range(_LOOKS - 1):
        try:
            return _restore(path, model, optim, options, format, objects)
        except (
            ReplacedError
        ) as error:  # the same on all ranks, which now load the checkpoint that replaced the first one
            log.info("loading again: %s", error)
    return _restore(path, model, optim, options, format, objects)


def _restore(
    path: Place,
    model: Model | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadOptions,
    format: Format | None,
    objects: TrainerObjects | None,
) -> Restored:
    begun = time.monotonic()
    if model is None:
        if optim is not None:
            raise StateError("an optimizer needs the model that it was built from: give model= too")
        options.validate()
        pending.settle()
        store = with_cache(store_at(path, options=options.storage_options), options.local_cache)
        with closing(open_checkpoint(store, verify=options.verify, format=format)) as checkpoint:
            restored = read_extras(checkpoint, store, _position(options), options, format)
            restored.summary = LoadSummary(
                world_size=checkpoint.index.facts.world_size, step=checkpoint.index.facts.step
            )
            return restored
    with (
        collective_call("load", [model], options, options.call, all_of_plain=True) as ((reader,), group),
        ExitStack() as stack,
    ):
        about = f"{name_of(path)!r}, {'an' if optim is not None else 'no'} optimizer"
        pending.settle()
        store = with_cache(common_store(group, path, options.storage_options), options.local_cache)
        opened = open_on_all(group, store, options.compared_text(), verify=options.verify, format=format)
        checkpoint = stack.enter_context(closing(opened))
        check_halves(checkpoint.index, optim, options.weights)
        weights = Weights.agree_on_state(reader, group, checkpoint, options, about)
        state = State.agree_on_state(reader, optim, group, checkpoint, options, weights) if optim is not None else None
        restored = read_extras(checkpoint, store, group.position, options, format)
        trainers = Trainers(objects, restored) if objects is not None else None
        values = [*weights.stored_values(), *(state.stored_values() if state is not None else ())]
        total = sum(value.nbytes_on(group.rank) for value in values)
        failure = Failure()
        with Progress(options.progress, "loading", total, shown=group.rank == group.ranks[0]) as progress:
            host = group.budget.share(2, "copies of device memory on the host")
            source = CheckpointEnd(checkpoint, group.rank, host, progress.up_to, plans=group.world.plans)
            move(values, source, FlatsEnd(), group, group.budget, failure)
            shard = None
            with failure:
                if failure.error is None:
                    checkpoint.check_unchanged()
                    shard = state.dict_of() if state is not None else None
            agree(group, "read", failure.error, fatal=failure.fatal)
            progress.done()
        install_all(group, weights, reader, optim, shard, options.keep, trainers)
        if options.check == "bitwise":
            check_bitwise(reader, optim, group, checkpoint, weights, state, options)
    return _summarized(restored, checkpoint, weights, state, options, source.nbytes, group, len(values), begun)


def _position(options: LoadOptions) -> int:
    """The index of this process in process_group=, or in the whole job. It selects the `per_rank_extra` of the process."""
    world = world_here()
    position = world.group_rank(options.call.process_group)
    if position < 0:
        raise WrapperError(
            f"rank {world.rank} is not in process_group=, so it has no per_rank_extra there: give a group that contains this "
            "rank, or none"
        )
    return position


def _summarized(
    restored: Restored,
    checkpoint: Reader,
    weights: Weights,
    state: State | None,
    options: LoadOptions,
    nbytes: int,
    group: RankGroup,
    num_tensors: int,
    begun: float,
) -> Restored:
    absent = state.absent if state is not None else ()
    if state is not None:
        restored.unmatched_hyperparameters, restored.unmatched_values = (
            state.fit.unmatched_hyperparameters,
            state.fit.unmatched_values,
        )
    restored.missing = _each_once(weights.missing, state.fit.missing if state is not None else ())
    restored.unexpected = _each_once(weights.unexpected, state.fit.unexpected if state is not None else ())
    restored.summary = LoadSummary(
        num_tensors, nbytes, absent, checkpoint.index.facts.world_size, checkpoint.index.facts.step
    )
    if group.rank == group.ranks[0]:
        log.info(
            "loaded %s, saved by %d ranks, on %d: %d tensors, %d bytes read on this rank, in %s; without optimizer state: %s",
            checkpoint.index.where,
            restored.summary.world_size,
            len(group.ranks),
            num_tensors,
            nbytes,
            speed_of(nbytes, begun),
            shortened(absent) or "none",
        )
    return restored


def _each_once(*names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for listed in names for name in listed))
