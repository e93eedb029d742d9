"""Any value as bytes: the memory of its tensors and arrays, without a copy, and a pickle of the rest."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct

from fsdp_optim.tensors.memory import dtype_name, dtype_named

_LENGTH = 8  # bytes of a number


class Packed(Struct, frozen=True):
    """A value in parts: the pickle, then the memory of arrays, then tensors. The parts share memory with the value."""

    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> list[int]:
        return [part.numel() * part.itemsize for part in self.parts]


def pack(value: Any) -> Packed:
    """Split a value into a pickle and the memory of its arrays and tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    head = len(packer.arrays).to_bytes(_LENGTH, "big")
    around = torch.frombuffer(bytearray(head) + file.getbuffer(), dtype=torch.uint8)
    return Packed((around, *packer.arrays, *packer.tensors))


def unpack(parts: Sequence[torch.Tensor]) -> Any:
    """Return the inverse of `pack`, from parts as 1-D byte tensors. The value uses the memory of the parts."""
    around, *rest = parts
    data = around.numpy().data
    num_arrays = int.from_bytes(data[:_LENGTH], "big")
    arrays = [part.numpy() for part in rest[:num_arrays]]
    return _Unpacker(io.BytesIO(data[_LENGTH:]), arrays, rest[num_arrays:]).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add_array)
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return None
        if id(value) not in self._index:
            self._index[id(value)] = len(self.tensors)
            self.tensors.append(value.detach().resolve_conj().resolve_neg())
        return self._index[id(value)], dtype_name(value.dtype), tuple(value.shape)

    def reducer_override(self, value: Any) -> Any:
        """Split a tensor subclass into its inner tensors; its own pickle would contain the elements twice."""
        if (
            not isinstance(value, torch.Tensor)
            or not hasattr(value, "__tensor_flatten__")
            or hasattr(value, "to_local")
        ):
            return NotImplemented
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        return _of_parts, (type(value), parts, context, tuple(value.size()), tuple(value.stride()))

    def _add_array(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if not raw.nbytes or raw.readonly:
            return True  # the array stays in the pickle
        self.arrays.append(torch.frombuffer(raw, dtype=torch.uint8))
        return False


def _of_parts(cls: Any, parts: dict[str, Any], context: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    return cls.__tensor_unflatten__(parts, context, torch.Size(size), stride)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file, buffers=arrays)
        self._parts = tensors
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, known: Any) -> torch.Tensor:
        index, dtype, shape = known
        if index not in self._tensors:
            self._tensors[index] = self._parts[index].view(dtype_named(dtype)).view(shape)
        return self._tensors[index]
