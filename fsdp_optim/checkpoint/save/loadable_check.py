"""The proof that a load would accept a save: runs the checks of a load on the save, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.checkpoint.load.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.saved_optim import saved_optim
from fsdp_optim.memory import dtype_name
from fsdp_optim.state.live.local_dict import summarize


def prove_loadable(state: SavedHalf, description: OptimDescription, given: Mapping[str, str]) -> None:
    """Fit the optimizer of the index that a reader of the new checkpoint would have to the live optimizer.

    `description`: as a reader decodes it. `given`: the model's names of parameters that are saved under others, by these.

    Raises CheckpointError that names the value which could not be loaded.
    """
    by_key = {value.stored_name: value for value in state.tensors}

    def read(stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
        """The tensors without elements, except for scalars."""
        values = (by_key[tensor.key] for tensor in stored)
        return [
            value.constant
            if value.constant is not None
            else torch.zeros((), dtype=value.dtype, device="cpu").expand(value.placement.shape)
            for value in values
        ]

    try:
        live = state.local.live_optimizer(state.global_state)
        names = replace(live.names, given={**live.names.given, **given})
        saved = saved_optim("the new checkpoint", description, _stored_tensors(state))
        found = StoredState.resolve("the new checkpoint", saved, names, live.shapes, read, live.off_mesh)
        full, _ = replace(live, names=names).fit(found.full, strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _stored_tensors(state: SavedHalf) -> dict[str, StoredTensor]:
    """The tensors of the index that would be written, by key. Their places in files are not known yet."""
    return {
        value.stored_name: StoredTensor(
            value.stored_name, dtype_name(value.dtype), value.placement.shape, "the new file", 0
        )
        for value in state.tensors
    }
