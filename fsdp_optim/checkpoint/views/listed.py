"""The names that an optimizer's dict has before it is seen through Views, among those that its reader knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_optim.checkpoint.views.names import Seen
from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.state.dicts.flattened import is_flattened
from fsdp_optim.state.dicts.full import names_in, num_listed
from fsdp_optim.state.dicts.names import Names


def names_before(where: str, names: Names, full: Mapping[str, Any], seen: Seen, order: Sequence[str]) -> Names:
    """Return the names by which a full dict is read, before its parameters are seen through Views.

    Args:
        names: those of a reader who sees it through them.
        order: the weights of the checkpoint, in its order, by their names there.

    Raises StateError where ids may be in another order than that of the names.
    """
    if is_flattened(full):  # it does not list its groups: a name belongs to the group of what it becomes
        return _with_groups(names, [tuple(_beside(group, seen)) for group in names.groups])
    if "param_groups" not in full or names_in(full) is not None:
        return names
    nums = num_listed(full["param_groups"])
    groups = [tuple(_instead(group, seen)) for group in names.groups]
    if [len(group) for group in names.groups] == nums or [len(group) for group in groups] != nums:
        return names
    _check_order(where, [name for group in groups for name in group], order, seen.split)
    return _with_groups(names, groups)


def _with_groups(names: Names, groups: Sequence[tuple[str, ...]]) -> Names:
    return replace(names, groups=tuple(groups), model_order=tuple(name for group in groups for name in group))


def _beside(group: Sequence[str], seen: Seen) -> list[str]:
    """Return the names of a group, and those that parameters of it have before."""
    fused_of = {bound.names[0]: live for live, bound in seen.split.items()}
    listed = list(group)
    for name in group:
        if name in fused_of:
            listed.append(fused_of[name])
        if name in seen.joined:
            listed += seen.joined[name].names
    return list(dict.fromkeys(listed))


def _instead(group: Sequence[str], seen: Seen) -> list[str]:
    """Return the names that a group has before, each where the first of its parts is, or the parts in their order."""
    fused_of = {part: live for live, bound in seen.split.items() for part in bound.names}
    listed: list[str] = []
    for name in group:
        listed += seen.joined[name].names if name in seen.joined else (fused_of.get(name, name),)
    return list(dict.fromkeys(listed))


def _check_order(where: str, listed: Sequence[str], order: Sequence[str], changed: Collection[str]) -> None:
    """Refuse ids whose parameters the weights of the checkpoint have in another order."""
    places = {name: place for place, name in enumerate(order)}
    known = [name for name in listed if name in places]
    in_order = sorted(known, key=places.__getitem__)
    if known != in_order:
        name, other = next((a, b) for a, b in zip(known, in_order, strict=True) if a != b)
        raise StateError(
            f"{where}: the optimizer has {counted_noun(len(listed), 'parameter')} by ids without names, with "
            f"{counted_noun(len(changed), 'fused one')} among them, and their order is not known: by this model {name} would be "
            f"where the checkpoint has {other}: convert it with param_names=[...] first, the FQNs in the order of the ids"
        )
