"""The values of an open checkpoint by the names that users give: the FQN of a weight, `FQN:exp_avg` of a state value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.adapters.known import wrapper_parts
from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.run_state import RESERVED
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex, SavedOptim
from fsdp_optim.formats.base.protocols import COMMON, Reader, StoredTensor
from fsdp_optim.formats.base.tree_values import InFile, leaves_of
from fsdp_optim.layout import Shape
from fsdp_optim.offline.conversion.source_contents import renamed_aliases, renamed_weights
from fsdp_optim.results.contents import TensorInfo
from fsdp_optim.state.dicts.full import FullState, names_in, num_listed
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.tensors.memory import dtype_name, dtype_named

TREES = "state="
"""Stands in the place of an FQN for the trainer's values: `state=:ema.weight` is a tensor in a tree of `state=`."""

_MOST_READ = 1 << 20  # bytes of a tensor that is read with the description of the optimizer
_PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_MOST_INT = 1 << 63


@dataclass(frozen=True)
class NamedValue:
    """A tensor of a checkpoint, in files (`stored`) or in memory (`constant`), or another value (`other`)."""

    info: TensorInfo
    stored: StoredTensor | None = None
    constant: torch.Tensor | None = None
    other: Any = None

    @property
    def is_tensor(self) -> bool:
        return self.stored is not None or self.constant is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.constant.dtype if self.constant is not None else dtype_named(self.info.dtype)

    @classmethod
    def as_it_is(cls, value: Any) -> NamedValue:
        """Return a value of a tree. A number is one that is shown as it is, and no tensor without dimensions."""
        return (
            cls.of(value)
            if isinstance(value, torch.Tensor)
            else cls(TensorInfo(type(value).__name__, (), 0), other=value)
        )

    @classmethod
    def of(cls, value: Any) -> NamedValue:
        """Return a value of a state or a weight, as the reader of a checkpoint gives it."""
        if isinstance(value, UnreadTensor):
            value = value.stored
        if isinstance(value, StoredTensor):
            return cls(TensorInfo(value.dtype, value.shape, value.placement.numel * value.itemsize), value)
        if isinstance(value, torch.Tensor) and not value.is_meta:
            info = TensorInfo(dtype_name(value.dtype), tuple(value.shape), value.nbytes)
            return cls(info, constant=value.detach())
        dtype = _PYTHON_DTYPES.get(type(value))
        if dtype is not None and not (type(value) is int and not -_MOST_INT <= value < _MOST_INT):
            number = torch.tensor(value, dtype=dtype)
            return cls(TensorInfo(type(value).__name__, (), number.nbytes), constant=number)
        return cls(TensorInfo(type(value).__name__, (), 0), other=value)


class UnreadTensor(torch.Tensor):
    """A large tensor that is not read with the description of an optimizer. `stored`: its place."""

    stored: StoredTensor

    @classmethod
    def of(cls, stored: StoredTensor) -> UnreadTensor:
        """Return the stand-in for a stored tensor."""
        made = torch.empty(stored.shape, dtype=dtype_named(stored.dtype), device="meta").as_subclass(cls)
        made.stored = stored
        return made

    def clone(self, *args: Any, **kwargs: Any) -> UnreadTensor:
        """Return the same stand-in: a tensor in several places is one tensor."""
        return self


@dataclass(frozen=True)
class NamedValues:
    """All values of a checkpoint by name.

    Attributes:
        weights: by FQN.
        state: by FQN and name of the value; under TREES, the tensors and the plain values of the trainer's trees.
        groups: the hyperparameters of each parameter that the optimizer lists, by FQN.
        others: the entries of the optimizer's dict that belong to no parameter.
        aliases: other names of tied parameters and buffers, each with the FQN.
        has_names: whether the parameters of the optimizer have their names. False: their names are their ids.
    """

    reader: Reader
    weights: Mapping[str, NamedValue]
    state: Mapping[str, Mapping[str, NamedValue]] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    has_names: bool = True

    def find(self, name: str) -> NamedValue:
        """Return the value of a name, which may be an alias.

        Raises StateError that lists similar names.
        """
        weight = self.weights.get(self.aliases.get(name, name))
        if weight is not None:  # names of weights may have colons, too
            return weight
        fqn, _, key = name.rpartition(":")
        tied = [fqn, self.aliases.get(fqn, fqn), *(other for other, to in self.aliases.items() if to == fqn)]
        values = next((self.state[other] for other in tied if other in self.state), {})
        value = values.get(key) if ":" in name else None
        if value is None:
            raise StateError(f"{self.reader.index.where}: has no value {name!r}{self._similar(name)}")
        return value

    def names(self) -> Iterator[str]:
        """Yield all names, of weights and of state values."""
        yield from self.weights
        for fqn, values in self.state.items():
            yield from (f"{fqn}:{key}" for key in values)

    def _similar(self, name: str) -> str:
        close = difflib.get_close_matches(name, list(self.names()), n=3, cutoff=0.5)
        return f": did you mean {' or '.join(close)}?" if close else ": inspect lists its names"


@contextmanager
def opened_at(place: Place, storage_options: StorageOptions) -> Iterator[Reader]:
    """Open a checkpoint for reading, with verification, and close it at the end."""
    store = store_at(place, options=storage_options)
    reader = retry_if_replaced(lambda: open_checkpoint(store, verify=True))
    try:
        yield reader
    finally:
        reader.close()


@dataclass(frozen=True)
class Decoded:
    """An open checkpoint whose optimizer is decoded, before its parameters have names."""

    reader: Reader
    weights: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    parts: frozenset[str]
    saved: SavedOptim | None = None
    with_state: bool = True
    names: Sequence[Sequence[str]] | None = None  # that the groups list, if there are groups with names
    values: Mapping[str, Any] = field(
        default_factory=dict
    )  # the trainer's values that are no tensors in files, by name

    @classmethod
    def of(cls, reader: Reader, *, allow_pickle: bool, with_state: bool = True) -> Decoded:
        """Decode the optimizer of a checkpoint, unless only weights are asked for.

        Raises CheckpointError for a pickle unless `allow_pickle` is True.
        """
        index = reader.index
        parts = frozenset[str]() if index.facts.names_are_fqns else wrapper_parts()
        weights: Mapping[str, StoredTensor] = renamed_weights(index, parts) if parts else index.weights
        aliases = renamed_aliases(index, weights, parts) if parts else index.aliases
        saved, names = None, None
        if with_state and index.optim is not None:
            with as_checkpoint_error(index.where):
                saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
                names = names_in(saved.full) if "param_groups" in saved.full else None
        values = _values_in_trees(index, allow_pickle=allow_pickle) if with_state else {}
        return cls(reader, weights, aliases, parts, saved, with_state=with_state, names=names, values=values)

    @property
    def has_names(self) -> bool:
        """Whether the optimizer calls its parameters by name; True without an optimizer."""
        full = self.saved.full if self.saved is not None else {}
        return "param_groups" not in full or self.names is not None

    @property
    def num_listed(self) -> tuple[int, ...]:
        """How many parameters each group lists."""
        full = self.saved.full if self.saved is not None else {}
        return tuple(num_listed(full.get("param_groups", ())))

    @property
    def listed(self) -> tuple[str, ...]:
        """The names that the groups list, in their order; empty for ids without names."""
        return tuple(name for group in self.names or () for name in group)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of weights by FQN."""
        return {fqn: tensor.shape for fqn, tensor in self.weights.items()}

    def named(self, order: Sequence[str] | None = None, known: Sequence[str] = ()) -> NamedValues:
        """Return all values by name.

        Args:
            order: the names of the optimizer's parameters by id, for an optimizer without names; None: the ids as text.
            known: further names of the model, by which names with the parts of wrappers are understood.
        """
        weights = {fqn: NamedValue.of(tensor) for fqn, tensor in self.weights.items()}
        trees = (
            {key: NamedValue.of(tensor) for key, tensor in self.reader.index.trees.items()} if self.with_state else {}
        ) | {name: NamedValue.as_it_is(value) for name, value in self.values.items() if not isinstance(value, Withheld)}
        of_trees = {TREES: trees} if trees else {}
        if self.saved is None:
            return NamedValues(self.reader, weights, of_trees, aliases=self.aliases)
        full = self._resolved(order, known)
        state = {
            fqn: {str(name): NamedValue.of(value) for name, value in values.items()}
            for fqn, values in full.state.items()
        }
        groups = {fqn: hyper for hyper, fqns in full.groups for fqn in fqns}
        others = {str(key): value for key, value in full.other_keys.items()}
        return NamedValues(
            reader=self.reader,
            weights=weights,
            state={**state, **of_trees},
            groups=groups,
            others=others,
            aliases=self.aliases,
            has_names=self.has_names or order is not None,
        )

    def _resolved(self, order: Sequence[str] | None, known: Sequence[str]) -> FullState:
        """Return the state by FQN, with a StoredTensor in the place of each tensor in files."""
        where = self.reader.index.where
        if self.saved is None:
            raise CheckpointError(f"{where}: was saved without an optimizer")
        if self.has_names:
            names = tuple(dict.fromkeys([*self.weights, *known]))
            naming = Names((names,), self.aliases, wrapper_parts=self.parts, model_order=names)
        else:
            given = tuple(order) if order is not None else tuple(str(number) for number in range(sum(self.num_listed)))
            if len(given) != sum(self.num_listed):
                raise StateError(
                    f"{where}: the optimizer has {counted_noun(sum(self.num_listed), 'parameter')} by ids, and "
                    f"param_names has {len(given)}: give one FQN for each id"
                )
            left = iter(given)
            listed = tuple(tuple(next(left) for _ in range(num)) for num in self.num_listed)
            naming = Names(listed, self.aliases, unit_order=given, wrapper_parts=self.parts, model_order=given)
        resolved = StoredState.resolved(where, self.saved, naming, self.shapes, self._read)
        state = {
            fqn: {name: resolved.tensors.get((fqn, name), value) for name, value in values.items()}
            for fqn, values in resolved.full.state.items()
        }
        return replace(resolved.full, state=state)

    def _read(self, tensors: Sequence[StoredTensor]) -> list[torch.Tensor]:
        """Read small tensors; return stand-ins for large ones."""
        small = [tensor for tensor in tensors if tensor.placement.numel * tensor.itemsize <= _MOST_READ]
        elements = {tensor.key: value for tensor, value in zip(small, read_constants(self.reader, small), strict=True)}
        return [elements[tensor.key] if tensor.key in elements else UnreadTensor.of(tensor) for tensor in tensors]

    def fits(self, order: Sequence[str], shapes: Mapping[str, Shape]) -> bool:
        """Return whether ids may have these names: each parameter with state has a value of its own shape, or only numbers."""
        if len(order) != sum(self.num_listed):
            return False
        try:
            full = self._resolved(order, ())
        except (StateError, CheckpointError):
            return False
        for fqn, values in full.state.items():
            sizes = {tuple(value.shape) for value in values.values() if isinstance(value, (StoredTensor, torch.Tensor))}
            sizes.discard(())
            if sizes and fqn in shapes and shapes[fqn] not in sizes:
                return False
        return True


def _values_in_trees(index: CheckpointIndex, *, allow_pickle: bool) -> dict[str, Any]:
    """Return the values in the trainer's trees that are no tensors in files, by the names and numbers on their paths."""
    tree = index.extras[COMMON].as_tree(allow_pickle=allow_pickle) if COMMON in index.extras else {}
    named = tree if isinstance(tree, Mapping) else {"extra": tree}
    shown = {name: value for name, value in named.items() if not str(name).startswith(RESERVED)}
    return {".".join(map(str, path)): leaf for path, leaf in leaves_of(shown) if not isinstance(leaf, InFile)}
