"""The proof that a load would accept a save: runs the checks of a load on the save, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_optim.checkpoint.common.contents import SavedHalf, SavedValue
from fsdp_optim.checkpoint.common.optim_description import full_dict
from fsdp_optim.checkpoint.load.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.layout import Shape
from fsdp_optim.memory import dtype_name
from fsdp_optim.state.dicts.dialects import normalize
from fsdp_optim.state.live.local_dict import summarize


@dataclass(frozen=True)
class _PlannedFiles:
    """The `StateFiles` of a save that is not written yet. Its tensors have no elements, except for scalars."""

    by_key: Mapping[str, SavedValue]

    def described(self, key: str) -> tuple[Shape, str]:
        tensor = self.by_key[key]
        return tensor.placement.shape, dtype_name(tensor.dtype)

    def constants(self, keys: Sequence[str]) -> list[torch.Tensor]:
        values = (self.by_key[key] for key in keys)
        return [
            value.constant
            if value.constant is not None
            else torch.zeros((), dtype=value.dtype, device="cpu").expand(value.placement.shape)
            for value in values
        ]


def prove_loadable(state: SavedHalf, description: OptimDescription, given: Mapping[str, str]) -> None:
    """Fit the description of the optimizer, as a reader decodes it, to the live optimizer.

    `given`: the model's names of parameters that are saved under others, by these.

    Raises CheckpointError that names the value which could not be loaded.
    """
    try:
        live = state.local.live_optimizer(state.global_state)
        live = replace(live, names=replace(live.names, given={**live.names.given, **given}))
        with as_checkpoint_error("the optimizer"):
            by_key = {value.stored_name: value for value in state.tensors}
            as_dict = full_dict(_PlannedFiles(by_key), description, live.names, {}, live.off_mesh)
        full, _ = live.fit(normalize(as_dict, live.names), strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
