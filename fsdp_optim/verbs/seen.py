"""A model as a call sees it: through the Views that it was given, or that it learns from the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fsdp_optim.adapters import ModelReader
from fsdp_optim.canonical import IsWhole, seen_through
from fsdp_optim.options import CallArguments, CallOptions
from fsdp_optim.transport.agree import exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.view import ModelView

if TYPE_CHECKING:
    from fsdp_optim.layout.views import View


def seen_by(
    reader: ModelReader,
    view: ModelView,
    options: CallArguments,
    others: Collection[str] = (),
    is_whole: IsWhole | None = None,
) -> ModelView:
    """Return a model as seen through the Views of a call, which are given or learned from the model. No communication.

    Args:
        others: names of the model that are not in `view`, such as buffers.
        is_whole: says which parameters stay as they are, in spite of their Views.
    """
    return seen_through(view, _views_of(reader, view.ranks, options), others, is_whole)


def views_of_all(reader: ModelReader, group: RankGroup, options: CallOptions) -> Sequence[View]:
    """Return the Views of a call: those that it was given, or those that any rank learns. Called by all ranks of `group`."""
    if not isinstance(options.views, str):
        return tuple(options.views)
    from fsdp_optim.layout.views import View  # here, so that the command line does not load it

    own = [repr(view) for view in _views_of(reader, group.ranks, options)]
    reports = exchange_reports(group, json.dumps(own).encode())
    return tuple(
        View.from_text(text) for text in dict.fromkeys(text for report in reports for text in json.loads(report))
    )


def _views_of(reader: ModelReader, ranks: tuple[int, ...], options: CallOptions) -> Sequence[View]:
    """Return the Views of this rank."""
    source = options.views
    if not isinstance(source, str):
        return tuple(source)
    if source not in reader.learned:
        from fsdp_optim.model_views import learned_by  # here, because few calls need it

        reader.learned[source] = tuple(learned_by(source, reader, ranks, options.name_of))
    return reader.learned[source]
