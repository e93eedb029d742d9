"""The optimizer that a full dict was made for, on this rank, where the caller has none to show."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.errors import StateError
from fsdp_optim.state.fits import group_of_unit
from fsdp_optim.state.local import LocalOptim, LocalParam
from fsdp_optim.state.reading import FullState
from fsdp_optim.view import ModelView, NamedHandle


def expected_optimizer(view: ModelView, full: FullState, *, others: bool = False) -> LocalOptim:
    """An optimizer with the full state's groups over the model's live parameters.

    Ids count as torch.optim counts: group after group. Inside a group they follow the saved local ids where the model has
    the same units as when it was saved, else the order of the wrapped model's parameters(). `others`: the full state may
    also have parameters that only other ranks hold.

    Raises StateError for a flat parameter whose originals sit in two groups, or are only partly in the full state.
    """
    group_of = {fqn: index for index, (_, fqns) in enumerate(full.groups) for fqn in fqns}
    known = {fqn for named in view.handles for fqn in named.fqns}
    unknown = [fqn for fqn in group_of if fqn not in known]
    if unknown and not others:
        raise StateError(
            f"{unknown[0]}: the full dict has it, the model has not ({len(unknown)} such parameters; the model has "
            f"{len(view.order)}, the full dict {len(group_of)}): give the dict of this model"
        )
    by_group: list[list[NamedHandle]] = [[] for _ in full.groups]
    for named in view.handles:
        index = group_of_unit(named.fqns, group_of)
        if index is not None:
            by_group[index].append(named)
    ids = full.local_ids
    if _same_units([named for handles in by_group for named in handles], ids):
        for handles in by_group:
            handles.sort(key=lambda named: ids[named.fqns[0]] or 0)
    params: list[LocalParam] = []
    group_ids = []
    for index, handles in enumerate(by_group):
        first = len(params)
        params += [LocalParam(first + place, index, named, None) for place, named in enumerate(handles)]
        group_ids.append(tuple(range(first, len(params))))
    return LocalOptim(
        params=tuple(params),
        groups=tuple(group for group, _ in full.groups),
        group_ids=tuple(group_ids),
        group_param_names=(None,) * len(full.groups),
        extra={},
    )


def _same_units(handles: list[NamedHandle], saved: Mapping[str, int | None]) -> bool:
    """Whether the saved local ids stand for just these live parameters."""
    units: dict[int, set[str]] = {}
    for fqn in (fqn for named in handles for fqn in named.fqns):
        local_id = saved.get(fqn)
        if local_id is None:
            return False
        units.setdefault(local_id, set()).add(fqn)
    return {frozenset(fqns) for fqns in units.values()} == {frozenset(named.fqns) for named in handles}
