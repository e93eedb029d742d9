"""Plain values as JSON and tensors, exactly: tuples stay tuples, integers integers, NaN NaN. No pickle unless asked for.

What JSON has not is an object with one key that begins with `$`: {"$tuple": [...]}, {"$tensor": 3} for the fourth
tensor beside it, and so on. An object of the user's with such a key is written as {"$dict": [[key, value], ...]}.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.header import code_of
from fsdp_optim.memory import dtype_name, dtype_named, is_plain

_LONGEST_RANGE = 1 << 24  # more is not a value, but an attempt to fill the memory

_DICTS: Mapping[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}


class Encoder:
    """Turns values into JSON; collects the tensors in them, on the CPU, as `tensors`.

    `records`: dataclasses that may be in them, by name.
    """

    def __init__(self, *, allow_pickle: bool = False, records: Mapping[str, type] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self._allow_pickle = allow_pickle
        self._names: dict[object, str] = {}
        for name, cls in (records or {}).items():
            self._names[cls] = name

    def encode(self, where: str, value: Any) -> Any:
        """The JSON of a value. `where`: what it is called, for errors."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if type(value) in (list, tuple, set, frozenset, torch.Size):
            items = [self.encode(f"{where}[{index}]", item) for index, item in enumerate(value)]
            tags: dict[object, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}
            return items if type(value) is list else {tags[type(value)]: items}
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(f"{where}[{key!r}]", item) for key, item in value.items()}
        for tag, cls in _DICTS.items():
            if type(value) is cls:
                pairs = [[self.encode(where, key), self.encode(f"{where}[{key!r}]", v)] for key, v in value.items()]
                return {tag: pairs}
        return self._encode_other(where, value)

    def _encode_other(self, where: str, value: Any) -> Any:
        if is_plain(value) and value.layout is torch.strided:
            return {"$tensor": self._add(where, value.detach())}
        if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            return {"$ndarray": self._add(where, _from_numpy(where, value))}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return {"$numpy": self._add(where, _from_numpy(where, value))}
        if type(value) in (bytes, bytearray):
            return {"$bytes" if type(value) is bytes else "$bytearray": base64.b64encode(value).decode()}
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
        if self._allow_pickle:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        raise CheckpointError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} is neither JSON nor a tensor: save its "
            "state_dict(), or plain values, or say allow_pickle=True on save and load"
        )

    def _add(self, where: str, tensor: torch.Tensor) -> int:
        code_of(where, dtype_name(tensor.dtype))
        self.tensors.append(tensor.to("cpu").contiguous())
        return len(self.tensors) - 1


def _from_numpy(where: str, value: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: torch has no dtype for a numpy {value.dtype}: {error}") from error


class Decoder:
    """The inverse. `tensors`: those that lay beside the JSON."""

    def __init__(
        self,
        where: str,
        tensors: Sequence[torch.Tensor],
        *,
        allow_pickle: bool = False,
        records: Mapping[str, type] | None = None,
    ) -> None:
        self._where, self._tensors = where, tensors
        self._allow_pickle, self._records = allow_pickle, records or {}

    def decode(self, said: Any) -> Any:
        """The value. Raises CheckpointError for JSON that no Encoder writes."""
        with distrusted(self._where):
            return self._decode(said)

    def _decode(self, said: Any) -> Any:
        if isinstance(said, list):
            return [self._decode(item) for item in said]
        if not isinstance(said, dict):
            return said
        if not any(key.startswith("$") for key in said):
            return {key: self._decode(item) for key, item in said.items()}
        (tag,) = said
        return self._tagged(tag, said[tag])

    def _tagged(self, tag: str, said: Any) -> Any:
        makers: Mapping[str, Callable[[Any], Any]] = {
            "$float": float,
            "$tuple": lambda items: tuple(self._decode(items)),
            "$set": lambda items: set(self._decode(items)),
            "$frozenset": lambda items: frozenset(self._decode(items)),
            "$size": lambda items: torch.Size(self._decode(items)),
            "$tensor": lambda index: self._tensors[index].clone(),
            "$ndarray": lambda index: self._tensors[index].clone().numpy(),
            "$numpy": lambda index: self._tensors[index].numpy()[()],
            "$bytes": lambda text: base64.b64decode(text, validate=True),
            "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
            "$complex": lambda parts: complex(*self._decode(parts)),
            "$range": self._range,
            "$dtype": dtype_named,
            "$device": torch.device,
            "$record": self._record,
            "$pickle": self._pickle,
        }
        if tag in _DICTS:
            pairs = [(self._decode(key), self._decode(value)) for key, value in said]
            return _DICTS[tag](dict(pairs) if tag == "$counter" else pairs)
        return makers[tag](said)

    def _range(self, numbers: list[int]) -> range:
        made = range(*numbers)
        if len(made) > _LONGEST_RANGE:
            raise ValueError(f"a range of {len(made)} numbers")
        return made

    def _record(self, said: Any) -> Any:
        name, fields = said
        return self._records[name](**{key: self._decode(value) for key, value in fields.items()})

    def _pickle(self, text: str) -> Any:
        if not self._allow_pickle:
            raise CheckpointError(
                f"{self._where}: has a pickled value, which can run any code when it is read: say allow_pickle=True if you "
                "trust who wrote it"
            )
        return pickle.loads(base64.b64decode(text, validate=True))
