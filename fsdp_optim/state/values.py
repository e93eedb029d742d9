"""What a state value is: sharded like its parameter, a scalar, or opaque; and what ranks tell each other of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy
import torch

from fsdp_optim.layout import Placement
from fsdp_optim.memory import dtype_name, dtype_named, is_plain
from fsdp_optim.state.same import key_of


class Kind(Enum):
    """What a state value is to its parameter.

    SHARDED follows the parameter's elements. SCALAR is one per parameter. PLACED is a DTensor with a shape or placements
    of its own. OPAQUE is anything else.
    """

    SHARDED = "sharded"
    SCALAR = "scalar"
    PLACED = "placed"
    OPAQUE = "opaque"


# For a parameter without dimensions, `step` and `exp_avg` look alike. These names of torch.optim are scalars; where
# other parameters of the model have a value of the same name, they show what it is.
_SCALAR_NAMES = frozenset({"step", "mu_product", "eta", "mu"})

# And these of torch.optim are always shaped like their parameter: another shape is a mistake, not an opaque value.
_SHARDED_NAMES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size"),
    }
)


@dataclass(frozen=True)
class Evidence:
    """The value names that are sharded, and those that are scalars, for parameters that have dimensions."""

    sharded: frozenset[str] = frozenset()
    scalar: frozenset[str] = frozenset()

    @classmethod
    def of(cls, kinds: Iterable[tuple[str, Kind]]) -> Evidence:
        seen = set(kinds)
        return cls(
            frozenset(name for name, kind in seen if kind is Kind.SHARDED),
            frozenset(name for name, kind in seen if kind is Kind.SCALAR),
        )

    def says_sharded(self, name: str) -> bool:
        """Whether a value of this name has to be shaped like its parameter."""
        return name in self.sharded or name in _SHARDED_NAMES

    def says_scalar(self, name: str) -> bool:
        return name not in self.sharded and (name in self.scalar or name in _SCALAR_NAMES)


NO_EVIDENCE = Evidence()


def is_scalar(value: object) -> bool:
    """A number (numpy's too), a flag, a word, None, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, complex, str, numpy.number, numpy.bool_))


def kind_of(name: str, value: object, shape: tuple[int, ...], evidence: Evidence) -> Kind:
    """The kind of a value of a parameter whose tensor (whole, or this rank's part) has this shape."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 == len(shape):
        return Kind.SCALAR if evidence.says_scalar(name) else Kind.SHARDED
    if is_scalar(value):
        return Kind.SCALAR
    if isinstance(value, torch.Tensor) and is_plain(value) and tuple(value.shape) == shape:
        return Kind.SHARDED
    return Kind.OPAQUE


@dataclass(frozen=True)
class Scalar:
    """A scalar with its type: two are equal when type, dtype and bits are. The value is not part of the comparison."""

    key: str
    value: Any = field(repr=False, compare=False)

    @classmethod
    def of(cls, value: object) -> Scalar:
        """Copies a tensor to the CPU, so that the scalar stays what it is when training goes on."""
        if isinstance(value, torch.Tensor):
            local = (
                value.to_local() if hasattr(value, "to_local") else value
            )  # a DTensor without dimensions is a replica
            value = local.detach().to("cpu", copy=True)
        return cls(key_of(value), value)

    def __str__(self) -> str:
        return f"{self.value!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Small and fast between ranks: a tensor travels as its number, which is exact."""
        if isinstance(self.value, torch.Tensor):
            return _tensor_scalar, (self.key, dtype_name(self.value.dtype), self.value.item())
        return Scalar, (self.key, self.value)


def _tensor_scalar(key: str, dtype: str, number: complex) -> Scalar:
    return Scalar(key, torch.tensor(number, dtype=dtype_named(dtype)))


def own(value: Any) -> Any:
    """A copy of a value that shares no memory with it; plain tensors come to the CPU."""
    if is_plain(value):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except NotImplementedError:  # a tensor of a class of its own that has no clone(), as torchao's
        if not hasattr(value, "__tensor_flatten__"):
            raise
        names, context = value.__tensor_flatten__()
        parts = {name: own(getattr(value, name)) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())


@dataclass(frozen=True)
class Odd:
    """A value that is opaque: its class, and its dtype and shape where it is a tensor."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: object) -> Odd:
        if isinstance(value, torch.Tensor):
            return cls(type(value).__name__, dtype_name(value.dtype), tuple(value.shape))
        return cls(type(value).__name__)

    def __str__(self) -> str:
        return f"a {self.kind}" + (f" of shape {list(self.shape)}" if self.dtype else "")


@dataclass(frozen=True)
class Summary:
    """What the state of one live parameter consists of, without its elements, as ranks tell each other."""

    sharded: tuple[tuple[str, str], ...] = ()  # (name, dtype)
    scalars: tuple[tuple[str, Scalar], ...] = ()
    placed: tuple[tuple[str, tuple[str, Placement]], ...] = ()  # (name, (dtype, where it lives))
    opaque: tuple[tuple[str, Odd], ...] = ()
    names: tuple[str, ...] = ()  # all of them, in the order that the optimizer has them

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        kind: Callable[[str, object], Kind],
        place: Callable[[torch.Tensor], Placement | None] = lambda value: None,
    ) -> Summary:
        found: dict[Kind, list[tuple[str, Any]]] = {kind: [] for kind in Kind}
        for name, value in values.items():
            what = kind(name, value)
            match what:
                case Kind.SHARDED:
                    told: Any = dtype_name(value.dtype)
                case Kind.SCALAR:
                    told = Scalar.of(value)
                case Kind.PLACED:
                    told = (dtype_name(value.dtype), place(value))
                case Kind.OPAQUE:
                    told = Odd.of(value)
            found[what].append((name, told))
        return cls(
            sharded=tuple(found[Kind.SHARDED]),
            scalars=tuple(found[Kind.SCALAR]),
            placed=tuple(found[Kind.PLACED]),
            opaque=tuple(found[Kind.OPAQUE]),
            names=tuple(values),
        )

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the sharded values."""
        return {name: dtype_named(dtype) for name, dtype in self.sharded}

    @property
    def everything(self) -> dict[str, Any]:
        """What is told of each value, by name."""
        return {**dict(self.sharded), **dict(self.scalars), **dict(self.placed), **dict(self.opaque)}

    def __str__(self) -> str:
        return ", ".join(self.names) or "an empty state"
