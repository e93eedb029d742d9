"""The classes and functions that a pickle of torch may name. All others are inert: nothing of a file is executed.

A tensor becomes whatever `TensorMaker.tensor` makes of its description: no element is read here.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol

import torch

from fsdp_optim.foreign.archive.numpy_globals import NUMPY, NUMPY_BUILD
from fsdp_optim.foreign.archive.pickle_table import Global, Known, Table, checked_keys, is_left
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.tensors.memory import dtype_name, dtype_named

_MOST = 1 << 62  # elements or bytes
_MOST_IN_RANGE = 1 << 20

_TYPED = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}


@dataclass(frozen=True, eq=False)
class StorageClass(Global):
    """A class of storages: a name of a dtype."""

    dtype: str


@dataclass(frozen=True, eq=False)
class Storage(Unread):
    """The description of a storage: its key in the archive, the name of its dtype, and its number of elements."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_named(self.dtype).itemsize


@dataclass(frozen=True)
class TensorView:
    """The description of a tensor: a part of a storage. `is_conj`, `is_neg`: its elements are stored conjugated, or negated."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool = False
    is_neg: bool = False

    @property
    def itemsize(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order, and mean what they are."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return not self.is_conj and not self.is_neg

    @property
    def num_spanned(self) -> int:
        """The number of elements of the storage from the first to the last of the tensor."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if self.numel else 0


@dataclass(frozen=True, eq=False)
class Damaged:
    """Stands for a tensor that cannot be the saved one. `why`: the reason, for the error that names the tensor."""

    why: str


class TensorMaker(Protocol):
    """The maker of values for tensors."""

    def tensor(self, view: TensorView) -> Any:
        """Return the value for a tensor. Raises ValueError where the tensor cannot lie in its storage."""


def storage_of(identity: Any) -> Storage:
    """Return the storage that a persistent id of a zip archive describes."""
    kind, cls, key, _, numel = identity
    if _text(kind) != "storage" or type(cls) is not StorageClass or not _is_size(numel):
        raise ValueError("a persistent id that does not describe a storage")
    return Storage("torch.storage.UntypedStorage", _text(key), cls.dtype, numel)


def table_of(tensors: TensorMaker) -> Table:
    """Return the table of all globals that files of torch.save need."""
    rebuild = _Rebuild(tensors)
    calls: Mapping[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": rebuild.plain,
        "torch._utils._rebuild_tensor_v2": rebuild.plain,
        "torch._utils._rebuild_tensor_v3": rebuild.with_dtype,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_wrapper_subclass": _of_subclass,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
        "torch._tensor._rebuild_from_type": _from_type,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.tensor._rebuild_from_type": _from_type,
        "torch.serialization._get_layout": _layout,
        "torch.Size": _size,
        "torch.device": _device,
        "collections.OrderedDict": _ordered_dict,
        "collections.Counter": _counter,
        "collections.defaultdict": _default_dict,
        "_codecs.encode": _encoded,
        "builtins.bytearray": _bytearray,
        "builtins.bytes": _no_bytes,
        "builtins.complex": _complex,
        "builtins.range": _range,
        "builtins.set": _set,
        "builtins.frozenset": lambda items=(): frozenset(_set(items)),
        "copyreg._reconstructor": _reconstructed,
        "_io.BytesIO": lambda: io.BytesIO(),
    }
    classes: Mapping[str, type] = {
        **{f"builtins.{cls.__name__}": cls for cls in (dict, list, tuple, set, int, float, bool, str)},
        "torch.nn.parameter.Parameter": torch.nn.Parameter,
        "torch.Tensor": torch.Tensor,
        "torch._tensor.Tensor": torch.Tensor,
    }
    known = {name: Known(name, calls.get(name, _no_call(name)), classes.get(name)) for name in {**calls, **classes}}
    known["torch.nn.parameter.Parameter"] = Known("torch.nn.parameter.Parameter", _parameter, torch.nn.Parameter)
    build: Mapping[type, Callable[[Any, Any], None]] = {
        OrderedDict: _set_metadata,
        io.BytesIO: _set_buffer,
        **NUMPY_BUILD,
    }
    return Table({**dtypes(), **_storage_classes(), **NUMPY, **known}, build)


@cache
def dtypes() -> dict[str, torch.dtype]:
    """Return all dtypes, each by `torch.` and its name."""
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@cache
def _storage_classes() -> dict[str, StorageClass]:
    typed = {f"{kind}Storage": dtype for kind, dtype in _TYPED.items() if hasattr(torch, dtype)}
    dtype_of = {f"{module}.{name}": dtype for module in ("torch", "torch.cuda") for name, dtype in typed.items()}
    untyped = ("torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage")
    dtype_of |= dict.fromkeys(untyped, "uint8")
    return {name: StorageClass(name, dtype) for name, dtype in dtype_of.items()}


# ------------------------------------------------------------------------------------------- tensors


class _Rebuild:
    """The functions that make tensors, which return a Damaged for a tensor that cannot exist."""

    def __init__(self, tensors: TensorMaker) -> None:
        self._tensors = tensors

    def plain(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = False, hooks: Any = None, bits: Any = None
    ) -> Any:
        return self._made(storage, storage.dtype if isinstance(storage, Storage) else "", offset, shape, stride, bits)

    def with_dtype(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        if not isinstance(dtype, torch.dtype):
            return Damaged("its dtype is not one of torch")
        return self._made(storage, dtype_name(dtype), offset, shape, stride, bits)

    def _made(self, storage: Any, dtype: str, offset: Any, shape: Any, stride: Any, bits: Any) -> Any:
        if not isinstance(storage, Storage):
            return Damaged("its storage is not one of the file")
        if not (_are_sizes(shape) and _are_sizes(stride) and _is_size(offset) and len(shape) == len(stride)):
            return Damaged("its shape, strides and offset are not numbers of elements")
        set_bits = {name for name, bit in bits.items() if bit} if type(bits) is dict else set()
        if (bits is not None and type(bits) is not dict) or not set_bits <= {"conj", "neg"}:
            return Damaged(f"its elements have properties that this version does not know: {bits!r:.80}")
        view = TensorView(
            storage=storage,
            dtype=dtype,
            offset=offset,
            shape=tuple(shape),
            stride=tuple(stride),
            is_conj="conj" in set_bits,
            is_neg="neg" in set_bits,
        )
        if view.numel >= _MOST or (view.offset + view.num_spanned) * view.itemsize >= _MOST:
            return Damaged(f"its shape {list(shape)} is larger than any memory")
        if (view.offset + view.num_spanned) * view.itemsize > storage.nbytes and view.numel:
            return Damaged(
                f"it ends at byte {(view.offset + view.num_spanned) * view.itemsize} of a storage of {storage.nbytes} bytes"
            )
        try:
            return self._tensors.tensor(view)
        except ValueError as error:
            return Damaged(str(error))


def _parameter(data: Any, *others: Any) -> Any:
    return data


def _of_device(data: Any, dtype: Any, *others: Any) -> Any:
    """Return a tensor of a device that torch saves by way of the CPU."""
    if getattr(data, "dtype", None) == str(dtype).removeprefix("torch."):
        return data
    return Unread("torch._utils._rebuild_device_tensor_from_cpu_tensor")


def _of_subclass(cls: Any, *description: Any) -> Any:
    """Return a tensor subclass without a storage of its own, such as a DTensor, as the stand-in of a format returns it."""
    if isinstance(cls, Known) and cls.is_stand_in:
        return cls.call(*description)
    return Unread(cls.what if isinstance(cls, Unread) else "torch._utils._rebuild_wrapper_subclass")


def _from_type(function: Any, cls: Any, arguments: Any, state: Any = None) -> Any:
    """Return a tensor of a subclass, or with attributes, which are left out."""
    if type(arguments) is not tuple or not isinstance(function, Unread):
        raise TypeError("a tensor without arguments")
    if not isinstance(function, Known) or is_left(cls):
        return Unread((cls if is_left(cls) else function).what)
    made = function.call(*arguments)
    if isinstance(cls, Known) and cls.is_stand_in:
        made = made if function.call is _of_subclass else cls.call(made)
        if hasattr(type(made), "__setstate__"):
            made.__setstate__(state)
    return made


# ------------------------------------------------------------------------------------------- plain values


def _set_metadata(target: OrderedDict[Any, Any], state: Any) -> None:
    """Set the versions of modules beside a state dict. Other attributes of an OrderedDict are left out."""
    if type(state) is not dict:
        raise TypeError("a state that is not a dict")
    if isinstance(state.get("_metadata"), dict):
        vars(target)["_metadata"] = state["_metadata"]


def _set_buffer(target: io.BytesIO, state: Any) -> None:
    """Fill a BytesIO with its bytes, and set its position. Attributes that were added to it are left out."""
    data, position, _ = state
    if type(data) is not bytes or not _is_size(position):
        raise TypeError("a BytesIO without bytes")
    target.write(data)
    target.seek(position)


def _size(items: Any = ()) -> torch.Size:
    if not _are_sizes(items):
        raise ValueError("a size that is no tuple of numbers")
    return torch.Size(items)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or (index is not None and not _is_size(index)):
        raise TypeError("a device without a name")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> Any:
    layout = getattr(torch, str(name).removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise TypeError("a layout of tensors that torch does not have")
    return layout


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_pairs(items))


def _counter(items: Any = ()) -> Counter[Any]:
    return Counter(dict(_pairs(items)))


def _default_dict(factory: Any = None, items: Any = ()) -> Any:
    if factory is not None and not (isinstance(factory, Known) and factory.of is not None):
        return Unread("collections.defaultdict")
    return defaultdict(factory.of if factory is not None else None, _pairs(items))


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    if isinstance(items, dict):
        items = list(items.items())
    if not isinstance(items, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in items):
        raise TypeError("the items of a dict that are no pairs")
    checked_keys([key for key, _ in items])
    return [(key, value) for key, value in items]


def _set(items: Any = ()) -> set[Any]:
    return set(checked_keys(items))


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes that are written as no text in Latin-1")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    """Return the empty bytes, which the protocol of torch.save writes as a call."""
    return b""


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    return bytearray(data if type(data) in (bytes, bytearray) else _encoded(data, encoding))


def _complex(real: Any, imaginary: Any = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise TypeError("a complex number whose parts are no numbers")
    return complex(real, imaginary)


def _range(*numbers: Any) -> Any:
    """Return a range; a range that would take much memory as a list is left out."""
    if not all(type(number) is int and abs(number) < _MOST for number in numbers):
        raise TypeError("a range whose limits are no numbers")
    made = range(*numbers)
    return made if len(made) <= _MOST_IN_RANGE else Unread("builtins.range")


def _reconstructed(cls: Any, base: Any, state: Any) -> Any:
    """Return an object of the first pickle protocols."""
    if isinstance(cls, Known):
        return cls.call()
    if isinstance(cls, Unread):
        return Unread(cls.what)
    raise TypeError("an object without a class")


def _no_call(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return Unread(name)

    return call


def _text(value: Any) -> str:
    if type(value) not in (str, bytes):
        raise TypeError("a name that is no text")
    return value if isinstance(value, str) else value.decode("ascii")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_sizes(values: Any) -> bool:
    return isinstance(values, (tuple, list, Sequence)) and len(values) <= _MOST_DIMS and all(map(_is_size, values))


_MOST_DIMS = 64
