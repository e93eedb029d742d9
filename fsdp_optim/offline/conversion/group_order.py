"""The parameters that the ids of several param groups count, where the optimizer's dict has no names.

Ids count group after group, and a model only says the order of all its parameters together. Each group lists its parameters in
the model's order, as optimizers are made, so the shapes of the state often leave one way to share them out: weights in one group,
and biases and norms in the other. Where they leave several ways, or none, only the caller knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape

_MOST_WAYS = 4096  # followed at once; with more, no single way can be expected

_ASK = (
    "give param_names=[...], the FQNs in the order of the ids, as [name_of[param] for group in optim.param_groups for param in "
    "group['params']] lists them in the training"
)

Shared = tuple["Shared", int] | None
"""The numbers of the groups that the first parameters are in, the last one first."""


def by_group(where: str, full: Mapping[str, Any], order: Sequence[str], shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Return the parameters of each group. `order`: the parameters of the model; `shapes`: the shapes of its weights.

    Raises StateError where the shapes of the state do not leave exactly one way.
    """
    seen = [[_shapes_of(full["state"].get(key, {})) for key in group["params"]] for group in full["param_groups"]]
    ways: dict[tuple[int, ...], Shared] = {(0,) * len(seen): None}
    twice: set[tuple[int, ...]] = set()
    for fqn in order:
        ways, twice = _next(ways, twice, seen, shapes.get(fqn))
        if not ways or len(ways) > _MOST_WAYS:
            break
    done = tuple(map(len, seen))
    if done in twice or len(ways) > _MOST_WAYS:
        raise StateError(
            f"{where}: the optimizer has {len(seen)} param groups by ids without names, and the model's order and the shapes of "
            f"the state leave several ways to share its parameters out among them: {_ASK}"
        )
    if done not in ways:
        raise StateError(
            f"{where}: the optimizer has {len(seen)} param groups by ids without names, and the shapes of their state fit no "
            f"order of groups of this model: {_ASK}"
        )
    made: list[list[str]] = [[] for _ in seen]
    shared, left = ways[done], list(order)
    while shared is not None:
        shared, group = shared
        made[group].append(left.pop())
    return [fqns[::-1] for fqns in made]


def _next(
    ways: Mapping[tuple[int, ...], Shared],
    twice: set[tuple[int, ...]],
    seen: Sequence[Sequence[frozenset[Shape]]],
    shape: Shape | None,
) -> tuple[dict[tuple[int, ...], Shared], set[tuple[int, ...]]]:
    """Extend the ways by one more parameter of this shape. A way is known by how many parameters each group has.

    `twice`: the counts that several ways lead to.
    """
    after: dict[tuple[int, ...], Shared] = {}
    again: set[tuple[int, ...]] = set()
    for counts, shared in ways.items():
        for group, group_shapes in enumerate(seen):
            at = counts[group]
            if at == len(group_shapes) or (group_shapes[at] and shape is not None and shape not in group_shapes[at]):
                continue
            new = (*counts[:group], at + 1, *counts[group + 1 :])
            if new in after or counts in twice:
                again.add(new)
            after[new] = (shared, group)
    return after, again


def _shapes_of(values: Mapping[str, Any]) -> frozenset[Shape]:
    """Return the shapes of a parameter's state tensors that have dimensions. The parameter has one of these shapes."""
    return frozenset(value.shape for value in values.values() if isinstance(value, StoredTensor) and value.shape)
