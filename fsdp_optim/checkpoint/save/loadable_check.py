"""Prove that a load would accept a save: run the checks of a load on the save, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.checkpoint.load.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.index import StoredOptim
from fsdp_optim.formats.base.saved_optim import saved_optim
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
        live = replace(live, names=replace(live.names, given={**live.names.given, **given}))
        saved = saved_optim(where, description, optim.tensors)
        loaded = StoredState.resolved(where, saved, live.names, live.shapes, optim.read_small, live.off_mesh)
        full, _ = live.fit(loaded.full, strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
