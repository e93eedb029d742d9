"""torch.distributed.checkpoint's flattened optimizer dict: one level of keys, `state.<fqn>.<name>` and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_optim.state.values.same import same

_QUICK = (int, float, bool, str)


def is_flattened(full: Mapping[str, Any]) -> bool:
    """Return whether a dict was returned by `get_optimizer_state_dict(flatten_optimizer_state_dict=True)`."""
    return "param_groups" not in full and any(str(key).startswith("param_groups.") for key in full)


def fqns_of_flattened(full: Mapping[str, Any]) -> set[str]:
    """Return the FQNs in the keys of a flattened dict."""
    return {str(key).partition(".")[2].rpartition(".")[0] for key in full}


def unflatten(
    full: Mapping[str, Any], groups: Sequence[Sequence[str]], canonical: Callable[[str], str] = lambda fqn: fqn
) -> dict[str, Any]:
    """Return the nested form of a flattened dict, by name.

    `groups`: the FQNs of each group, which a flattened dict does not record. `canonical`: the FQN for a name in the dict.

    Where the parameters of one group have different hyperparameters, the groups come from the dict itself: parameters with equal
    hyperparameters are a group. The later comparison with an optimizer's groups then names the difference.
    """
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in full.items():
        section, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        {"state": state, "param_groups": hyper}.get(section, {}).setdefault(fqn, {})[name] = value
    param_groups = _as_grouped(hyper, groups, canonical)
    return {"state": state, "param_groups": param_groups if param_groups is not None else with_equal_options(hyper)}


def _as_grouped(
    hyper: Mapping[str, Mapping[str, Any]], groups: Sequence[Sequence[str]], canonical: Callable[[str], str]
) -> list[dict[str, Any]] | None:
    """Return the param groups with these members; None where two members of a group have different hyperparameters."""
    param_groups: list[dict[str, Any]] = []
    group_of = {fqn: index for index, fqns in enumerate(groups) for fqn in fqns}
    members: list[list[str]] = [[] for _ in groups]
    others: list[str] = []
    for fqn in hyper:  # as the optimizer listed them
        index = group_of.get(canonical(fqn))
        (others if index is None else members[index]).append(fqn)
    for known in members:
        if not all(same(hyper[fqn], hyper[known[0]]) for fqn in known[1:]):
            return None
        param_groups.append({**(hyper[known[0]] if known else {}), "params": known})
    if others and param_groups:
        # They are refused later, by name, as parameters that the model does not have.
        param_groups[0]["params"] = [*param_groups[0]["params"], *others]
    return param_groups


def with_equal_options(hyper: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups of parameters with equal hyperparameters, each where its first parameter is listed."""
    param_groups: list[dict[str, Any]] = []
    candidates_by_key: dict[
        object, list[tuple[Mapping[str, Any], list[str]]]
    ] = {}  # by the hyperparameters that are quick to compare
    for fqn, own in hyper.items():
        quick = tuple((name, value) for name, value in own.items() if type(value) in _QUICK and value == value)
        candidates = candidates_by_key.setdefault(quick, [])
        members = next((members for known, members in candidates if same(known, own)), None)
        if members is None:
            members = []
            candidates.append((own, members))
            param_groups.append({**own, "params": members})
        members.append(fqn)
    return param_groups
