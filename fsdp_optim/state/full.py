"""The full dict of this library: one state per original parameter, as if FSDP were not there. Written and read here.

`write` and `read` are inverse: `read(write(state, key_by), names_of_its_keys)` is `state`. Dicts that other libraries wrote are
read in `dialects.py`, by the same `read` wherever they are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Shape, cut_named
from fsdp_optim.options import KeyBy
from fsdp_optim.state.classes import class_names_read, class_names_written
from fsdp_optim.state.kinds import LOOSE_KIND, Evidence, Kind, kind_of, sight_of
from fsdp_optim.state.packed import LocalId
from fsdp_optim.state.values import Summary

FullDict = dict[str, Any]

RESERVED_KEYS = frozenset(
    {
        *("state", "param_groups", "param_id_map", "local_ids", "fqns", "num_padded", "uncollected_local_ids"),
        "unknown_order",  # only where ids cannot count the parameters: why
        "optimizer_class",
        "kinds",
    }
)
"""Top-level keys of a full dict that mean something here; all others are the optimizer's own and kept."""

LOOSE = "state under keys that are no parameters"
"""What such state is called among an optimizer's other keys, as which it is treated."""

Listing = Literal["ids", "units", "other"]


@dataclass(frozen=True)
class FullState:
    """A full dict of any accepted kind, by FQN. Its values are those of the dict, not copies.

    Attributes:
        state: by FQN; no entry for a parameter without state.
        groups: each group's hyperparameters and its FQNs.
        local_ids: the ids that the live parameters had on the rank that saved it, None where that is not known.
        listing: what the order of the FQNs in a group is. "ids": that of the ids. "units": fairscale's, unit after unit. "other":
            that of another tool, which can be any.
        unknown_order: why ids cannot count its parameters, where the dict says so.
        fqn_of: the FQN of each of the dict's own keys.
        classes: the name of the class of each group's optimizer, empty where that is not known.
        kinds: what the dict records of its values.
        num_padded: the padding of each flat parameter, as fairscale lists it; nobody reads it here.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    extra: Mapping[str, Any]
    uncollected: frozenset[str] = frozenset()
    local_ids: Mapping[str, LocalId | None] = field(default_factory=dict)
    listing: Listing = "ids"
    unknown_order: str = ""
    fqn_of: Mapping[LocalId, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    kinds: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    num_padded: Any = None

    def class_of(self, group_index: int) -> str:
        """The name of the class of a group's optimizer; "" where that is not known."""
        return self.classes[group_index] if self.classes else ""

    def evidence(self, shapes: Mapping[str, Shape]) -> Evidence:
        """What the values of the parameters that have dimensions are, where the dict does not record it."""
        return Evidence.of(
            sight_of(name, value, shapes[fqn])
            for fqn, values in self.state.items()
            if shapes.get(fqn) and fqn not in self.kinds
            for name, value in values.items()
        )

    def recorded(self, fqn: str, name: object) -> Kind | None:
        """The kind of a value as the dict records it; None where it does not."""
        word = self.kinds.get(fqn, {}).get(name)
        return Kind(word.partition(" ")[0]) if word is not None else None

    def kind_of(self, fqn: str, name: str, value: object, shape: Shape, evidence: Evidence) -> Kind:
        """What a value is. One that was placed by itself is opaque: it is whole now."""
        recorded = self.recorded(fqn, name)
        if recorded is None:
            return kind_of(name, value, shape, evidence)
        return Kind.OPAQUE if recorded is Kind.PLACED else recorded

    def cut_of(self, fqn: str, name: object) -> str:
        """How a value was cut that was placed by itself."""
        word, _, cut = self.kinds.get(fqn, {}).get(name, "").partition(" ")
        return cut if word == Kind.PLACED.value else ""


# ------------------------------------------------------------------------------------------- writing


def write(state: FullState, key_by: KeyBy, *, as_ours: bool = True, with_kinds: bool = True) -> FullDict:
    """The full dict of a state, by id or by name; ids count the parameters as its groups list them.

    Nothing is copied. `as_ours`: with the keys by which this library knows its own dicts. `with_kinds`: with what the state
    records of its values.
    """
    ids = {fqn: index for index, fqn in enumerate(fqn for _, fqns in state.groups for fqn in fqns)}
    key: Mapping[str, Any] = ids if key_by == "id" else {fqn: fqn for fqn in ids}
    loose = state.extra.get(LOOSE, {})
    full: FullDict = {name: value for name, value in state.extra.items() if name != LOOSE}
    if state.classes:
        full["optimizer_class"] = class_names_written(state.classes)
    full["state"] = {**{key[fqn]: dict(state.state[fqn]) for fqn in ids if fqn in state.state}, **loose}
    full["param_groups"] = [
        {
            **hyperparameters,
            "params": [key[fqn] for fqn in fqns],
            **({"param_names": list(fqns)} if key_by == "id" else {}),  # torch's readers by name refuse it
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
            **dict.fromkeys(loose, LOOSE_KIND),
            **{key[fqn]: words for fqn, words in state.kinds.items()},
        }
    return full


def kinds_of(summaries: Mapping[str, Summary | None]) -> dict[str, dict[Any, str]]:
    """What a full dict records of its values: their kinds, by FQN and name. Parameters with the same ones share one dict."""
    shared: dict[object, dict[Any, str]] = {}
    found: dict[str, dict[Any, str]] = {}
    for fqn, summary in summaries.items():
        if summary is not None:
            key = summary.names, summary.sharded, summary.placed, summary.opaque  # the others are scalars
            kinds = shared.get(key)
            found[fqn] = shared.setdefault(key, dict(summary.kinds)) if kinds is None else kinds
    return found


# ------------------------------------------------------------------------------------------- reading


def read(
    full: Mapping[str, Any],
    to_name: Mapping[Any, str],
    is_loose: Callable[[Any], bool],
    *,
    entries: Mapping[Any, Mapping[str, Any]] | None = None,
    listing: Listing = "ids",
) -> FullState:
    """The state in a nested dict. `to_name`: every key that its groups list, with the FQN that it stands for.

    Args:
        is_loose: whether a key of the state is no parameter's, where the dict does not record it.
        entries: its state, where that is not what is under `state`.

    Raises StateError where the dict contradicts itself.
    """
    groups, kinds = full["param_groups"], _recorded_kinds(full)
    state: dict[str, Mapping[str, Any]] = {}
    loose: dict[Any, Any] = dict(full.get(LOOSE, {}))
    for key, values in (full["state"] if entries is None else entries).items():
        if key in to_name:
            if (
                values or key in kinds
            ):  # what stands for a whole flat parameter is in the state of its first original only
                state[to_name[key]] = values
        elif kinds.get(key) == LOOSE_KIND if kinds else is_loose(key):
            loose[key] = values
        else:
            raise StateError(
                f"state has an entry {key!r} that is in none of the {counted_noun(len(groups), 'param group')}: gather it again"
            )
    local_of = full.get("local_ids") or full.get("param_id_map") or {}
    uncollected = set(full.get("uncollected_local_ids") or ())
    return FullState(
        state=state,
        groups=tuple(
            (
                {k: v for k, v in group.items() if k not in ("params", "param_names")},
                tuple(to_name[key] for key in group["params"]),
            )
            for group in groups
        ),
        extra={
            **{key: value for key, value in full.items() if key not in RESERVED_KEYS},
            **({LOOSE: loose} if loose else {}),
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
    """What the dict says of the kinds of its values. Raises StateError for what gather does not write."""
    kinds = full.get("kinds")
    if kinds is None:
        return {}
    try:
        for words in {id(words): words for words in kinds.values() if words != LOOSE_KIND}.values():
            for word in words.values():
                kind, _, cut = word.partition(" ")
                Kind(kind)
                cut_named(cut)
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(
            f"kinds of this full dict is not what gather_full_optim_state_dict writes ({error}): give the dict as it was "
            "gathered, or without kinds"
        ) from error
    return kinds  # type: ignore[no-any-return]


def names_in(full: Mapping[str, Any]) -> list[list[str]] | None:
    """The names that a nested dict itself has for what its groups list, group by group; None where it has ids alone."""
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
    """Whether the groups of a nested dict list names."""
    return any(isinstance(key, str) for group in full["param_groups"] for key in group["params"])


def is_ours(full: Mapping[str, Any]) -> bool:
    """Whether this library wrote a dict: by id or by name, whole or read from a checkpoint."""
    return "local_ids" in full or "kinds" in full


def records_kinds(full: Mapping[str, Any]) -> bool:
    """Whether a dict records what its values are."""
    return "kinds" in full


def num_listed(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """How many parameters each group lists."""
    return [len(group["params"]) for group in groups]
