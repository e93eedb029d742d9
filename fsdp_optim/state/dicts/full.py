"""The writer and the reader of this library's full dict, which has one state per original parameter, as without FSDP.

`write` and `read` are inverse: `read(write(state, key_by), names_of_the_keys)` is `state`. `dialects.py` reads the dicts of
other libraries, with the same `read` where the dicts have the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Shape, cut_named
from fsdp_optim.options import KeyBy
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.values.classes import class_names_read, class_names_written
from fsdp_optim.state.values.kinds import NON_PARAM_KIND, Evidence, Kind, infer_kind, observation_of
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.dtensors import as_local
from fsdp_optim.tensors.memory import is_plain

FullDict = dict[str, Any]

RESERVED_KEYS = frozenset(
    {
        *("state", "param_groups", "param_id_map", "local_ids", "fqns", "num_padded", "uncollected_local_ids"),
        "unknown_order",  # why ids cannot count the parameters; absent where they can
        "optimizer_class",
        "kinds",
    }
)
"""Top-level keys of a full dict that this library uses; all other keys are the optimizer's own, and are kept."""

_KINDS = {kind.value: kind for kind in Kind}

NON_PARAM_STATE = "state under keys that are no parameters"
"""The key in `other_keys` of the state that belongs to no parameter, which is treated like an optimizer's other keys."""

Listing = Literal["ids", "units", "other"]


@dataclass(frozen=True)
class FullState:
    """A full dict in any dialect, by FQN. The values are the dict's own, not copies.

    Attributes:
        state: FQN -> values by name; without entries for parameters without state.
        groups: the hyperparameters and FQNs of each group.
        other_keys: the optimizer's own top-level keys, and under `NON_PARAM_STATE` the state that belongs to no parameter.
        uncollected: FQNs whose wrapper forbids to collect the state.
        local_ids: FQN -> id of the live parameter on the rank that saved the dict; None where the id is not known.
        listing: the order of the FQNs in a group. "ids": the order of the ids. "units": fairscale's order, unit after unit.
            "other": the order of another tool, which can be any.
        unknown_order: why ids cannot count the parameters, from the dict; empty where they can.
        fqn_of: key of the dict -> FQN.
        classes: the class name of each group's optimizer; empty where the dict does not record it.
        kinds: FQN -> recorded kinds of the values by name.
        num_padded: the padding of each flat parameter in fairscale's form, for fairscale's reader only.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    other_keys: Mapping[str, Any]
    uncollected: frozenset[str] = frozenset()
    local_ids: Mapping[str, LocalId | None] = field(default_factory=dict)
    listing: Listing = "ids"
    unknown_order: str = ""
    fqn_of: Mapping[LocalId, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    kinds: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    num_padded: Any = None

    def class_of(self, group_index: int) -> str:
        """Return the class name of a group's optimizer; "" where the dict does not record it."""
        return self.classes[group_index] if self.classes else ""

    def evidence(self, shapes: Mapping[str, Shape]) -> Evidence:
        """Return the evidence for kinds that the dict does not record, from the values of parameters with dimensions."""
        return Evidence.of(
            observation_of(name, value, shapes[fqn])
            for fqn, values in self.state.items()
            if shapes.get(fqn) and fqn not in self.kinds
            for name, value in values.items()
        )

    def recorded(self, fqn: str, name: object) -> Kind | None:
        """Return the recorded kind of a value; None where the dict records no kind."""
        words = self.kinds.get(fqn)
        word = words.get(name) if words is not None else None
        if word is None:
            return None
        return _KINDS.get(word) or Kind(word.partition(" ")[0])

    def kind_of(self, fqn: str, name: str, value: object, shape: Shape, evidence: Evidence) -> Kind:
        """Return the kind of a value, recorded or inferred. A placed value counts as opaque: in a full dict it is unsharded."""
        recorded = self.recorded(fqn, name)
        if recorded is None:
            return infer_kind(name, value, shape, evidence)
        return Kind.OPAQUE if recorded is Kind.PLACED else recorded

    def cut_of(self, fqn: str, name: object) -> str:
        """Return the recorded cut of a placed value; "" for all other values."""
        word, _, cut = self.kinds.get(fqn, {}).get(name, "").partition(" ")
        return cut if word == Kind.PLACED.value else ""


def following_params(full: FullState, shapes: Mapping[str, Shape], on_mesh: Collection[str]) -> FullState:
    """Return the same state, in which values that were DTensors are cut like their parameters where possible.

    A value with a cut of its own and the shape of its parameter has an element for each of the parameter's: a model in which the
    parameter is no DTensor, on no mesh, has no other way to cut it. `on_mesh`: the parameters that are DTensors.
    """
    if not any(
        word.startswith(Kind.PLACED.value) for word in {w for words in full.kinds.values() for w in words.values()}
    ):
        return full
    kinds = dict(full.kinds)
    for fqn, words in full.kinds.items():
        follows = {
            name: Kind.SHARDED.value
            for name, word in words.items()
            if word.startswith(Kind.PLACED.value)
            and fqn not in on_mesh
            and _has_shape(full.state[fqn].get(name), shapes.get(fqn))
        }
        if follows:
            kinds[fqn] = {**words, **follows}
    return replace(full, kinds=kinds)


def _has_shape(value: object, shape: Shape | None) -> bool:
    return isinstance(value, torch.Tensor) and is_plain(value) and tuple(value.shape) == shape


# ------------------------------------------------------------------------------------------- writing


def write(state: FullState, key_by: KeyBy, *, as_ours: bool = True, with_kinds: bool = True) -> FullDict:
    """Return the full dict of a state, by id or by name; ids count the parameters in the order of the groups' lists.

    Nothing is copied. `as_ours`: add the keys by which this library recognises its own dicts. `with_kinds`: add the recorded
    kinds of the values.
    """
    ids = {fqn: index for index, fqn in enumerate(fqn for _, fqns in state.groups for fqn in fqns)}
    key: Mapping[str, Any] = ids if key_by == "id" else {fqn: fqn for fqn in ids}
    non_param = state.other_keys.get(NON_PARAM_STATE, {})
    full: FullDict = {name: value for name, value in state.other_keys.items() if name != NON_PARAM_STATE}
    if state.classes:
        full["optimizer_class"] = class_names_written(state.classes)
    full["state"] = {**{key[fqn]: dict(state.state[fqn]) for fqn in ids if fqn in state.state}, **non_param}
    full["param_groups"] = [
        {
            **hyperparameters,
            "params": [key[fqn] for fqn in fqns],
            **({"param_names": list(fqns)} if key_by == "id" else {}),  # torch's readers by name refuse this key
        }
        for hyperparameters, fqns in state.groups
    ]
    if as_ours:
        local_ids = state.local_ids  # fairscale's reader counts runs of equal values, so their order stays
        full["param_id_map"] = {key[fqn]: i if fqn in state.state else None for fqn, i in local_ids.items()}
        full["local_ids"] = {key[fqn]: i for fqn, i in local_ids.items()}
        full["uncollected_local_ids"] = list(dict.fromkeys(i for f, i in local_ids.items() if f in state.uncollected))
        if key_by == "id":
            full["fqns"] = {key[fqn]: fqn for fqn in local_ids}
        if state.unknown_order:
            full["unknown_order"] = state.unknown_order
    if state.num_padded is not None:
        full["num_padded"] = state.num_padded
    if with_kinds:
        full["kinds"] = {
            **dict.fromkeys(non_param, NON_PARAM_KIND),
            **{key[fqn]: words for fqn, words in state.kinds.items()},
        }
    return full


def kinds_of(summaries: Mapping[str, Summary | None]) -> dict[str, dict[Any, str]]:
    """Return the kinds that a full dict records, by FQN and name. Parameters with equal kinds share one dict."""
    shared: dict[object, dict[Any, str]] = {}
    kinds_by_fqn: dict[str, dict[Any, str]] = {}
    for fqn, summary in summaries.items():
        if summary is not None:
            key = summary.names, summary.sharded, summary.placed, summary.opaque  # all other values are scalars
            kinds = shared.get(key)
            kinds_by_fqn[fqn] = shared.setdefault(key, dict(summary.kinds)) if kinds is None else kinds
    return kinds_by_fqn


# ------------------------------------------------------------------------------------------- reading


def read(
    full: Mapping[str, Any],
    to_name: Mapping[Any, str],
    is_non_param: Callable[[Any], bool],
    *,
    entries: Mapping[Any, Mapping[str, Any]] | None = None,
    listing: Listing = "ids",
) -> FullState:
    """Return the state in a nested dict. `to_name`: key -> FQN, for every key that the groups list.

    Args:
        is_non_param: whether a key of the state belongs to no parameter, for dicts that do not record that.
        entries: the state to read in place of the dict's `state`.

    Raises StateError where the dict contradicts itself.
    """
    groups, kinds = full["param_groups"], _recorded_kinds(full)
    state: dict[str, Mapping[str, Any]] = {}
    non_param: dict[Any, Any] = dict(full.get(NON_PARAM_STATE, {}))
    for key, values in (full["state"] if entries is None else entries).items():
        if key in to_name:
            # An entry can be empty and yet recorded: only the first original of a flat parameter has its opaque values.
            if values or key in kinds:
                state[to_name[key]] = values
        elif kinds.get(key) == NON_PARAM_KIND if kinds else is_non_param(key):
            non_param[key] = values
        else:
            raise StateError(
                f"the full dict's state has an entry {key!r}, which none of the {counted_noun(len(groups), 'param group')} "
                "lists: gather the dict again"
            )
    local_of = full.get("local_ids") or full.get("param_id_map") or {}
    uncollected = set(full.get("uncollected_local_ids") or ())
    return FullState(
        state=state,
        groups=tuple(
            (
                {
                    key: as_local(f"{key} of param group {index} of the dict", value)
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
                tuple(to_name[key] for key in group["params"]),
            )
            for index, group in enumerate(groups)
        ),
        other_keys={
            **{key: as_local(f"{key} of the dict", value) for key, value in full.items() if key not in RESERVED_KEYS},
            **({NON_PARAM_STATE: as_local("the state of the dict", non_param)} if non_param else {}),
        },
        uncollected=frozenset(
            to_name[key] for key, local_id in local_of.items() if local_id in uncollected and key in to_name
        ),
        local_ids={to_name[key]: local_id for key, local_id in local_of.items() if key in to_name},
        listing=listing,
        unknown_order=str(full.get("unknown_order", "")),
        fqn_of=to_name,
        classes=class_names_read(full.get("optimizer_class"), len(groups)),
        kinds={to_name[key]: words for key, words in kinds.items() if key in to_name},
        num_padded=full.get("num_padded"),
    )


def _recorded_kinds(full: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the kinds that the dict records. Raises StateError for kinds that gather does not write."""
    kinds = full.get("kinds")
    if kinds is None:
        return {}
    try:
        for words in {id(words): words for words in kinds.values() if words != NON_PARAM_KIND}.values():
            for word in words.values():
                kind, _, cut = word.partition(" ")
                Kind(kind)
                cut_named(cut)
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(
            f"the key kinds of this full dict differs from what gather_full_optim_state_dict writes ({error}): give the dict as "
            "it was gathered, or without the key kinds"
        ) from error
    return kinds  # type: ignore[no-any-return]


def names_in(full: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the parameters' names in a nested dict, group by group; None for a dict with ids alone."""
    groups = full["param_groups"]
    keys = [[*group["params"]] for group in groups]
    if any(isinstance(key, str) for group in keys for key in group):
        return keys
    if "fqns" in full and all(key in full["fqns"] for group in keys for key in group):
        return [[full["fqns"][key] for key in group] for group in keys]
    if all(group.get("param_names") is not None for group in groups if group["params"]):
        return [list(group.get("param_names") or ()) for group in groups]
    return None


def is_by_name(full: Mapping[str, Any]) -> bool:
    """Return whether the groups of a nested dict list names."""
    return any(isinstance(key, str) for group in full["param_groups"] for key in group["params"])


def is_ours(full: Mapping[str, Any]) -> bool:
    """Return whether this library wrote a dict, by id or by name, gathered or read from a checkpoint."""
    return "local_ids" in full or "kinds" in full


def records_kinds(full: Mapping[str, Any]) -> bool:
    """Return whether a dict records the kinds of its values."""
    return "kinds" in full


def num_listed(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return how many parameters each group lists."""
    return [len(group["params"]) for group in groups]
