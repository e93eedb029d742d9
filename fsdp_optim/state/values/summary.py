"""The summary of a parameter's state that ranks exchange: the kind, dtype and placement of each value, without elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fsdp_optim.layout import Placement, cut_of
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.state.values.same import key_of, key_of_number
from fsdp_optim.tensors.memory import bytes_in_memory, dtype_name, dtype_named


@dataclass(frozen=True)
class Scalar:
    """A scalar value, compared by `key`, which is equal if type, dtype and bits are equal."""

    key: str
    value: Any = field(repr=False, compare=False)

    @classmethod
    def of(cls, value: object) -> Scalar:
        """Return the Scalar of a value. A tensor is copied to the CPU, so that further training does not change the Scalar."""
        if isinstance(value, torch.Tensor):
            # Each rank has all of a 0-dimensional DTensor.
            local = value.to_local() if hasattr(value, "to_local") else value
            value = local.detach().to("cpu", copy=True)
        return cls(key_of(value), value)

    def __str__(self) -> str:
        return f"{self.value!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a small pickle for other ranks: a tensor is stored as its bytes, with every bit of a NaN."""
        if isinstance(self.value, torch.Tensor):
            return _tensor_scalar, (self.key, dtype_name(self.value.dtype), bytes_in_memory(self.value))
        return Scalar, (self.key, self.value)


def _tensor_scalar(key: str, dtype: str, data: bytes) -> Scalar:
    return Scalar(key, torch.frombuffer(bytearray(data), dtype=dtype_named(dtype)).view(()))


_STACKED = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool}
)


class Scalars:
    """Scalars that are read together: a read of one tensor without dimensions costs a trip to its device, as a read of many does.

    Tensors with equal bits become one Scalar.
    """

    def __init__(self, values: Iterable[object]) -> None:
        self._keys: dict[int, tuple[object, str]] = {}  # by id: the value, which lives on and keeps its id, and its key
        self._of_key: dict[str, Scalar] = {}
        by_device: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for value in values:
            if type(value) is torch.Tensor and value.dim() == 0 and value.dtype in _STACKED and not value.is_meta:
                by_device.setdefault((value.dtype, value.device), []).append(value)
        for (dtype, _), tensors in by_device.items():
            for tensor, number in zip(tensors, torch.stack(tensors).detach().cpu().tolist(), strict=True):
                if number == number:  # a NaN keeps its own bits, which its key does not show
                    self._keys[id(tensor)] = tensor, key_of_number(number, dtype)

    def of(self, value: object) -> Scalar:
        """Return the Scalar of a value as `Scalar.of` does."""
        _, key = self._keys.get(id(value), (None, ""))
        if not key:
            return Scalar.of(value)
        scalar = self._of_key.get(key)
        if scalar is None:
            scalar = self._of_key[key] = Scalar.of(value)
        return scalar


@dataclass(frozen=True)
class OpaqueType:
    """The description of an opaque value: the name of its class, and dtype and shape of a tensor.

    `cut`: the recorded cut of a placed value that is unsharded now.
    """

    class_name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    cut: str = ""

    @classmethod
    def of(cls, value: object, cut: str = "") -> OpaqueType:
        if isinstance(value, torch.Tensor):
            return cls(type(value).__name__, dtype_name(value.dtype), tuple(value.shape), cut)
        return cls(type(value).__name__)

    def __str__(self) -> str:
        return f"a {self.class_name}" + (f" of shape {list(self.shape)}" if self.dtype else "")


@dataclass(frozen=True)
class Summary:
    """The values of one live parameter's state, described without elements for the other ranks.

    Attributes:
        sharded: (name, dtype).
        scalars: (name, Scalar).
        placed: (name, (dtype, placement)).
        opaque: (name, OpaqueType).
        names: all names, in the optimizer's order.
        unsure: names of sharded values with at most one element on this rank, whose shape is the only evidence.
    """

    sharded: tuple[tuple[str, str], ...] = ()
    scalars: tuple[tuple[str, Scalar], ...] = ()
    placed: tuple[tuple[str, tuple[str, Placement]], ...] = ()
    opaque: tuple[tuple[str, OpaqueType], ...] = ()
    names: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        kind_of: Callable[[str, object], Kind],
        place: Callable[[torch.Tensor], Placement | None] = lambda value: None,
        cut: Callable[[str], str] = lambda name: "",
        unsure: Callable[[str], bool] | None = None,
        scalar: Callable[[object], Scalar] = Scalar.of,
    ) -> Summary:
        """Return the summary of some values.

        `place`: the placement of a placed value; `cut`: its recorded cut, if it is unsharded now; `scalar` reads a scalar.
        """
        sharded: list[tuple[str, str]] = []
        scalars: list[tuple[str, Scalar]] = []
        placed: list[tuple[str, Any]] = []
        opaque: list[tuple[str, OpaqueType]] = []
        for name, value in values.items():
            kind = kind_of(name, value)
            if kind is Kind.SHARDED:
                sharded.append((name, dtype_name(value.dtype)))
            elif kind is Kind.SCALAR:
                scalars.append((name, scalar(value)))
            elif kind is Kind.PLACED:
                placed.append((name, (dtype_name(value.dtype), place(value))))
            else:
                opaque.append((name, OpaqueType.of(value, cut(name))))
        return cls(
            sharded=tuple(sharded),
            scalars=tuple(scalars),
            placed=tuple(placed),
            opaque=tuple(opaque),
            names=tuple(values),
            unsure=tuple(name for name, _ in sharded if unsure(name)) if unsure is not None else (),
        )

    def as_opaque(self, names: Collection[str]) -> Summary:
        """Return the same summary with some of the sharded values as opaque values."""
        opaque = tuple((name, OpaqueType("Tensor", dtype)) for name, dtype in self.sharded if name in names)
        kept = tuple(pair for pair in self.sharded if pair[0] not in names)
        return replace(self, sharded=kept, opaque=(*self.opaque, *opaque), unsure=())

    def as_sharded(self, names: Collection[str]) -> Summary:
        """Return the same summary with some of the placed values as sharded values."""
        sharded = tuple((name, dtype) for name, (dtype, _) in self.placed if name in names)
        kept = tuple(pair for pair in self.placed if pair[0] not in names)
        return replace(self, placed=kept, sharded=(*self.sharded, *sharded))

    @cached_property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The kind of each value, as a full dict records it."""
        placed = {name: f"{Kind.PLACED.value} {cut_of(placement)}".strip() for name, (_, placement) in self.placed}
        cut = {name: f"{Kind.PLACED.value} {opaque.cut}" for name, opaque in self.opaque if opaque.cut}
        sharded, scalars = dict(self.sharded), dict(self.scalars)
        return tuple(
            (
                name,
                Kind.SHARDED.value
                if name in sharded
                else Kind.SCALAR.value
                if name in scalars
                else placed.get(name) or cut.get(name, Kind.OPAQUE.value),
            )
            for name in self.names
        )

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the sharded values."""
        return {name: dtype_named(dtype) for name, dtype in self.sharded}

    @property
    def everything(self) -> dict[str, Any]:
        """The description of each value, by name."""
        return {**dict(self.sharded), **dict(self.scalars), **dict(self.placed), **dict(self.opaque)}

    def __str__(self) -> str:
        return ", ".join(map(str, self.names)) or "an empty state"
