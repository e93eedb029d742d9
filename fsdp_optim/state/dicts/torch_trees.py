"""The dicts of torch's `get_optimizer_state_dict` among other values: found by their form, with names in place of ids.

nested      {"state": {fqn: {name: value}}, "param_groups": [{"lr": 0.1, "params": [fqn]}]}
flattened   {"state.<fqn>.<name>": value, "param_groups.<fqn>.lr": 0.1}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdp_optim.state.dicts.flattened import fqns_of_flattened, with_equal_options
from fsdp_optim.state.dicts.full import RESERVED_KEYS

STATE, GROUPS, PARAMS = "state", "param_groups", "params"

Place: TypeAlias = "tuple[str, ...]"
"""The keys that lead to a dict inside dicts."""

MODEL, MODEL_KEYS = "model", ("model", "state_dict", "model_state_dict", "module")
"""The keys under which trainers keep a model's dict; of several in one place the first says most."""


def dicts_in(tree: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the dicts of the two upper levels: of `{"app": {"model": ...}}` first that of "app", then that of "model"."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield (key,), value
    for key, value in tree.items():
        if type(value) is dict:
            for inner, item in value.items():
                if isinstance(inner, str) and isinstance(item, Mapping):
                    yield (key, inner), item


@dataclass(frozen=True)
class OptimFace:
    """An optimizer's dict by its form alone. `is_flat`: it is flattened."""

    place: Place
    is_flat: bool

    @classmethod
    def all_in(cls, tree: Mapping[str, Any]) -> list[OptimFace]:
        """Return the dicts in a tree that have one of the two forms."""
        return [
            cls(place, is_flat=_is_flat(branch))
            for place, branch in dicts_in(tree)
            if _is_flat(branch) or _is_nested(branch)
        ]

    def dict_in(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the dict itself."""
        value: Any = tree
        for key in self.place:
            value = value[key]
        result: Mapping[str, Any] = value
        return result

    def fqns_in(self, values: Mapping[str, Any]) -> Iterable[str]:
        """Return the FQNs of the dict. `values`: the dict itself."""
        return fqns_of_flattened(values) if self.is_flat else [fqn for group in values[GROUPS] for fqn in group[PARAMS]]


def places_of_optims(tree: Mapping[str, Any]) -> list[Place]:
    """Return the places of all dicts that look like an optimizer's, those with ids in place of names too."""
    return [place for place, branch in dicts_in(tree) if branch.keys() >= {STATE, GROUPS} or _is_flat(branch)]


def _is_nested(value: Mapping[Any, Any]) -> bool:
    groups, state = value.get(GROUPS), value.get(STATE)
    return (
        isinstance(groups, list)
        and isinstance(state, Mapping)
        and any(_names_of(group) for group in groups)
        and all(_names_of(group) is not None for group in groups)
        and all(isinstance(fqn, str) and isinstance(values, Mapping) for fqn, values in state.items())
        and not (value.keys() - {STATE, GROUPS}) & RESERVED_KEYS
    )


def _names_of(group: Any) -> list[str] | None:
    """Return the FQNs that a param group lists; None for anything else."""
    params = group.get(PARAMS) if isinstance(group, Mapping) and all(isinstance(key, str) for key in group) else None
    is_list = isinstance(params, (list, tuple)) and all(isinstance(fqn, str) for fqn in params)
    return list(params) if is_list and params is not None else None


def _is_flat(value: Mapping[Any, Any]) -> bool:
    sections = {key.partition(".")[0] if isinstance(key, str) and "." in key else None for key in value}
    return GROUPS in sections and sections <= {GROUPS, STATE}


@dataclass(frozen=True)
class ReadFace:
    """An optimizer's dict, read.

    Attributes:
        state: FQN -> values by name.
        hypers: the hyperparameters of each group, with its FQNs; of a flattened dict, those of each parameter.
        other_keys: the other keys of a nested dict.
    """

    state: Mapping[str, Mapping[str, Any]]
    hypers: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    other_keys: Mapping[str, Any]
    is_flat: bool

    @classmethod
    def of(cls, face: OptimFace, values: Mapping[str, Any], known: Collection[str]) -> ReadFace | None:
        """Read a dict; None where it has parameters that are not `known`, state that no group lists, or flattened dicts."""
        if face.is_flat:
            read = cls._of_flat(values, known)
        else:
            hypers = tuple(
                ({key: value for key, value in group.items() if key != PARAMS}, tuple(group[PARAMS]))
                for group in values[GROUPS]
            )
            others = {key: value for key, value in values.items() if key not in (STATE, GROUPS)}
            read = cls(values[STATE], hypers, others, is_flat=False)
        if read is None:
            return None
        listed = [fqn for _, fqns in read.hypers for fqn in fqns]
        is_whole = len(set(listed)) == len(listed) and set(read.state) <= set(listed) <= set(known)
        return read if is_whole else None

    @classmethod
    def _of_flat(cls, flat: Mapping[str, Any], known: Collection[str]) -> ReadFace | None:
        state: dict[str, dict[str, Any]] = {}
        hypers: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            section, _, rest = key.partition(".")
            fqn = _longest(rest, known)
            name = rest[len(fqn) + 1 :] if fqn is not None else ""
            if fqn is None or (section == STATE and "." in name):  # a value that is a dict is flattened too
                return None
            (state if section == STATE else hypers).setdefault(fqn, {})[name] = value
        return cls(state, tuple((hyper, (fqn,)) for fqn, hyper in hypers.items()), {}, is_flat=True)

    def groups(self) -> list[dict[str, Any]]:
        """Return the param groups. In a flattened dict, parameters with equal hyperparameters are a group."""
        if self.is_flat:
            return with_equal_options({fqns[0]: hyper for hyper, fqns in self.hypers})
        return [{**hyper, PARAMS: list(fqns)} for hyper, fqns in self.hypers]


def _longest(rest: str, known: Collection[str]) -> str | None:
    """Return the longest FQN with which the rest of a key begins, before a name."""
    parts = rest.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((fqn for fqn in names if fqn in known), None)


def in_face(full: Mapping[str, Any], *, is_flat: bool) -> dict[str, Any]:
    """Return a nested dict by name as torch has it, nested or flattened. Parameters without recorded kinds have no state."""
    kinds = full.get("kinds", full[STATE])
    state = {fqn: dict(values) for fqn, values in full[STATE].items() if fqn in kinds}
    if not is_flat:
        rest = {key: value for key, value in full.items() if key not in RESERVED_KEYS}
        return {**rest, STATE: state, GROUPS: [dict(group) for group in full[GROUPS]]}
    flat = {f"{STATE}.{fqn}.{name}": value for fqn, values in state.items() for name, value in values.items()}
    for group in full[GROUPS]:
        hyper = {key: value for key, value in group.items() if key not in (PARAMS, "param_names")}
        flat |= {f"{GROUPS}.{fqn}.{key}": value for fqn in group[PARAMS] for key, value in hyper.items()}
    return flat
