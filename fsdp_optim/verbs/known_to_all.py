"""What only some ranks know of a model, known to all of them once they have agreed: shards, and other names of tied weights."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from fsdp_optim.state.live.local import LocalOptim
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.view import ModelView, NamedHandle


def with_all_names(view: ModelView, global_state: GlobalState) -> ModelView:
    """Return a view with the other names of tied parameters that only other ranks have, such as those of a pipeline stage."""
    if global_state.aliases.keys() <= view.aliases.keys():
        return view  # nearly always
    here = {*view.order, *view.aliases, *global_state.params}
    of_others = {alias: fqn for alias, fqn in global_state.aliases.items() if alias not in here}
    return replace(view, aliases={**view.aliases, **of_others})


def with_all_listed(view: ModelView, optim: LocalOptim, global_state: GlobalState) -> tuple[ModelView, LocalOptim]:
    """Return both with the shards of all ranks, where an adapter knows only the shards of its own rank."""
    listed, params = dict[int, NamedHandle](), global_state.params
    placements = {id(each.placement): each.placement for named in view.handles for each in named.handle.originals}
    open_ids = {key for key, placement in placements.items() if placement.is_open}
    for named in view.handles if open_ids else ():
        if open_ids.isdisjoint([id(original.placement) for original in named.handle.originals]):
            continue
        originals = tuple(
            structs.replace(original, placement=params[fqn].placement) if fqn in params else original
            for fqn, original in zip(named.fqns, named.handle.originals, strict=True)
        )
        listed[id(named)] = structs.replace(named, handle=replace(named.handle, originals=originals))
    if not listed:
        return view, optim
    handles = tuple(listed.get(id(named), named) for named in view.handles)
    live = tuple(structs.replace(param, named=listed.get(id(param.named), param.named)) for param in optim.params)
    return replace(view, handles=handles), replace(optim, params=live)
