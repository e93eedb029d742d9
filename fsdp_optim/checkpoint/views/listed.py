"""The names that an optimizer's dict has before it is seen through Views, among those that its reader knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return _with_groups(names, _in_order(where, groups, order, seen))


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


def _in_order(
    where: str, groups: Sequence[tuple[str, ...]], order: Sequence[str], seen: Seen
) -> Sequence[tuple[str, ...]]:
    """Return the names of each group in the order of the weights, which is that of the model that was saved.

    Where a fused parameter stands is not known from its parts. Parameters that no View changes show whether the optimizer lists
    them as the model does.

    Raises StateError where they show another order, and without weights.
    """
    places = {name: place for place, name in enumerate(order)}
    number = counted_noun(sum(map(len, groups)), "parameter")
    unknown = (
        f"{where}: the optimizer has {number} by ids without names, and which of them are fused is not known: {{}}: convert it "
        "with param_names=[...] first, the FQNs in the order of the ids"
    )
    without = next((name for group in groups for name in group if name not in places), None)
    if without is not None:
        raise StateError(unknown.format(f"{without} is not among its weights, which would show the order"))
    for group in groups:
        listed = [name for name in group if name not in seen.names]
        in_order = sorted(listed, key=places.__getitem__)
        if listed != in_order:
            name, other = next((a, b) for a, b in zip(listed, in_order, strict=True) if a != b)
            raise StateError(
                unknown.format(f"the optimizer of this model lists {name} where the checkpoint has {other}")
            )
    return [tuple(sorted(group, key=places.__getitem__)) for group in groups]
