"""The Views of everything that is known of a model: by its hooks first, then by what is known of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import StateError
from fsdp_optim.layout.views import View, ViewsByName
from fsdp_optim.model_views.of_hooks import views_of_hooks
from fsdp_optim.options import Model, NameOf

_LEARNERS = (
    "fsdp_optim.model_views.transformers_models:views_of_transformers",
    "fsdp_optim.model_views.megatron_models:views_of_megatron",
)
"""Functions from a model to its Views, empty for a model that they do not know. Each imports what it needs when it is called."""


def known_views(model: Model) -> list[View]:
    """Return the Views of a model by its hooks, and by every learner, of parameters that no View before them is of."""
    reader = ModelReader(model)
    view = reader.read()
    views = views_of_hooks(reader, view)
    names = (*view.order, *view.aliases, *reader.buffer_fqns)
    for learner in _learners():
        known = ViewsByName(views)
        taken = [name for name in names if known.of(name)]
        views += [each for each in learner(model) if not any(map(each.matches, taken))]
    return views


def learned_by(source: str, reader: ModelReader, ranks: tuple[int, ...], name_of: NameOf | None) -> list[View]:
    """Return the Views that a call learns from this rank's model: by "hooks", or as the files of the "hub" name them.

    Raises:
        WrapperError, LayoutError: as for `views_of_hooks` and `views_of_transformers`.
        StateError: `name_of` gives names that the hub does not know.
    """
    if source == "hooks":
        return views_of_hooks(reader, reader.read(ranks, name_of), name_of)
    if name_of is not None:
        raise StateError(
            "views='hub' has the names of transformers' files, and name_of= gives parameters others: leave one of the two out"
        )
    from fsdp_optim.model_views.transformers_models import views_of_files  # here, because few calls need it

    return views_of_files(reader)


def _learners() -> Iterator[Any]:
    for place in _LEARNERS:
        module, _, name = place.partition(":")
        yield getattr(import_module(module), name)
