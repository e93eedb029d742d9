"""Which values of two checkpoints are the same value: by name, through aliases, and for optimizers without names by id."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.layout import Shape
from fsdp_optim.offline.values.named_values import Decoded, NamedValue, NamedValues
from fsdp_optim.results.differences import HyperparameterDiff
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import bytes_in_memory

_MOST_TEXT = 80  # characters of a value
_NONE = "-"


@dataclass(frozen=True)
class ValuePair:
    """One value of both checkpoints."""

    name: str
    a: NamedValue
    b: NamedValue

    @property
    def sides(self) -> tuple[NamedValue, NamedValue]:
        return self.a, self.b

    @property
    def are_tensors(self) -> bool:
        return self.a.is_tensor and self.b.is_tensor

    @property
    def shapes_differ(self) -> bool:
        return self.are_tensors and self.a.info.shape != self.b.info.shape

    @property
    def shape(self) -> Shape:
        return self.a.info.shape

    @property
    def itemsize(self) -> int:
        """The bytes of an element, of the larger side."""
        return max(self.a.dtype.itemsize, self.b.dtype.itemsize)

    @property
    def place(self) -> tuple[str, int]:
        """Where the first checkpoint has the value."""
        return ("", 0) if self.a.stored is None else (self.a.stored.file, self.a.stored.start)

    @property
    def text_a(self) -> str:
        return _text_of_value(self.a)

    @property
    def text_b(self) -> str:
        return _text_of_value(self.b)


def text_of(value: Any) -> str:
    """Return a value as a short text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    elif isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}"
    elif isinstance(value, io.BytesIO):
        return f"a BytesIO of {len(value.getvalue())} bytes"
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _text_of_value(value: NamedValue) -> str:
    if value.stored is not None:
        return f"a {value.info.dtype} tensor of {value.info.shape}"
    return text_of(value.constant if value.constant is not None else value.other)


# ------------------------------------------------------------------------------------------- names for ids


def named_alike(
    a: Decoded, b: Decoded, param_names: Sequence[str] | None
) -> tuple[NamedValues, NamedValues, list[str]]:
    """Return the values of both checkpoints by the same names, and notes about names that were inferred.

    An optimizer that calls its parameters by id gets `param_names`; else the names of the other optimizer, in their order; else
    the names of the weights beside it. Inferred names are taken only where their number and all shapes fit.
    """
    shapes = {**b.shapes, **a.shapes}
    orders, notes = list[Sequence[str] | None](), list[str]()
    for decoded, other in ((a, b), (b, a)):
        order, note = (None, "") if decoded.has_names else _order_for(decoded, other, param_names, shapes)
        orders.append(order)
        notes += [note] if note else []
    sides = [
        decoded.named(order, known=tuple(other.weights))
        for decoded, other, order in zip((a, b), (b, a), orders, strict=True)
    ]
    if sides[0].has_names != sides[1].has_names and all(side.state for side in sides):
        without = next(side for side in sides if not side.has_names)
        notes.append(
            f"{without.reader.index.where}: the parameters of the optimizer have ids without names, which match no names of the "
            "other checkpoint: give param_names, their FQNs in the order of the ids"
        )
    notes += [
        f"{decoded.reader.index.where}: state={name} was not compared: {value.why}"
        for decoded in (a, b)
        for name, value in decoded.values.items()
        if isinstance(value, Withheld)
    ]
    notes += [
        f"{decoded.reader.index.where}: was saved without an optimizer"
        for decoded, other in ((a, b), (b, a))
        if decoded.saved is None and other.saved is not None
    ]
    return sides[0], sides[1], notes


def _order_for(
    decoded: Decoded, other: Decoded, param_names: Sequence[str] | None, shapes: Mapping[str, Shape]
) -> tuple[Sequence[str] | None, str]:
    """Return the names for the ids of an optimizer, and a note; None where there are none that fit."""
    if param_names is not None:
        return param_names, ""
    where = decoded.reader.index.where
    if other.listed and decoded.fits(other.listed, shapes):
        return (
            other.listed,
            f"{where}: parameters by id were matched with the names of the other checkpoint, in their order",
        )
    for beside in (decoded, other):
        if (
            beside.weights
            and (beside is decoded or not other.has_names)
            and decoded.fits(tuple(beside.weights), shapes)
        ):
            return (
                tuple(beside.weights),
                f"{where}: parameters by id were matched with the names of the weights in {beside.reader.index.where}, in "
                "their order",
            )
    return None, ""


# ------------------------------------------------------------------------------------------- pairs


def paired(
    a: NamedValues, b: NamedValues, match: str | None
) -> tuple[list[ValuePair], tuple[str, ...], tuple[str, ...]]:
    """Return the values of both checkpoints, and the names that only one of them has, in the order of the names."""
    pairs, only_in_a, only_in_b = _paired_by_name(a.weights, b.weights, _tied(a), _tied(b))
    owners, owners_a, owners_b = _paired_by_name(a.state, b.state, _tied(a), _tied(b))
    values = [ValuePair(name, value_a, value_b) for name, value_a, value_b in pairs]
    for fqn, state_a, state_b in owners:
        values += [ValuePair(f"{fqn}:{key}", state_a[key], state_b[key]) for key in state_a if key in state_b]
        only_in_a += [f"{fqn}:{key}" for key in state_a if key not in state_b]
        only_in_b += [f"{fqn}:{key}" for key in state_b if key not in state_a]
    only_in_a += [f"{fqn}:{key}" for fqn in owners_a for key in a.state[fqn]]
    only_in_b += [f"{fqn}:{key}" for fqn in owners_b for key in b.state[fqn]]
    asked = [pair for pair in values if fits_glob(pair.name, match)]
    lists = [tuple(sorted((n for n in names if fits_glob(n, match)), key=natural)) for names in (only_in_a, only_in_b)]
    return sorted(asked, key=lambda pair: natural(pair.name)), lists[0], lists[1]


def fits_glob(name: str, match: str | None) -> bool:
    """Return whether a name fits a pattern of the shell; every name fits None."""
    return match is None or fnmatchcase(name, match)


def natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a key by which names are sorted: weights first, and numbers in names by their size."""
    parts = name.replace(":", ".").split(".")
    return ":" in name, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _tied(side: NamedValues) -> dict[str, tuple[str, ...]]:
    """Return all names of each tied parameter, by each of these names."""
    names: dict[str, list[str]] = {}
    for alias, fqn in side.aliases.items():
        names.setdefault(fqn, [fqn]).append(alias)
    return {name: tuple(tied) for tied in names.values() for name in tied}


def _paired_by_name(
    a: Mapping[str, Any], b: Mapping[str, Any], tied_a: Mapping[str, Sequence[str]], tied_b: Mapping[str, Sequence[str]]
) -> tuple[list[tuple[str, Any, Any]], list[str], list[str]]:
    """Return (name, entry of a, entry of b) for all entries that have a name in common, and the names of all others.

    An entry has its key and all names that are tied to it. Two entries are paired once.
    """
    keys_a, keys_b = _key_of_each_name(a, tied_a), _key_of_each_name(b, tied_b)
    pairs: dict[tuple[str, str], str] = {}
    for name in [*a, *(name for name in keys_a if name not in a)]:
        if name in keys_b:
            pairs.setdefault((keys_a[name], keys_b[name]), name)
    in_a, in_b = {key for key, _ in pairs}, {key for _, key in pairs}
    return (
        [(name, a[key_a], b[key_b]) for (key_a, key_b), name in pairs.items()],
        [key for key in a if key not in in_a],
        [key for key in b if key not in in_b],
    )


def _key_of_each_name(entries: Mapping[str, Any], tied: Mapping[str, Sequence[str]]) -> dict[str, str]:
    keys = {name: name for name in entries}
    for key in entries:
        for name in tied.get(key, ()):
            keys.setdefault(name, key)
    return keys


# ------------------------------------------------------------------------------------------- hyperparameters


def hyperparameters_that_differ(a: NamedValues, b: NamedValues) -> tuple[HyperparameterDiff, ...]:
    """Return the hyperparameters that differ between the groups of the same parameter."""
    if not a.groups or not b.groups:
        return ()
    owners, only_a, only_b = _paired_by_name(a.groups, b.groups, _tied(a), _tied(b))
    differing: dict[tuple[str, str, str], list[str]] = {}
    known: dict[tuple[int, int], list[tuple[str, str, str]]] = {}  # parameters of one group share one dict
    for fqn, group_a, group_b in owners:
        key = id(group_a), id(group_b)
        if key not in known:
            known[key] = _differing_in(group_a, group_b)
        for setting in known[key]:
            differing.setdefault(setting, []).append(fqn)
    for sides, fqns in ((("listed", _NONE), only_a), ((_NONE, "listed"), only_b)):
        if fqns:
            differing["param group", sides[0], sides[1]] = fqns
    return tuple(HyperparameterDiff(*key, params=tuple(fqns)) for key, fqns in differing.items())


def _differing_in(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    texts = []
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b or not _same_setting(a[name], b[name]):
            text_a, text_b = (text_of(side[name]) if name in side else _NONE for side in (a, b))
            texts.append((str(name), text_a, text_b))
    return texts


def _same_setting(a: Any, b: Any) -> bool:
    """Return whether two hyperparameters are equal; a list equals a tuple, because formats in JSON have no tuples."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_setting, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not (a.is_meta or b.is_meta):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_in_memory(a) == bytes_in_memory(b)
    return same(a, b)
