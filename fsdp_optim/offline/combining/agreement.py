"""What several checkpoints of one model have in common: the names and shapes that must agree, and the rest that may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.protocols import Reader, StoredTensor
from fsdp_optim.move import Key
from fsdp_optim.offline.combining.blending import is_averaged
from fsdp_optim.offline.conversion.source_contents import NamedSource
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.tensors.memory import dtype_named

Name: TypeAlias = "tuple[str, Any]"
"""An FQN, with the name of a value of its state; None: the weight."""


@dataclass(frozen=True)
class CheckpointValues:
    """The values of one checkpoint by name.

    Attributes:
        tensors: all weights, and those values of the state that are in files.
        averaged: the names of those that are averaged, as far as this checkpoint says.
        plain: the values of the state that are not in files, or are a number for each parameter.
        groups: the hyperparameters by the words that a result has for them.
        classes: the class of the optimizer, or of each group's; empty where it is unknown.
        aliases: other names of weights, each with the name under which the elements are stored.
    """

    where: str
    tensors: Mapping[Name, StoredTensor]
    keys: Mapping[Name, Key]
    averaged: frozenset[Name]
    plain: Mapping[Name, Any] = field(default_factory=dict, repr=False)
    groups: Mapping[str, Any] = field(default_factory=dict, repr=False)
    classes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, checkpoint: Reader, source: NamedSource, *, allow_pickle: bool) -> CheckpointValues:
        """Read what a checkpoint says, and the numbers of its optimizer. Reads no large tensors."""
        index = source.index
        tensors: dict[Name, StoredTensor] = {(fqn, None): tensor for fqn, tensor in index.weights.items()}
        keys: dict[Name, Key] = {(fqn, None): (False, fqn, "") for fqn in index.weights}
        averaged = {name for name, tensor in tensors.items() if is_averaged(dtype_named(tensor.dtype))}
        if index.optim is None:
            return cls(index.where, tensors, keys, frozenset(averaged), aliases=index.aliases)
        full = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS).full
        key_of = {value.stored_name: value.key for value in source.optim}
        kinds = full.get("kinds", {})
        plain: dict[Name, Any] = {}
        scalars: dict[Name, StoredTensor] = {}
        constants = {value.stored_name: value.constant for value in source.optim if value.constant is not None}
        for fqn, values in full["state"].items():
            for name, value in values.items():
                kind = str(kinds.get(fqn, {}).get(name, Kind.SHARDED.value)).partition(" ")[0]
                if not isinstance(value, StoredTensor):
                    plain[fqn, name] = value
                elif value.key in constants:
                    plain[fqn, name] = constants[value.key]
                elif kind == Kind.SCALAR.value:
                    scalars[fqn, name] = value
                else:
                    tensors[fqn, name], keys[fqn, name] = source.stored[key_of[value.key]], key_of[value.key]
                    if kind in (Kind.SHARDED.value, Kind.PLACED.value) and is_averaged(dtype_named(value.dtype)):
                        averaged.add((fqn, name))
        read = [source.stored[key_of[tensor.key]] for tensor in scalars.values()]
        plain.update(zip(scalars, read_constants(checkpoint, read), strict=True))
        classes = full.get("optimizer_class") or ()
        return cls(
            index.where,
            tensors,
            keys,
            frozenset(averaged),
            plain,
            groups=_groups_of(full),
            classes=(classes,) if isinstance(classes, str) else tuple(classes),
            aliases=index.aliases,
        )

    def with_names_of(self, last: CheckpointValues) -> CheckpointValues:
        """Return the same, with the elements of tied weights under each of their names that `last` has stored."""
        stored_as = {
            (alias, None): (fqn, None)
            for alias, fqn in self.aliases.items()
            if (alias, None) in last.tensors and (alias, None) not in self.tensors and (fqn, None) in self.tensors
        }
        tensors = {**self.tensors, **{name: self.tensors[stored] for name, stored in stored_as.items()}}
        averaged = self.averaged | {name for name, stored in stored_as.items() if stored in self.averaged}
        for name in [name for name in tensors if self._is_tied_in(last, name)]:
            del tensors[name]
        return replace(self, tensors=tensors, averaged=averaged & tensors.keys())

    def _is_tied_in(self, last: CheckpointValues, name: Name) -> bool:
        """Return whether `last` has a weight of its own as another name of one, and both are the same bytes here."""
        tied = (last.aliases.get(name[0], ""), None)
        if name[1] is not None or name in last.tensors or tied not in self.tensors:
            return False
        own, other = self.tensors[name], self.tensors[tied]
        if (own.file, own.start, own.placement, own.dtype) == (other.file, other.start, other.placement, other.dtype):
            return True
        raise StateError(
            f"{name[0]}: is another name of {tied[0]} in {last.where}, and a tensor of its own in {self.where}: give a "
            "checkpoint that has both tensors as the last one, so that the average has both"
        )


def _groups_of(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters by the words that a result has for them."""
    groups: dict[str, Any] = {}
    for index, group in enumerate(full["param_groups"]):
        for name, value in group.items():
            groups[f"{name} of param group {index}"] = value
    return groups


def text_of(name: Name) -> str:
    """Return a name as users write it: an FQN, or an FQN and the name of a value of its state."""
    fqn, value = name
    return fqn if value is None else f"{fqn}:{value}"


def check_agreement(all_contents: Sequence[CheckpointValues]) -> None:
    """Raise StateError that names two checkpoints and the parameter, unless all have the same names and shapes."""
    last = all_contents[-1]
    for other in all_contents[:-1]:
        _check_names(other, last)
        for name, tensor in last.tensors.items():
            before = other.tensors.get(name)
            if before is not None and before.shape != tensor.shape:
                raise StateError(
                    f"{text_of(name)}: has the shape {list(before.shape)} in {other.where} and {list(tensor.shape)} in "
                    f"{last.where}: only checkpoints of one model can be averaged"
                )
            if before is not None and (name in other.averaged) != (name in last.averaged):
                raise StateError(
                    f"{text_of(name)}: is {before.dtype} in {other.where} and {tensor.dtype} in {last.where}, and only one of "
                    "the two can be averaged: convert one of the checkpoints"
                )
            if before is not None and _is_complex(before) != _is_complex(tensor):
                raise StateError(
                    f"{text_of(name)}: is {before.dtype} in {other.where} and {tensor.dtype} in {last.where}: complex and real "
                    "numbers cannot be averaged"
                )


def _is_complex(tensor: StoredTensor) -> bool:
    return dtype_named(tensor.dtype).is_complex


def _check_names(other: CheckpointValues, last: CheckpointValues) -> None:
    of_other, of_last = {**other.tensors, **other.plain}, {**last.tensors, **last.plain}
    for name in [*of_last, *of_other]:
        if name in of_other and name in of_last:
            continue
        without, has = (other, last) if name in of_last else (last, other)
        raise StateError(
            f"{text_of(name)}: is in {has.where} and not in {without.where}: only checkpoints of one model can be averaged, with "
            "state for the same parameters"
        )
    for name, tensor in last.tensors.items():
        if name not in other.tensors:
            raise StateError(
                f"{text_of(name)}: is a number in {other.where} and a tensor of shape {list(tensor.shape)} in {last.where}: the "
                'optimizers differ; moments="drop" averages the weights alone'
            )


def differing_plain(all_contents: Sequence[CheckpointValues]) -> set[str]:
    """Return the names of the numbers, other plain values and hyperparameters that differ from those of the last checkpoint."""
    last, differing = all_contents[-1], set[str]()
    for other in all_contents[:-1]:
        differing |= {text_of(name) for name, value in last.plain.items() if not _are_equal(value, other.plain[name])}
        for name in {**last.groups, **other.groups}:
            both = name in last.groups and name in other.groups
            if not both or not _are_equal(last.groups[name], other.groups[name]):
                differing.add(name)
        if other.classes and last.classes and other.classes != last.classes:
            differing.add("the optimizer's class")
    return differing


def _are_equal(value: Any, of_last: Any) -> bool:
    """Return whether two plain values are equal, with the tensors in them."""
    if isinstance(value, torch.Tensor) or isinstance(of_last, torch.Tensor):
        if not (isinstance(value, torch.Tensor) and isinstance(of_last, torch.Tensor)):
            return False
        return value.dtype == of_last.dtype and torch.equal(value, of_last)
    if isinstance(value, Mapping) and isinstance(of_last, Mapping):
        return value.keys() == of_last.keys() and all(_are_equal(item, of_last[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)) and isinstance(of_last, (list, tuple)):
        return len(value) == len(of_last) and all(map(_are_equal, value, of_last))
    return bool(type(value) is type(of_last) and value == of_last)
