"""torch.distributed.checkpoint's flattened optimizer dict: one level of keys, `state.<fqn>.<name>` and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_optim.errors import StateError
from fsdp_optim.state.same import same


def is_flattened(full: Mapping[str, Any]) -> bool:
    """Whether a dict was returned by `get_optimizer_state_dict(flatten_optimizer_state_dict=True)`."""
    return "param_groups" not in full and any(str(key).startswith("param_groups.") for key in full)


def fqns_of_flattened(full: Mapping[str, Any]) -> set[str]:
    """The FQNs in the keys of a flattened dict."""
    return {str(key).partition(".")[2].rpartition(".")[0] for key in full}


def unflatten(
    full: Mapping[str, Any], groups: Sequence[Sequence[str]], canonical: Callable[[str], str] = lambda fqn: fqn
) -> dict[str, Any]:
    """The nested form of a flattened dict, by name. `groups`: the FQNs of each group, which a flattened dict does not have.

    `canonical`: the FQN for a name in the dict.

    Raises StateError where parameters of one group have different hyperparameters.
    """
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in full.items():
        section, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        {"state": state, "param_groups": hyper}.get(section, {}).setdefault(fqn, {})[name] = value
    made: list[dict[str, Any]] = []
    for fqns in map(frozenset, groups):
        known = [fqn for fqn in hyper if canonical(fqn) in fqns]  # as the optimizer listed them
        for fqn in known[1:]:
            if not same(hyper[fqn], hyper[known[0]]):
                raise StateError(
                    f"{known[0]} and {fqn} are in one param group of the optimizer, and have different hyperparameters in "
                    f"the full dict: {hyper[known[0]]} and {hyper[fqn]}: build the optimizer with the saved groups"
                )
        made.append({**(hyper[known[0]] if known else {}), "params": known})
    others = [fqn for fqn in hyper if not any(canonical(fqn) in fqns for fqns in groups)]
    if others and made:
        # These are refused later, by name, as parameters that the model does not have.
        made[0]["params"] = [*made[0]["params"], *others]
    return {"state": state, "param_groups": made}
