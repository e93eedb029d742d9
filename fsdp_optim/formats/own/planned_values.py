"""The values of the trainer in a checkpoint that torch's planner has filled, which has pickled the objects among them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import StoredExtra
from fsdp_optim.formats.base.records import COMMON, PLANNED


@dataclass(frozen=True)
class PlannedValues(StoredExtra):
    """The values of the trainer. An object that torch has pickled is made by `allow_pickle=True` alone, as any other pickle.

    Attributes:
        where: the checkpoint.
        kept: the values as the file has them, with torch's bytes in the place of such an object.
        record: the record of the save. Its "raw" are the keys of these objects, its "paths" the places of all keys.
    """

    where: str
    kept: StoredExtra
    record: StoredExtra

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.decoded(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=False)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.decoded_each(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=True)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.as_tree(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=True)

    def _made(self, values: Any, *, allow_pickle: bool, each: bool) -> Any:
        """Return the values with the objects. `each`: those that are not allowed are withheld, and raise nothing."""
        for path in self._pickled():
            name = ".".join(map(str, path))
            with as_checkpoint_error(f"{self.where}: {name}"):
                if allow_pickle:
                    values = _replaced(values, path)
                    continue
                why = (
                    f"{self.where}: {name}: is an object that torch's planner has pickled: allow_pickle=True makes it, and can "
                    "run any code of its author"
                )
                if not each:
                    raise CheckpointError(why)
                values = {**values, path[0]: Withheld(why)}
        return values

    def _pickled(self) -> list[Sequence[str | int]]:
        """Return the paths of the objects that torch has pickled."""
        with as_checkpoint_error(f"{self.where}: the record of its keys"):
            record = self.record.decoded(allow_pickle=False)
            raw = record.get("raw", ()) if isinstance(record, Mapping) else ()
            return [record["paths"][key] for key in raw]


def planned_extras(where: str, extras: Mapping[str, StoredExtra]) -> Mapping[str, StoredExtra]:
    """Return the extras of a checkpoint, with `PlannedValues` where they have the record of a planner's save."""
    if COMMON not in extras or PLANNED not in extras:
        return extras
    return {**extras, COMMON: PlannedValues(where, extras[COMMON], extras[PLANNED])}


def _replaced(tree: Any, path: Sequence[str | int]) -> Any:
    """Return a tree with the object in the place of torch's bytes, which are at a path."""
    if not path:
        return torch.load(io.BytesIO(tree), map_location="cpu", weights_only=False)
    first, *rest = path
    inner = _replaced(tree[first], rest)
    if isinstance(tree, Mapping):
        return {**tree, first: inner}
    return [inner if number == first else item for number, item in enumerate(tree)]
