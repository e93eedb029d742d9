"""The Views of a model that its modules' own hooks show: `views="hooks"`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.state_dict_hooks import HookedUnit
from fsdp_optim.layout.views import View
from fsdp_optim.model_views.hooks import flow_of, learned_views
from fsdp_optim.model_views.kinds import kind_of
from fsdp_optim.model_views.patterns import Draft, joined
from fsdp_optim.model_views.running import refusal
from fsdp_optim.options import NameOf
from fsdp_optim.view import ModelView

log = logging.getLogger("fsdp_optim")


def views_of_hooks(reader: ModelReader, view: ModelView, name_of: NameOf | None = None) -> list[View]:
    """Return Views of all parameters that hooks of this rank's modules rename, cut or permute. Empty where none do.

    Args:
        reader: the reader of the model.
        view: the model as this reader has read it.
        name_of: gives names in the job, of live parameters and of their parts.

    Raises:
        WrapperError: hooks do something else with a parameter, or what they may not; names the module, the hooks and the fix.
    """
    learned: dict[object, tuple[HookedUnit, list[Draft]]] = {}
    drafts: list[Draft] = []
    for unit in reader.hooked_units(view, name_of):
        kind = kind_of(unit), flow_of(unit)
        known = _moved_to(unit, *learned[kind]) if kind in learned else None
        if known is None:
            known = [Draft.of(each) for each in learned_views(unit)]
            learned[kind] = unit, known
        drafts += _named(unit, known)
    result = joined(drafts, {*view.order, *view.aliases, *reader.buffer_fqns}) if drafts else []
    if result:
        log.debug("learned from state-dict hooks: %s", "; ".join(map(repr, result)))
    return result


def _moved_to(unit: HookedUnit, other: HookedUnit, drafts: list[Draft]) -> list[Draft] | None:
    """Return the Views of an equal unit for this one. None where these have names outside of their unit."""
    there = [draft.moved(other.outermost.prefix, unit.outermost.prefix) for draft in drafts]
    return [draft for draft in there if draft is not None] if None not in there else None


def _named(unit: HookedUnit, drafts: list[Draft]) -> Iterator[Draft]:
    """Yield Views with the names that the parameters have in the job, by every path to the modules."""
    for draft in drafts:
        tensor = unit.tensors[draft.name]
        if tensor.name is None:
            raise refusal(unit, f"{draft.name} is a buffer, whose name with name_of= is not known", [draft.name])
        yield draft.named(tensor.named) if tensor.named is not str else draft
        for path in unit.other_paths:
            other = draft.moved(unit.outermost.prefix, f"{path}." if path else "")
            if other is not None:
                yield other.named(tensor.named) if tensor.named is not str else other
