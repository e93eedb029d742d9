"""The end of a load: install what was read into the live model, optimizer and objects, on all ranks or on none.

Values of modules, the trainer's objects and the optimizer come first, because each of them may refuse, and gets back its previous
state where a later one does. Weights and trees come last: they are written in place, so that the memory stays bounded, and their
previous elements are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.load.loaded_objects import LoadedObjects
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.errors import StateError
from fsdp_optim.state.live.local_dict import Shard
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import RANK_ERRORS, Failure
from fsdp_optim.verbs.load_state import Before, LoadableOptimizer, load_on_all


def install_all(
    group: RankGroup,
    weights: Weights,
    reader: ModelReader,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    shard: Shard | list[Shard] | None,
    keep: Sequence[str],
    objects: LoadedObjects | None,
    trees: TreeTargets | None = None,
) -> None:
    """Install everything. If a rank fails, all but the weights and trees are as they were, on all ranks."""
    with ExitStack() as undo:
        undo.callback(weights.module_values.put_back, install_values(group, weights))
        if objects is not None and objects.has_names:
            undo.callback(objects.put_back)
            _install_objects(group, objects)
        if optim is not None and shard is not None:
            before = Before([*optim] if isinstance(optim, (list, tuple)) else [optim])  # type: ignore[list-item]
            load_on_all(group, optim, shard, keep, before)
            undo.callback(before.put_back)
        _install_weights(group, weights, reader, trees, objects)
        undo.pop_all()


def _install_objects(group: RankGroup, objects: LoadedObjects) -> None:
    """Load the objects of the trainer on all ranks."""
    failure = Failure()
    with failure:
        objects.install()
    agree(group, "objects loaded", failure.error)


def install_objects_alone(objects: LoadedObjects) -> None:
    """Load the objects of the trainer on this rank alone. A failure restores their previous states."""
    objects.remember()
    try:
        objects.install()
    except BaseException:
        objects.put_back()
        raise


def install_values(group: RankGroup, weights: Weights) -> dict[str, Any]:
    """Load the values of modules on all ranks. If a module refuses on any rank, all modules get back their previous values.

    Returns the previous values.
    """
    if not weights.global_state.module_values and not weights.global_state.extra_state_loaders:
        return {}
    failure, previous = Failure(), weights.module_values.before()
    with failure:
        weights.module_values.install()
    try:
        agree(group, "modules loaded", failure.error)
    except BaseException:
        weights.module_values.put_back(previous)
        raise
    return previous


def _install_weights(
    group: RankGroup, weights: Weights, reader: ModelReader, trees: TreeTargets | None, objects: LoadedObjects | None
) -> None:
    """Write the weights into the model, and the tensors of trees into those of the caller, on all ranks."""
    try:
        if trees is not None:
            trees.install(objects.in_place if objects is not None else ())
        if objects is not None:
            objects.fill_small()
        weights.install()
        reader.reshard()
    except RANK_ERRORS as error:
        mixture = StateError(
            f"the weights could not be written into the model: {type(error).__name__}: {error}; the model is a mixture now: "
            "some of its weights are the previous ones, some those of the checkpoint. The optimizer and the other objects "
            "have their previous state: load again before you train or save"
        )
        try:
            agree(group, "installed", mixture)
        finally:
            if not isinstance(error, Exception):
                error.on_all_ranks = True  # type: ignore[union-attr]
                raise error
        raise
    agree(group, "installed")
