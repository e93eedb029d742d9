"""The saved hyperparameters that each param group gets, where several optimizers were read as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_optim.errors import StateError
from fsdp_optim.state.live.local import LocalOptim

Hyper = Mapping[str, Any]
SavedGroups = Sequence[tuple[Hyper, tuple[str, ...]]]
"""Hyperparameters and FQNs of each saved group."""


def hypers_of_each(local: LocalOptim, groups: SavedGroups, live: Sequence[Sequence[str]]) -> Iterator[list[Hyper]]:
    """Yield for each of the optimizers the hyperparameters of its groups, from the saved group of their parameters.

    `live`: the FQNs of each group of all optimizers as one, on all ranks. A group without parameters on this rank gets what the
    same group gets on other ranks: of groups that are one group of `live`, because they have equal hyperparameters now, those
    without parameters get what the others leave, in order. A group without parameters on any rank gets those of the saved group
    without any, as far as there are as many of these. Where several saved groups could be meant, its own hyperparameters stay.

    Raises StateError where the parameters of a group are in two saved groups.
    """
    saved = {fqn: hyper for hyper, fqns in groups for fqn in fqns}
    empty, without = [hyper for hyper, fqns in groups if not fqns], [i for i, fqns in enumerate(live) if not fqns]
    of_empty = dict(zip(without, empty, strict=True)) if len(empty) == len(without) else {}
    of_members = [[_of_members(each, index, saved) for index in range(len(each.groups))] for each in local.optimizers]
    pairs = list(zip(local.joined_groups, of_members, strict=True))
    known: dict[int, list[Hyper | None]] = {}  # by the number of a group of `live`
    for joined, hypers in pairs:
        for number, hyper in zip(joined, hypers, strict=True):
            known.setdefault(number, []).append(hyper)
    left = {number: _left_for_others(hypers, live[number], saved) for number, hypers in known.items() if None in hypers}
    for optimizer, (joined, hypers) in zip(local.optimizers, pairs, strict=True):
        yield [
            next(left[number], of_empty.get(number, own)) if hyper is None else hyper
            for own, number, hyper in zip(optimizer.groups, joined, hypers, strict=True)
        ]


def _left_for_others(known: Sequence[Hyper | None], fqns: Sequence[str], saved: Mapping[str, Hyper]) -> Iterator[Hyper]:
    """Yield what groups without parameters on this rank get, in order; nothing where that is not certain.

    `known`: what the groups get that are one group of all ranks; None for those without parameters here. `fqns`: its parameters.
    """
    there = {id(saved[fqn]): saved[fqn] for fqn in fqns if fqn in saved}
    num = known.count(None)
    if len(there) == 1:
        return iter([*there.values()] * num)
    here = set(map(id, known))
    others = [hyper for key, hyper in there.items() if key not in here]
    return iter(others if len(others) == num else [])


def _of_members(optimizer: LocalOptim, index: int, saved: Mapping[str, Hyper]) -> Hyper | None:
    """Return the saved hyperparameters of the parameters that this rank has in a group; None where it has none of them."""
    params = (param for param in optimizer.params if param.group_index == index)
    fqns = [fqn for param in params for fqn in param.named.fqns if fqn in saved]
    for fqn in fqns[1:]:
        if saved[fqn] is not saved[fqns[0]]:
            raise StateError(
                f"{fqns[0]} and {fqn} are in one param group of an optimizer, and in two groups of the saved state: build "
                "the optimizers with the saved groups, or give param_groups='live', which leaves the live groups as they are"
            )
    return saved[fqns[0]] if fqns else None
