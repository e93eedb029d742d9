"""What a state value is: sharded like its parameter, a scalar, or opaque; and when two values are the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """SHARDED follows the parameter's elements; SCALAR is one per parameter; OPAQUE is anything else."""

    SHARDED = "sharded"
    SCALAR = "scalar"
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


def is_sharded_name(name: str, sharded_names: frozenset[str]) -> bool:
    """Whether a value of this name has to be shaped like its parameter."""
    return name in sharded_names or name in _SHARDED_NAMES


def is_scalar(value: object) -> bool:
    """A number, a flag, a word, None, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, complex, str))


def kind_of(name: str, value: object, shape: tuple[int, ...], sharded_names: frozenset[str]) -> Kind:
    """The kind of a value of a parameter whose tensor (whole, or this rank's part) has this shape.

    `sharded_names`: value names that are sharded for some parameter that has dimensions.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 == len(shape):
        return Kind.SHARDED if name in sharded_names or name not in _SCALAR_NAMES else Kind.SCALAR
    if is_scalar(value):
        return Kind.SCALAR
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
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
            value = value.detach().to("cpu", copy=True)
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


def key_of(value: object) -> str:
    """A text that is equal for equal values, on every rank; objects that cannot be compared are known by their class."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            item = value.item()
            return f"tensor({value.dtype}, {item.hex() if isinstance(item, float) else repr(item)})"
        flat = value.detach().cpu().reshape(-1)
        return (
            f"tensor({value.dtype}, {list(value.shape)}, {flat.contiguous().view(torch.uint8).numpy().tobytes().hex()})"
        )
    if isinstance(value, float):
        return f"float({value.hex()})"
    if value is None or isinstance(value, (bool, int, complex, str, bytes)):
        return f"{type(value).__name__}({value!r})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(key_of, value))})"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{key_of(k)}: {key_of(v)}' for k, v in value.items())})"
    return f"<{type(value).__qualname__}>"


def own(value: Any) -> Any:
    """A copy of a scalar or of a hyperparameter that shares no memory with it; tensors come to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


@dataclass(frozen=True)
class Summary:
    """What the state of one live parameter consists of, without its elements, as ranks tell each other."""

    sharded: tuple[tuple[str, str], ...] = ()  # (name, dtype)
    scalars: tuple[tuple[str, Scalar], ...] = ()
    opaque: tuple[tuple[str, str], ...] = ()  # (name, class)
    names: tuple[str, ...] = ()  # all of them, in the order that the optimizer has them

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype_named(dtype) for name, dtype in self.sharded}

    def __str__(self) -> str:
        return ", ".join(self.names) or "an empty state"
