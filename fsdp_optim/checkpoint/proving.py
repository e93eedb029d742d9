"""A save proves that a load would take it: the reader's own checks, on what is about to be written, before anything is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.checkpoint.contents import RECORDS, Half, SavedValue
from fsdp_optim.checkpoint.described import full_dict
from fsdp_optim.checkpoint.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.description import decoded
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.json_text import check_density, parse_json
from fsdp_optim.formats.marker import MOST_NBYTES
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


def prove_loadable(state: Half, encoded: Any, tensors: Sequence[torch.Tensor], *, allow_pickle: bool) -> None:
    """Read what will be said of the optimizer, and fit it to the live optimizer. `tensors`: those beside the JSON.

    Raises CheckpointError that names what could not be loaded.
    """
    where = "the optimizer"
    text = json.dumps(encoded, separators=(",", ":")).encode()
    if not tensors:
        check_density(where, text)
    if not tensors and len(text) > MOST_NBYTES // 2:
        params = encoded["params"]
        largest = max(params, key=lambda fqn: len(json.dumps(params[fqn])))
        raise CheckpointError(
            f"{largest}: what is said of its state is the most of {len(text)} bytes, and a reader takes {MOST_NBYTES // 2}: keep "
            "large values as tensors"
        )
    try:
        read = decoded(where, parse_json(where, text), tensors, allow_pickle=allow_pickle, records=RECORDS)
        live = state.local.live_optimizer(state.picture)
        with distrusted(where):
            given = full_dict(_Planned({one.stored_name: one for one in state.tensors}), read, live.names, {})
        full, _ = live.fit(normalize(given, live.names), strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
