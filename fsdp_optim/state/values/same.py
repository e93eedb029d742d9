"""The bitwise equality of two values: by comparison on one rank, by a digest of their parts between ranks."""

from __future__ import annotations

import functools
import numbers
import types
from collections.abc import Mapping
from typing import Any

import numpy
import torch
import xxhash

from fsdp_optim.tensors.memory import bytes_in_pieces, is_plain, pieces

_MOST_BITS = 4096  # of a number that Python shows in digits
_BUILTIN = (bool, int, float, complex, str, bytes)
_MOST_NUMEL = 1 << 20  # elements in one sum
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # itemsize -> integer dtype
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


class Incomparable(TypeError):
    """A value that is equal only to itself, so it is not known whether another rank has an equal value."""


def fingerprint_of(value: object) -> str:
    """Return a digest of everything that `same` compares, computed in bounded memory. Raises Incomparable."""
    if type(value) is torch.Tensor and _lies_in_a_row(value):
        return _digest_of_row(value)  # nearly always; the same digest, in a tenth of the time
    digest = _Digest()
    digest.add(value)
    return digest.hexdigest()


def _lies_in_a_row(value: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are on the CPU, side by side, as they are."""
    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
    )


def _digest_of_row(value: torch.Tensor) -> str:
    digest = xxhash.xxh3_128(_head_of(value.dtype, value.shape))
    if value.numel():
        try:
            row = value.detach().view(-1)
            if row.stride(0) != 1:  # of one element
                row = row.clone(memory_format=torch.contiguous_format)
            elements = row.view(torch.uint8).numpy()
        except RuntimeError as error:  # a tensor without memory (ZeroTensor)
            raise Incomparable(f"a Tensor cannot be compared: {error}") from error
        digest.update(elements.data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def _head_of(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    content = f"{dtype} {list(shape)} {torch.strided}".encode()
    return f"tensor:{len(content)}:".encode() + content


def key_of(value: object) -> str:
    """Return a text that is equal for equal values only, and readable for short values. Raises Incomparable."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:
        return key_of_number(value.item(), value.dtype)
    if isinstance(value, torch.Tensor) and is_plain(value):
        return f"tensor({value.dtype}, {list(value.shape)}, {fingerprint_of(value)})"
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return hex(value)
    if value is None or type(value) in _BUILTIN:
        return repr(value)  # exact, and different for values of different types
    if isinstance(value, numpy.generic):
        return f"numpy.{value.dtype}({value!r})"
    if isinstance(value, _BUILTIN):
        return f"{type(value).__name__}({value!r})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(key_of, value))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{key_of(k)}: {key_of(v)}" for k, v in value.items())
        return f"{type(value).__name__}({', '.join(pairs)})"
    shown = f" {value!r}" if isinstance(value, numbers.Number) else ""
    return f"<{type(value).__qualname__}{shown} {fingerprint_of(value)}>"


def key_of_number(number: object, dtype: torch.dtype) -> str:
    """Return the `key_of` of a tensor without dimensions, by its number."""
    return f"tensor({number!r}, dtype={dtype})"


def same(a: object, b: object) -> bool:
    """Return whether two values are equal bit by bit, on any devices; objects are compared by their parts."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    try:
        return fingerprint_of(a) == fingerprint_of(b)
    except Incomparable:
        return a is b or bool(a == b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or (type(a) is not type(b) and not (is_plain(a) and is_plain(b))):
        return False
    if hasattr(a, "__tensor_flatten__"):
        return same(_parts_of(a), _parts_of(b))
    if a.layout != torch.strided or b.layout != torch.strided or a.is_quantized:
        return a.layout == b.layout and fingerprint_of(a) == fingerprint_of(b)
    pairs = zip(bytes_in_pieces(a), bytes_in_pieces(b), strict=True)
    return all(torch.equal(piece_a, piece_b) for piece_a, piece_b in pairs)


def _quantisation_of(value: torch.Tensor) -> list[Any]:
    """Return what gives the integers of a quantised tensor their meaning, on the CPU."""
    scheme = str(value.qscheme())
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [scheme, value.q_scale(), value.q_zero_point()]
    scales, zero_points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return [scheme, scales.cpu(), zero_points.cpu(), value.q_per_channel_axis()]


def _parts_of(value: Any) -> list[Any]:
    """Return the parts of a tensor subclass. The parts of a DTensor exclude the mesh, which belongs to the process."""
    if hasattr(value, "to_local"):
        return [value.to_local(), str(value.placements)]
    names, context = value.__tensor_flatten__()
    return [*names, *(getattr(value, name) for name in names), context]


def _first(pair: tuple[str, object]) -> str:
    return pair[0]


class _Digest:
    """A digest of values, part by part, each with its type and length, so that different values give different bytes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._inside: dict[int, int] = {}  # id() -> depth of the objects being digested, which may contain themselves

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: object) -> None:
        if value is None or type(value) in _BUILTIN:
            self._put(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, (numpy.ndarray, numpy.generic)):
            self._add_array(numpy.asarray(value), type(value))
        elif isinstance(value, torch.device):
            self._put("device", value.type.encode())  # without the index, which differs between ranks
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            self._put("named", f"{value.__module__}.{value.__qualname__}".encode())
        elif id(value) in self._inside:
            self._put("again", str(self._inside[id(value)]).encode())
        else:
            self._inside[id(value)] = len(self._inside)
            self._add_object(value)
            del self._inside[id(value)]

    def _put(self, what: str, content: bytes) -> None:
        self._hash.update(f"{what}:{len(content)}:".encode())
        self._hash.update(content)

    def _add_object(self, value: Any) -> None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (list, tuple)):
            self._put(name, str(len(value)).encode())
            for item in value:
                self.add(item)
        elif isinstance(value, Mapping):
            self._put(name, str(len(value)).encode())
            for key_print, item in sorted(((fingerprint_of(key), item) for key, item in value.items()), key=_first):
                self._put("key", key_print.encode())
                self.add(item)
        elif isinstance(value, (set, frozenset)):
            self._put(name, "".join(sorted(map(fingerprint_of, value))).encode())
        elif isinstance(value, types.FunctionType):
            self._put("function", f"{value.__module__}.{value.__qualname__}".encode())
            if "<" in value.__qualname__:  # a lambda or a local function, whose name does not identify it
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                self.add([value.__code__, value.__defaults__, value.__kwdefaults__, cells])
        elif isinstance(value, types.CodeType):
            self.add([value.co_code, value.co_consts, value.co_names])
        elif isinstance(value, types.MethodType):
            self.add([value.__func__, value.__self__])
        else:
            self._put("object", name.encode())
            self._add_reduced(value)

    def _add_reduced(self, value: Any) -> None:
        """Add the parts of an object that pickle would store."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise Incomparable(f"a {type(value).__qualname__} cannot be compared: {error}") from error
        if isinstance(reduced, str):
            self._put("global", reduced.encode())
            return
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        items, pairs = [*(items or ())], [*(pairs or ())]
        has_parts = state or items or pairs or any(part is not type(value) for part in args)
        if "__eq__" not in {name for cls in type(value).__mro__[:-1] for name in vars(cls)} and not has_parts:
            raise Incomparable(
                f"a {type(value).__qualname__} has no parts and is equal only to itself, so it cannot be compared"
            )
        self.add([make, args, state, items, pairs])

    def _add_tensor(self, value: torch.Tensor) -> None:
        cls = "tensor" if is_plain(value) else f"{type(value).__module__}.{type(value).__qualname__}"
        self._put(cls, f"{value.dtype} {list(value.shape)} {value.layout}".encode())
        if value.is_meta:
            raise Incomparable("a tensor on the meta device has no elements to compare")
        if hasattr(value, "__tensor_flatten__"):
            self.add(_parts_of(value))
        elif value.layout is torch.sparse_coo:
            self.add([value.coalesce().indices(), value.coalesce().values()])
        elif value.layout is not torch.strided:
            raise Incomparable(f"a tensor of the layout {value.layout} cannot be compared")
        else:
            try:
                for piece in bytes_in_pieces(value):
                    self._hash.update(piece.numpy().data)
                if value.is_quantized:
                    self.add(_quantisation_of(value))
            except (RuntimeError, NotImplementedError) as error:  # a subclass that does not show its elements
                raise Incomparable(f"a {type(value).__qualname__} cannot be compared: {error}") from error
            if not is_plain(value) and vars(value):
                self.add(dict(vars(value)))

    def _add_array(self, value: numpy.ndarray[Any, Any], cls: type) -> None:
        self._put(cls.__name__, f"{value.dtype.str} {value.shape}".encode())
        if value.dtype.hasobject:
            self.add(value.tolist())
        else:
            self._hash.update(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data)


def is_folded(value: object) -> bool:
    """Return whether a value is a dense tensor on a device, where `fold_of` is cheaper than a digest on the host."""
    return (
        isinstance(value, torch.Tensor)
        and is_plain(value)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type not in ("cpu", "meta")
    )


def fold_of(value: torch.Tensor) -> str:
    """Return a digest of the bits of a dense tensor, independent of the tensor's device.

    Each element is multiplied by an odd weight of its index, so a single different bit gives a different sum.
    """
    weights = _weights(min(value.numel(), _MOST_NUMEL) * max(value.itemsize // 8, 1), value.device)
    sums = []
    for _, flat in pieces(value, _MOST_NUMEL):
        for start in range(0, len(flat), _MOST_NUMEL):
            words = flat[start : start + _MOST_NUMEL].view(_WORDS[value.itemsize]).to(torch.int64)
            sums.append((words * weights[: len(words)]).sum())
    digest = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)}".encode())
    if sums:
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights(num: int, device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device) * _FIRST
    return (((mixed >> 29) ^ mixed) * _SECOND) | 1
