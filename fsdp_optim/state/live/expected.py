"""The optimizer that a full dict was made for, reconstructed on this rank for calls without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.order import as_ids_count
from fsdp_optim.state.live.fit_check import group_of_unit
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.view import ModelView, NamedHandle


def expected_optimizer(view: ModelView, full: FullState, *, others: bool = False) -> LocalOptim:
    """Return an optimizer with the full state's groups over the model's live parameters.

    Ids count group after group, as in torch.optim. Inside a group they follow the saved local ids if the model has the same
    units as the saved model; else the order of the wrapped model's parameters(), or the saved optimizer's order if it differs.
    `others`: the full state may also have parameters that only other ranks hold.

    Raises StateError for a flat parameter whose originals are in two groups, or only partly in the full state, and
    where the order of the live parameters is not known.
    """
    group_of = {fqn: index for index, (_, fqns) in enumerate(full.groups) for fqn in fqns}
    known = {fqn for named in view.handles for fqn in named.fqns}
    unknown = [fqn for fqn in group_of if fqn not in known]
    if unknown and not others:
        raise StateError(
            f"{unknown[0]}: the full dict has this parameter, the model does not "
            f"({counted_noun(len(unknown), 'such parameter')}; the model has "
            f"{counted_noun(len(view.order), 'parameter')}, the full dict {len(group_of)}): give the dict of this model"
        )
    by_group: list[list[NamedHandle]] = [[] for _ in full.groups]
    for named in view.handles:
        index = group_of_unit(named.fqns, group_of)
        if index is not None:
            by_group[index].append(named)
    ids = {fqn: i for fqn, i in full.local_ids.items() if isinstance(i, int)}  # names have no order
    if _same_units([named for handles in by_group for named in handles], ids):
        for handles in by_group:
            handles.sort(key=lambda named: ids[named.fqns[0]])
    else:
        by_group = [
            _as_saved(handles, fqns, full, view) for handles, (_, fqns) in zip(by_group, full.groups, strict=True)
        ]
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
        other_keys={},
    )


def _as_saved(handles: list[NamedHandle], saved: Sequence[str], full: FullState, view: ModelView) -> list[NamedHandle]:
    """Return the live parameters of one group in the order of the optimizer, derived from the order of the saved group."""
    place, known = view.place_of, {fqn for named in handles for fqn in named.fqns}
    listed = [fqn for fqn in saved if fqn in known]
    wrapped = [fqn for named in view.handles for fqn in named.fqns]
    if full.listing == "units" or listed == sorted(listed, key=place.__getitem__):
        return handles
    if full.listing == "other" and as_ids_count(listed, wrapped, place) is not None:
        return handles
    at = {fqn: index for index, fqn in enumerate(listed)}
    for named in handles:
        places = [at[fqn] for fqn in sorted(named.fqns, key=place.__getitem__)]
        if full.unknown_order or full.listing == "other" or places != list(range(places[0], places[0] + len(places))):
            raise StateError(
                f"the full dict lists the parameters of {named.fqns[0]}'s group in an order of its own, so the order in "
                "this model's optimizer is not known: give optim=, the optimizer that the shard is for"
            )
    return sorted(handles, key=lambda named: at[named.fqns[0]])


def _same_units(handles: list[NamedHandle], saved: Mapping[str, int]) -> bool:
    """Return whether the saved local ids stand for exactly these live parameters."""
    units: dict[int, set[str]] = {}
    for fqn in (fqn for named in handles for fqn in named.fqns):
        local_id = saved.get(fqn)
        if local_id is None:
            return False
        units.setdefault(local_id, set()).add(fqn)
    return {frozenset(fqns) for fqns in units.values()} == {frozenset(named.fqns) for named in handles}
