"""Load: from the files of a checkpoint to a live model and optimizer. Every rank reads and verifies its own bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import NamedTuple

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import Place, common_store, name_of, store_at, with_cache
from fsdp_optim.checkpoint.load.cast_range import check_trees, check_weights
from fsdp_optim.checkpoint.load.chosen_models import chosen_models, seen_by
from fsdp_optim.checkpoint.load.compare import check_bitwise, check_trees_alone
from fsdp_optim.checkpoint.load.halves import check_halves
from fsdp_optim.checkpoint.load.installing import install_all, install_objects_alone
from fsdp_optim.checkpoint.load.loaded_objects import LoadedObjects
from fsdp_optim.checkpoint.load.opening import open_on_all
from fsdp_optim.checkpoint.load.proving import check_prints, prints_in
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, FlatsEnd, Sizes
from fsdp_optim.checkpoint.load.receipt import receipt_of, warn_of_new_ranks
from fsdp_optim.checkpoint.load.resharded_state import RanksHere
from fsdp_optim.checkpoint.load.saved_state import SavedState, read_state
from fsdp_optim.checkpoint.load.shared_memory import check_shared
from fsdp_optim.checkpoint.load.targets import State, Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.errors import StateError, WrapperError
from fsdp_optim.formats.base.protocols import OpenedAs, Reader
from fsdp_optim.move import move
from fsdp_optim.options import Model
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.saying import say
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer
from fsdp_optim.verbs.seen import views_of_all


def restore(
    path: Place,
    model: Model | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadArguments,
    format: OpenedAs = None,
    objects: LoadedObjects | None = None,
    *,
    done: str = "loaded",
    alone: bool = False,
) -> LoadResult:
    """Load a checkpoint into a live model and optimizer. Called by all ranks of the model.

    `objects`: those of a CheckpointManager, with random states. It says itself what the load has done, by their `receipt`, when
    it has set these. None: those that the options have. `done`: the first word of the line that says it. `alone`: this rank
    makes the call by itself, for a model without a wrapper.
    """
    # The only retry of a load. The error is the same on all ranks, which now load the checkpoint that replaced the first one.
    loaded = objects or LoadedObjects.of(options)
    result = retry_if_replaced(lambda: _restore(path, model, optim, options, format, loaded, of_all=not alone))
    if objects is None and loaded.receipt and not options.silent:
        say(f"{done} {loaded.receipt}")
    return result


def _restore(
    path: Place,
    model: Model | None,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: LoadArguments,
    format: OpenedAs,
    objects: LoadedObjects,
    *,
    of_all: bool,
) -> LoadResult:
    begun = time.monotonic()
    if model is None:
        if optim is not None:
            raise StateError("an optimizer needs the model that it was built from: give model= too")
        return _restore_alone(path, options, format, objects)
    with (
        collective_call("load", [model], options, options.call, all_of_plain=of_all) as ((reader,), group),
        ExitStack() as stack,
    ):
        about = f"{name_of(path)!r}, {'an' if optim is not None else 'no'} optimizer"
        pending.settle()
        store = with_cache(common_store(group, path, options.storage_options), options.local_cache)
        opened = open_on_all(group, store, options.compared_text(), verify=options.verify, format=format)
        views = views_of_all(reader, group, options.call)
        checkpoint, options = seen_by(chosen_models(stack.enter_context(closing(opened)), options), options, views)
        check_halves(checkpoint.index, optim, options.weights, has_state=options.state.is_given)
        weights = Weights.agree_on_state(reader, group, checkpoint, options, about)
        state = State.agree_on_state(reader, optim, group, checkpoint, options, weights) if optim is not None else None
        saved = read_state(checkpoint, store, group.position, options, format)
        saved = objects.check(saved, RanksHere(group.position, len(group.ranks)), checkpoint.index.where)
        trees = None
        if objects.has_trees:
            stored = checkpoint.index.trees
            trees = TreeTargets.agree_on_state(group, objects.targets, stored, options, objects.of_objects)
        objects.remember()
        values = [value for half in (weights, state, trees) if half is not None for value in half.stored_values()]
        sizes = Sizes(values)
        total = sizes.nbytes_on(group.rank)
        failure = Failure()
        with Progress(options.progress, "loading", total, shown=group.rank == group.ranks[0]) as progress:
            host = group.budget.share(2, "copies of device memory on the host")
            source = CheckpointEnd(checkpoint, group.rank, host, progress.up_to, plans=group.world.plans)
            move(values, source, FlatsEnd(), group, group.budget, failure)
            shard = None
            with failure:
                if failure.error is None:
                    checkpoint.check_unchanged()
                    prints_in(checkpoint, options)  # which may be damaged
                    _check_read(weights, trees, objects, options, group.rank)
                    shard = state.dict_of() if state is not None else None
                    objects.fill(checkpoint, trees.tensors(but=objects.in_place) if trees is not None else {})
            agree(group, "read", failure.error, fatal=failure.fatal)
            progress.done()
        install_all(
            group, weights, reader, optim, shard=shard, keep=options.keep_hyperparameters, objects=objects, trees=trees
        )
        halves = _Halves(weights, state, trees)
        num_proven = _check_loaded(reader, optim, group, checkpoint, options, halves=halves, objects=objects)
    small = state.small_tensors if state is not None else ()
    num_tensors = len(values) + len(small)
    result = _summarized(_result(saved, objects, checkpoint), weights, state, source.nbytes, num_tensors)
    if group.rank == group.ranks[0]:
        nbytes = sizes.nbytes + sum(value.nbytes for value in small)
        objects.receipt = receipt_of(
            result, checkpoint, group, options, objects, nbytes=nbytes, begun=begun, wrapper=reader.wrappers
        )
        objects.receipt = replace(objects.receipt, num_proven=num_proven)
    warn_of_new_ranks(checkpoint, group, objects)
    return replace(result, receipt=objects.receipt)


def _check_read(
    weights: Weights | None, trees: TreeTargets | None, objects: LoadedObjects, options: LoadArguments, rank: int
) -> None:
    """Raise StateError for elements that were read and cannot be in the live tensors as they are in the checkpoint."""
    if options.cast and weights is not None:
        check_weights(weights)
    if options.cast and trees is not None:
        check_trees(trees, objects.in_place)
    if options.call.strict:
        check_shared(weights, trees, objects.in_place if trees is not None else (), rank)


class _Halves(NamedTuple):
    """What a load has read."""

    weights: Weights
    state: State | None
    trees: TreeTargets | None


def _check_loaded(
    reader: ModelReader,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    group: RankGroup,
    checkpoint: Reader,
    options: LoadArguments,
    *,
    halves: _Halves,
    objects: LoadedObjects,
) -> int:
    """Compare what was loaded with the fingerprints, and with the files, as the options ask for it. Called by all ranks.

    Returns the number of values that fingerprints prove.
    """
    num_proven = check_prints(reader, optim, group, checkpoint, options, **halves._asdict(), objects=objects)
    if options.compare:
        check_bitwise(reader, optim, group, checkpoint, **halves._asdict(), options=options)
    return num_proven


def _restore_alone(path: Place, options: LoadArguments, format: OpenedAs, objects: LoadedObjects) -> LoadResult:
    """Load the values of the trainer on this process. No communication."""
    options.validate()
    pending.settle()
    store = with_cache(store_at(path, options=options.storage_options), options.local_cache)
    with closing(open_checkpoint(store, verify=options.verify, format=format)) as checkpoint:
        here = _ranks_here(options)
        saved = read_state(checkpoint, store, here.position, options, format)
        saved = objects.check(saved, here, checkpoint.index.where)
        saved.warn_of_absent(here.position, checkpoint)
        trees = None
        if objects.targets:
            stored = checkpoint.index.trees
            trees = TreeTargets.alone(world_here().rank, objects.targets, stored, objects.of_objects)
            trees.read_alone(checkpoint)
            _check_read(None, trees, objects, options, world_here().rank)
        objects.fill(checkpoint, trees.tensors(but=objects.in_place) if trees is not None else {})
        install_objects_alone(objects)
        if trees is not None:
            trees.install(objects.in_place)
            if options.compare:
                check_trees_alone(checkpoint, trees, castable=options.cast)
        objects.fill_small()
        return _result(saved, objects, checkpoint)


def _ranks_here(options: LoadArguments) -> RanksHere:
    """The place of this process in process_group=, or in the job. It selects the values that the process has of its own."""
    world, process_group = world_here(), options.call.process_group
    position = world.group_rank(process_group)
    if position < 0:
        raise WrapperError(
            f"rank {world.rank} is not in process_group=, so it has no values of its own there: give a group that contains "
            "this rank, or none"
        )
    return RanksHere(position, world.size if process_group is None else len(world.ranks_of(process_group)))


def _result(saved: SavedState, objects: LoadedObjects, checkpoint: Reader) -> LoadResult:
    """The result of a load of the trainer's values."""
    return LoadResult(
        objects.by_name,
        checkpoint.index.facts.step,
        checkpoint.index.facts.world_size,
        objects.missing_keys,
        objects.unexpected_keys,
        read_all_ranks=saved.read_all_ranks,
    )


def _summarized(result: LoadResult, weights: Weights, state: State | None, nbytes: int, num_tensors: int) -> LoadResult:
    """The result of a load of a model, and of an optimizer."""
    fit = state.fit if state is not None else None
    return replace(
        result,
        missing_keys=_each_once(weights.missing, fit.missing if fit is not None else (), result.missing_keys),
        unexpected_keys=_each_once(
            weights.unexpected, fit.unexpected if fit is not None else (), result.unexpected_keys
        ),
        unmatched_hyperparameters=fit.unmatched_hyperparameters if fit is not None else (),
        unmatched_values=fit.unmatched_values if fit is not None else (),
        absent=state.absent if state is not None else (),
        begun_anew=fit.begun_anew if fit is not None else (),
        num_tensors=num_tensors,
        nbytes=nbytes,
    )


def _each_once(*names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for listed in names for name in listed))
