"""Models of transformers whose files have other names than `state_dict()`: version 5 renames, splits and joins weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from torch import nn

_MODELS, _MAPPINGS = "transformers.modeling_utils", "transformers.conversion_mapping"


class StoredNames(Struct, frozen=True):
    """A model whose files have other names. `pairs`: (part of a name in its files, part of a name in the model)."""

    class_name: str
    pairs: tuple[tuple[str, str], ...]


def stored_names_of(modules: Iterable[nn.Module]) -> StoredNames | None:
    """Return the stored names of the first transformers model, if they differ; None otherwise, and for versions before 5."""
    models, mappings = sys.modules.get(_MODELS), sys.modules.get(_MAPPINGS)
    base = getattr(models, "PreTrainedModel", None)
    mapping_of = getattr(mappings, "get_model_conversion_mapping", None)
    if base is None or mapping_of is None:
        return None
    model = next((module for module in modules if isinstance(module, base)), None)
    if model is None:
        return None
    pairs = []
    for transform in mapping_of(model, add_legacy=False):
        stored, live = (getattr(transform, name, []) for name in ("source_patterns", "target_patterns"))
        pairs.append((" and ".join(map(_plain, stored)), " and ".join(map(_plain, live))))
    names = [cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers.")]
    return StoredNames(names[0], tuple(pairs)) if pairs else None


def transforms_of(model: nn.Module, seen_as: object) -> list[Any]:
    """Return how transformers converts the weights of its files to those of a model: as when it opened them, or by default.

    `seen_as`: what the default is looked up for, with the attributes of the model.
    """
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = sys.modules[_MAPPINGS].get_model_conversion_mapping(seen_as, add_legacy=False)
    return list(transforms)


def _plain(pattern: object) -> str:
    return str(pattern).replace("\\", "").strip(".^$")
