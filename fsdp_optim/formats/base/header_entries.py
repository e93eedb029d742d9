"""The tensors that the header of a safetensors file lists, and the names that safetensors has for dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import overload

import numpy
from msgspec import Struct
from numpy.typing import NDArray

from fsdp_optim.errors import CheckpointError

# safetensors' name of a dtype -> (torch's name, bytes of an element)
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F4": ("float4_e2m1fn_x2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}
IN_PAIRS = "F4"  # safetensors counts the numbers along the last dimension, torch the bytes, which have two numbers each
_CODES = {name: code for code, (name, _) in DTYPES.items()}


def code_of(key: str, dtype: str) -> str:
    """Return the name in safetensors of a dtype of torch. Raises CheckpointError if safetensors lacks the dtype."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"{key}: safetensors has no dtype for {dtype}; its dtypes are {', '.join(sorted(_CODES))}"
        )
    return _CODES[dtype]


class HeaderEntry(Struct, frozen=True, gc=False):
    """One tensor of a file, with the bytes [start, stop) of the data section."""

    key: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        return DTYPES[self.code][0]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.code][1]


class Entries(Sequence[HeaderEntry]):
    """The tensors of a header that was read, as columns. Each question makes a new object.

    `keys`: the names; `kinds`: of each tensor the number of its code and shape in `shapes`; `starts`: its first byte.
    """

    def __init__(
        self,
        keys: Sequence[str],
        kinds: NDArray[numpy.uint16 | numpy.int64],
        starts: NDArray[numpy.int64],
        shapes: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        self.keys, self._kinds, self._starts, self._shapes = keys, kinds, starts, shapes
        self._nbytes = [prod(shape) * DTYPES[code][1] for code, shape in shapes]

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> HeaderEntry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[HeaderEntry]: ...
    def __getitem__(self, at: int | slice) -> HeaderEntry | Sequence[HeaderEntry]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        kind, start = int(self._kinds[at]), int(self._starts[at])
        return HeaderEntry(self.keys[at], *self._shapes[kind], start, start + self._nbytes[kind])

    def columns(self) -> tuple[list[int], list[int], Sequence[tuple[str, tuple[int, ...]]]]:
        """Return the kind of each tensor and its first byte, and the code and shape of each kind."""
        return self._kinds.tolist(), self._starts.tolist(), self._shapes

    def __iter__(self) -> Iterator[HeaderEntry]:
        for key, kind, start in zip(self.keys, self._kinds.tolist(), self._starts.tolist(), strict=True):
            code, shape = self._shapes[kind]
            yield HeaderEntry(key, code, shape, start, start + self._nbytes[kind])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def of_code(self, code: str) -> list[HeaderEntry]:
        """Return the tensors of one dtype."""
        kinds = [kind for kind, (other, _) in enumerate(self._shapes) if other == code]
        return [self[at] for at in numpy.flatnonzero(numpy.isin(self._kinds, kinds)).tolist()] if kinds else []
