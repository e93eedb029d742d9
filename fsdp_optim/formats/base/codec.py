"""An exact encoding of plain values as JSON and tensors: tuples stay tuples, and NaN stays NaN. Pickle only on request.

A value that JSON lacks is written as an object with one key that begins with `$`: {"$tuple": [...]}, {"$tensor": 3} for the
fourth tensor, {"$stored": "ema.weight"} for a tensor in another file, and so on. A dict of the user with such a key is written as
{"$dict": [[key, value], ...]}.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from fsdp_optim.errors import CheckpointError, WrapperError
from fsdp_optim.formats.base.bools import check_bools_of
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.header_entries import code_of
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.tensors.dtensors import as_local, is_dtensor
from fsdp_optim.tensors.elements import MOST_DEEP, check_elements
from fsdp_optim.tensors.memory import dtype_name, dtype_named, is_plain

_MOST_BITS = 14_000  # in an int; Python parses at most 4,300 digits
_MOST_IN_TEXT = 4096  # bytes that are written as text; more are a tensor
_MOST_RANKS = 1 << 20  # in a range inside a record, because a record makes an object for each rank

_NESTED = (list, dict)
_DICTS: Mapping[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}


class _PickleError(CheckpointError):
    """A pickled value without `allow_pickle`. Never leaves this file, because ranks exchange errors by their public names."""


@dataclass(frozen=True)
class Withheld:
    """Stands for a value that was not decoded: a pickle, or, with `is_unsafe` False, one that is not read for another reason.

    `why`: the message of the error for a caller that needs the value.
    """

    why: str
    is_unsafe: bool = True


class Encoder:
    """Turns values into JSON, and collects the tensors inside these values, on the CPU, in `tensors`.

    `records`: the dataclasses that may occur in the values, by name.
    """

    def __init__(self, *, allow_pickle: bool = False, records: Mapping[str, type] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self._allow_pickle = allow_pickle
        self._depth = 0
        self._names: dict[object, str] = {}
        for name, cls in (records or {}).items():
            self._names[cls] = name

    def encode(self, where: str, value: Any) -> Any:
        """Return the JSON of a value, which `where` names for errors.

        Raises CheckpointError for a value that no Decoder reads.
        """
        self._depth += 1
        if self._depth > MOST_DEEP:
            raise CheckpointError(
                f"{where[:200]}: is nested more than {MOST_DEEP} levels deep, which no reader accepts: save flatter values"
            )
        try:
            return self._encode(where, value)
        finally:
            self._depth -= 1

    def _encode(self, where: str, value: Any) -> Any:
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            if value.bit_length() > _MOST_BITS:
                raise CheckpointError(
                    f"{where}: a number of {value.bit_length()} bits is too long for JSON: save it as bytes"
                )
            return value
        if type(value) is str:
            return (
                value
                if is_text(value)
                else self._pickled(where, value, f"{value!r} is a str that cannot be encoded as UTF-8")
            )
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if type(value) in (list, tuple, set, frozenset, torch.Size):
            items = [
                item if _is_leaf(item) else self.encode(f"{where}[{index}]", item) for index, item in enumerate(value)
            ]
            tags: dict[object, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}
            return items if type(value) is list else {tags[type(value)]: items}
        if type(value) is dict and all(type(key) is str and not key.startswith("$") and is_text(key) for key in value):
            return {
                key: item if _is_leaf(item) else self.encode(f"{where}[{key!r}]", item) for key, item in value.items()
            }
        for tag, cls in _DICTS.items():
            if type(value) is cls:
                pairs = [[self.encode(where, key), self.encode(f"{where}[{key!r}]", v)] for key, v in value.items()]
                return {tag: pairs}
        return self._encode_other(where, value)

    def _encode_other(self, where: str, value: Any) -> Any:
        if is_dtensor(value):
            value = _local(where, value)
        if isinstance(value, torch.Tensor):
            check_elements(where, value, CheckpointError)
        if is_plain(value) and value.layout is torch.strided:
            return {"$tensor": self._add(where, value.detach())}
        if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            return {"$ndarray": self._add(where, _from_numpy(where, value))}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return {"$numpy": self._add(where, _from_numpy(where, value))}
        if type(value) is InFile:
            return {"$stored": value.key}
        if type(value) in (bytes, bytearray):
            return {"$bytes" if type(value) is bytes else "$bytearray": self._binary(value)}
        if type(value) is io.BytesIO and not value.closed:
            return {"$bytesio": [self._binary(value.getvalue()), value.tell()]}
        if type(value) is complex:
            return {"$complex": [self.encode(where, value.real), self.encode(where, value.imag)]}
        if type(value) is range:
            return {"$range": [value.start, value.stop, value.step]}
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) in self._names:
            fields = {
                f.name: self.encode(f"{where}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)
            }
            return {"$record": [self._names[type(value)], fields]}
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            parts = self._parts(where, value)
            if parts is not None:
                return {"$subclass": parts}
        of = f"{type(value).__module__}.{type(value).__qualname__}"
        return self._pickled(
            where, value, f"a {of} is neither a JSON value nor a tensor: save its state_dict(), or plain values"
        )

    def _pickled(self, where: str, value: Any, why: str) -> Any:
        """Return the pickled form of a value without another form.

        Raises CheckpointError with the reason unless pickles are allowed.
        """
        if not self._allow_pickle:
            raise CheckpointError(f"{where}: {why}, or give allow_pickle=True to save and load")
        try:
            data = pickle.dumps(value)
        except Exception as error:  # of any class: an object may have its own way to be pickled
            raise CheckpointError(
                f"{where}: a {type(value).__name__} cannot be pickled ({error}): save its state_dict(), or plain values"
            ) from error
        return {"$pickle": self._binary(data)}

    def _binary(self, data: bytes | bytearray) -> Any:
        """Encode a few bytes as text, and more bytes as the number of a tensor, because the size of the JSON is limited."""
        if len(data) <= _MOST_IN_TEXT:
            return base64.b64encode(data).decode()
        self.tensors.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(self.tensors) - 1

    def _parts(self, where: str, value: Any) -> list[Any] | None:
        """Return the parts of an instance of a tensor subclass; None unless the parts are tensors and plain values."""
        num, cls = len(self.tensors), type(value)
        try:
            names, context = value.__tensor_flatten__()
            parts = {name: self.encode(f"{where}.{name}", getattr(value, name)) for name in names}
            sizes = [list(value.shape), list(value.stride())]
            return [cls.__module__, cls.__qualname__, parts, self.encode(where, context), *sizes]
        except CheckpointError:
            del self.tensors[num:]
            return None

    def _add(self, where: str, tensor: torch.Tensor) -> int:
        code_of(where, dtype_name(tensor.dtype))
        check_bools_of(where, tensor)
        self.tensors.append(tensor.to("cpu").resolve_conj().resolve_neg().contiguous())
        return len(self.tensors) - 1


def _local(where: str, value: Any) -> Any:
    """Return the local tensor of a DTensor. Raises CheckpointError if this rank has only a part of the DTensor."""
    try:
        return as_local(where, value)
    except WrapperError as error:
        raise CheckpointError(str(error)) from None


def _is_leaf(value: Any) -> bool:
    """Return whether a value is its own JSON: most values are, and need no name for an error."""
    kind = type(value)
    if kind is str:
        return is_text(value)
    return value is None or kind is bool or (kind is int and value.bit_length() <= _MOST_BITS)


def is_text(value: str) -> bool:
    """Return whether a str can be encoded: a lone surrogate cannot."""
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_numpy(where: str, value: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: torch has no dtype for a numpy {value.dtype}: {error}") from error


class Decoder:
    """The inverse of Encoder. `tensors`: the tensors that the Encoder collected."""

    def __init__(
        self,
        where: str,
        tensors: Sequence[torch.Tensor],
        *,
        allow_pickle: bool = False,
        records: Mapping[str, type] | None = None,
    ) -> None:
        self._where, self._tensors = where, dict(enumerate(tensors))
        self._allow_pickle, self._records = allow_pickle, records or {}

    def decode(self, encoded: Any) -> Any:
        """Return the value.

        Raises CheckpointError for JSON that no Encoder writes, and for a pickle unless pickles are allowed.
        """
        with as_checkpoint_error(self._where):
            value = self._or_withheld("", encoded)
        if isinstance(value, Withheld):
            raise CheckpointError(value.why)
        return value

    def decode_each(self, encoded: Any) -> Any:
        """As `decode`, but with Withheld in the place of a dict item, or of the whole value, that is a pickle and not allowed."""
        with as_checkpoint_error(self._where):
            if not isinstance(encoded, dict):
                return self._or_withheld("", encoded)
            tag = next((key for key in encoded if key.startswith("$")), None)
            if tag is None:
                return {key: self._or_withheld(repr(key), item) for key, item in encoded.items()}
            if tag not in ("$dict", "$ordered") or len(encoded) > 1:
                return self._or_withheld("", encoded)
            try:
                pairs = [(self._decode(key), item) for key, item in _pairs(encoded[tag])]
            except _PickleError as error:
                return Withheld(str(error))
            return _DICTS[tag]((key, self._or_withheld(repr(key), item)) for key, item in pairs)

    def _or_withheld(self, key: str, encoded: Any) -> Any:
        try:
            return self._decode(encoded)
        except _PickleError as error:
            return Withheld(f"{key}: {error}" if key else str(error))

    def _decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return self._items(encoded)
        if not isinstance(encoded, dict):
            return encoded
        for key in encoded:
            if key[:1] == "$":
                break
        else:
            return {key: self._decode(item) if type(item) in _NESTED else item for key, item in encoded.items()}
        (tag,) = encoded
        if tag == "$tuple":  # by far the most frequent one
            return tuple(self._items(encoded[tag]))
        return self._tagged(tag, encoded[tag])

    def _items(self, encoded: Any) -> list[Any]:
        """Return the values of a list. Only lists are accepted, so that a short text cannot become a large value."""
        if not isinstance(encoded, list):
            raise TypeError(f"{str(encoded)[:80]} is not a list")
        for item in encoded:
            if type(item) in _NESTED:
                return [self._decode(item) if type(item) in _NESTED else item for item in encoded]
        return encoded[:]  # names and numbers alone, as nearly always

    def _tagged(self, tag: str, encoded: Any) -> Any:
        makers: Mapping[str, Callable[[Any], Any]] = {
            "$float": float,
            "$set": lambda items: set(self._items(items)),
            "$frozenset": lambda items: frozenset(self._items(items)),
            "$size": lambda items: torch.Size(self._items(items)),
            "$stored": _in_file,
            "$tensor": self._tensor,
            "$ndarray": lambda index: self._tensor(index).numpy(),
            "$numpy": lambda index: self._tensor(index).numpy()[()],
            "$bytes": self._binary,
            "$bytearray": lambda encoded: bytearray(self._binary(encoded)),
            "$bytesio": self._buffer,
            "$complex": lambda parts: complex(*self._items(parts)),
            "$range": lambda numbers: range(*self._items(numbers)),
            "$dtype": dtype_named,
            "$device": torch.device,
            "$record": self._record,
            "$subclass": self._subclass,
            "$pickle": self._pickle,
        }
        if tag in _DICTS:
            pairs = [(self._decode(key), self._decode(value)) for key, value in _pairs(encoded)]
            return _DICTS[tag](dict(pairs) if tag == "$counter" else pairs)
        return makers[tag](encoded)

    def _tensor(self, index: Any) -> torch.Tensor:
        """Return the tensor of this number. Each tensor may occur once, so that a small file cannot become a large value."""
        if type(index) is not int:
            raise TypeError(f"{str(index)[:80]} is not the number of a tensor")
        if index not in self._tensors:
            raise IndexError(f"tensor {index} is missing, or occurs twice")
        return self._tensors.pop(index)

    def _record(self, encoded: Any) -> Any:
        name, fields = encoded
        values = {key: self._decode(value) for key, value in fields.items()}
        _check_ranges(values)
        return self._records[name](**values)

    def _subclass(self, encoded: Any) -> Any:
        """Return an instance of a tensor subclass, from its parts.

        Nothing is imported: the optimizer in use has imported the class.
        """
        module, name, parts, context, sizes, strides = encoded
        cls = getattr(sys.modules.get(module), name, None)
        if cls is None:
            raise CheckpointError(
                f"{self._where}: contains a {module}.{name}, which is not imported: import {module} first"
            )
        if not (isinstance(cls, type) and issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")):
            raise ValueError(f"{module}.{name} is not a tensor subclass that is made of other tensors")
        made = {key: self._decode(part) for key, part in parts.items()}
        if not all(isinstance(part, torch.Tensor) for part in made.values()):
            raise ValueError(f"a part of a {name} is not a tensor")
        return cls.__tensor_unflatten__(made, self._decode(context), torch.Size(sizes), tuple(strides))

    def _pickle(self, encoded: Any) -> Any:
        if not self._allow_pickle:
            raise _PickleError(
                f"{self._where}: has a pickled value, which can run any code when it is read: give allow_pickle=True if you "
                "trust the author of the checkpoint"
            )
        return pickle.loads(self._binary(encoded))

    def _buffer(self, encoded: Any) -> io.BytesIO:
        data, position = encoded
        buffer = io.BytesIO(self._binary(data))
        buffer.seek(position)
        return buffer

    def _binary(self, encoded: Any) -> bytes:
        if type(encoded) is not int:
            return base64.b64decode(encoded, validate=True)
        tensor = self._tensor(encoded)
        if tensor.dtype != torch.uint8:
            raise TypeError(f"tensor {encoded} has the dtype {tensor.dtype}, not uint8")
        return tensor.numpy().tobytes()


def _in_file(key: Any) -> InFile:
    if not isinstance(key, str):
        raise TypeError(f"{str(key)[:80]} is not the name of a tensor")
    return InFile(key)


def _pairs(encoded: Any) -> list[tuple[Any, Any]]:
    if not isinstance(encoded, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in encoded):
        raise TypeError(f"{str(encoded)[:80]} is not a list of pairs")
    return [(key, value) for key, value in encoded]


def _check_ranges(value: Any) -> None:
    """Refuse long ranges in the fields of a record, which makes an object for each number. Raises ValueError."""
    if isinstance(value, range) and len(value) > _MOST_RANKS:
        raise ValueError(f"a range of {len(value)} ranks")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _check_ranges(item)
