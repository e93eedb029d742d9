"""A save proves that a load would take it: the reader's own checks, on what is about to be written, before anything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.checkpoint.contents import Half, SavedValue
from fsdp_optim.checkpoint.described import full_dict
from fsdp_optim.checkpoint.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.description import OptimDescription
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.layout import Shape
from fsdp_optim.memory import dtype_name
from fsdp_optim.state.dialects import normalize
from fsdp_optim.state.shard import summarize


@dataclass(frozen=True)
class _Planned:
    """The tensors of the optimizer's state, as they will be in the files: without their elements, but for scalars."""

    by_key: Mapping[str, SavedValue]

    def described(self, key: str) -> tuple[Shape, str]:
        tensor = self.by_key[key]
        return tensor.placement.shape, dtype_name(tensor.dtype)

    def constants(self, keys: Sequence[str]) -> list[torch.Tensor]:
        found = (self.by_key[key] for key in keys)
        return [
            one.constant
            if one.constant is not None
            else torch.zeros((), dtype=one.dtype, device="cpu").expand(one.placement.shape)
            for one in found
        ]


def prove_loadable(state: Half, description: OptimDescription) -> None:
    """Fit what a reader will make of the optimizer's description to the live optimizer.

    Raises CheckpointError that names what could not be loaded.
    """
    try:
        live = state.local.live_optimizer(state.picture)
        with distrusted("the optimizer"):
            given = full_dict(_Planned({one.stored_name: one for one in state.tensors}), description, live.names, {})
        full, _ = live.fit(normalize(given, live.names), strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
