"""Prove that a load would accept a save: run the checks of a load on the save, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.checkpoint.load.stored_state import StoredState, check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.index import StoredOptim
from fsdp_optim.formats.base.saved_optim import saved_optim
from fsdp_optim.state.live.fitting import LiveOptimizer
from fsdp_optim.state.live.local_dict import summarize


def prove_loadable(
    state: SavedHalf, optim: StoredOptim, description: OptimDescription, given: Mapping[str, str]
) -> None:
    """Fit the saved optimizer, as a reader of the new checkpoint will decode it, to the live optimizer.

    `optim`: the optimizer of the index to write. `description`: its encoded form, as a reader decodes it. `given`: by the names
    in the checkpoint, the model's names of parameters that are saved under other names.

    Raises CheckpointError that names the value which could not be loaded.
    """
    where = "the new checkpoint"
    try:
        live = state.local.live_optimizer(state.global_state)
        if not given and _lists_alike(description, live):
            # Whether a load accepts a parameter depends on its kind alone.
            kept = state.global_state.one_of_each_kind(live.names.units, live.on_mesh)
            description, live = _with_params(description, kept), live.with_params(kept)
        live = replace(live, names=replace(live.names, given={**live.names.given, **given}))
        saved = saved_optim(where, description, optim.tensors)
        loaded = StoredState.resolved(where, saved, live.names, live.shapes, optim.read_small, live.off_mesh)
        full, _ = live.fit(loaded.full, strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _lists_alike(description: OptimDescription, live: LiveOptimizer) -> bool:
    """Return whether the saved optimizer has the parameters of the live one, by the same names, in the same groups and order."""
    return tuple(group.params for group in description.groups) == live.names.groups


def _with_params(description: OptimDescription, kept: Set[str]) -> OptimDescription:
    """Return the description of some parameters alone."""
    groups = tuple(
        [replace(group, params=tuple(filter(kept.__contains__, group.params))) for group in description.groups]
    )
    return replace(
        description, groups=groups, params={fqn: description.params[fqn] for fqn in description.params if fqn in kept}
    )
