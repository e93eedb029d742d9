"""What a state value is: sharded like its parameter, a scalar, or opaque; and what ranks tell each other of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.layout import Placement, cut_of
from fsdp_optim.memory import dtype_name, dtype_named
from fsdp_optim.state.kinds import Kind
from fsdp_optim.state.same import key_of


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
    return Scalar(key, torch.tensor(number, dtype=dtype_named(dtype), device="cpu"))


@dataclass(frozen=True)
class Odd:
    """A value that is opaque: its class, and its dtype and shape where it is a tensor.

    `cut`: of one that was placed by itself and is whole now, how it was cut.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    cut: str = ""

    @classmethod
    def of(cls, value: object, cut: str = "") -> Odd:
        if isinstance(value, torch.Tensor):
            return cls(type(value).__name__, dtype_name(value.dtype), tuple(value.shape), cut)
        return cls(type(value).__name__)

    def __str__(self) -> str:
        return f"a {self.kind}" + (f" of shape {list(self.shape)}" if self.dtype else "")


@dataclass(frozen=True)
class Summary:
    """What the state of one live parameter consists of, without its elements, as ranks tell each other.

    `unsure`: names of sharded values that have one element or none on this rank, and that nothing but that shows to be sharded.
    """

    sharded: tuple[tuple[str, str], ...] = ()  # (name, dtype)
    scalars: tuple[tuple[str, Scalar], ...] = ()
    placed: tuple[tuple[str, tuple[str, Placement]], ...] = ()  # (name, (dtype, where it lives))
    opaque: tuple[tuple[str, Odd], ...] = ()
    names: tuple[str, ...] = ()  # all of them, in the order that the optimizer has them
    unsure: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        kind: Callable[[str, object], Kind],
        place: Callable[[torch.Tensor], Placement | None] = lambda value: None,
        cut: Callable[[str], str] = lambda name: "",
        unsure: Callable[[str], bool] | None = None,
    ) -> Summary:
        """`place`: where a value that is placed by itself lives; `cut`: how one was cut that is whole now."""
        sharded: list[tuple[str, str]] = []
        scalars: list[tuple[str, Scalar]] = []
        placed: list[tuple[str, Any]] = []
        opaque: list[tuple[str, Odd]] = []
        for name, value in values.items():
            what = kind(name, value)
            if what is Kind.SHARDED:
                sharded.append((name, dtype_name(value.dtype)))
            elif what is Kind.SCALAR:
                scalars.append((name, Scalar.of(value)))
            elif what is Kind.PLACED:
                placed.append((name, (dtype_name(value.dtype), place(value))))
            else:
                opaque.append((name, Odd.of(value, cut(name))))
        return cls(
            sharded=tuple(sharded),
            scalars=tuple(scalars),
            placed=tuple(placed),
            opaque=tuple(opaque),
            names=tuple(values),
            unsure=tuple(name for name, _ in sharded if unsure(name)) if unsure is not None else (),
        )

    def as_opaque(self, names: Collection[str]) -> Summary:
        """The same with some of the sharded values as opaque ones."""
        opaque = tuple((name, Odd("Tensor", dtype)) for name, dtype in self.sharded if name in names)
        kept = tuple(pair for pair in self.sharded if pair[0] not in names)
        return replace(self, sharded=kept, opaque=(*self.opaque, *opaque), unsure=())

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The kind of each value, as a full dict records it."""
        placed = {name: f"{Kind.PLACED.value} {cut_of(placement)}".strip() for name, (_, placement) in self.placed}
        cut = {name: f"{Kind.PLACED.value} {odd.cut}" for name, odd in self.opaque if odd.cut}
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
