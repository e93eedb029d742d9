"""The place of a checkpoint's model in a state dict that is loaded, which may have the dicts of several models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.records import PLANNED

Place: TypeAlias = "tuple[str, ...]"


def record_of(index: CheckpointIndex) -> Mapping[str, Any]:
    """Return what a save of a state dict has recorded about its places: "model" and "optim"; of a `Writer`, its keys."""
    record = index.extras[PLANNED].decoded(allow_pickle=False) if PLANNED in index.extras else None
    return record if isinstance(record, Mapping) else {}


@dataclass(frozen=True)
class ModelPlaces:
    """The places of a model in a state dict. `names`: by place, the likeliest first, the names of the tensors there."""

    names: Mapping[Place, Collection[str]]

    def place_of(
        self, index: CheckpointIndex, weights: Collection[str], is_taken: Callable[[Place], bool]
    ) -> Place | None:
        """Return the place for the weights of a checkpoint; None where the state dict has no model, or none is free.

        It is that of the save, if the state dict has one of these names there, else the likeliest one that is free.

        Args:
            weights: their names in the state dict.
            is_taken: whether the checkpoint has tensors of the trainer at a place.
        """
        saved = record_of(index).get("model")
        at_save = tuple(map(str, saved)) if isinstance(saved, (list, tuple)) else None
        if at_save is not None and any(name in weights for name in self.names.get(at_save, ())):
            return at_save
        return next((place for place in self.names if not place or not is_taken(place)), None)
