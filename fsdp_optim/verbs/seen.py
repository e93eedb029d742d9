"""A model as a call sees it: through the Views that it was given, or that it learns from the model."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_optim.adapters import ModelReader
from fsdp_optim.canonical import seen_through
from fsdp_optim.options import CallArguments
from fsdp_optim.view import ModelView


def seen_by(reader: ModelReader, view: ModelView, options: CallArguments, others: Collection[str] = ()) -> ModelView:
    """Return a model as it is seen through the Views of a call, which `views="hooks"` learns from it. No communication.

    Args:
        others: names of the model that are not in `view`, such as buffers.
    """
    if options.views != "hooks":
        return seen_through(view, options.views, others)
    if reader.learned is None:
        from fsdp_optim.model_views import views_of_hooks  # here, because few calls need it

        read = reader.read(view.ranks, options.name_of)
        reader.learned = tuple(views_of_hooks(reader, read, options.name_of))
    return seen_through(view, reader.learned, others)
