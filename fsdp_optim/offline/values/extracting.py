"""Extract: some values of a checkpoint as a file of numpy, safetensors or torch, in windows, complete or absent."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from fsdp_optim.arguments import check_at_least
from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, options_beside
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.foreign.archive.torch_zip import TensorStub, frames_around
from fsdp_optim.formats.base.header import Header
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.layout import Placement, Shape
from fsdp_optim.offline.pages.output_file import checked_output, open_output
from fsdp_optim.offline.values.element_windows import WindowReader, window_nbytes_in, windows_of
from fsdp_optim.offline.values.named_values import Decoded, NamedValue, opened_at
from fsdp_optim.offline.values.showing import tensor_named
from fsdp_optim.offline.values.slices import sliced
from fsdp_optim.options import CONVERT_NBYTES, LEAST_CONVERT_NBYTES
from fsdp_optim.plan import Plans
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.tensors.memory import Budget, dtype_name

ENDINGS = (".npy", ".safetensors", ".pt")
"""How the names of files end that can be written."""

_NUMPY_CODES = {
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.bool: "|b1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.uint8: "|u1",
    torch.uint16: "<u2",
    torch.uint32: "<u4",
    torch.uint64: "<u8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}
_NUMPY_ALIGNMENT = 64


@dataclass(frozen=True)
class _Part:
    """One value to write: all elements, or those of a slice."""

    name: str
    value: NamedValue
    cut: Placement
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.value.dtype.itemsize

    @property
    def dtype(self) -> str:
        return dtype_name(self.value.dtype)


def extract(
    place: Place,
    names: Sequence[str],
    target: str | os.PathLike[str],
    *,
    text: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    bucket_nbytes: int = CONVERT_NBYTES,
    storage_options: StorageOptions = None,
) -> SaveResult:
    """Write some values into one file. `text`: a slice of each. No communication."""
    check_at_least("bucket_nbytes", bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
    file = checked_output(target)
    asked = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    _check(file, asked)
    with opened_at(place, options_beside(str(target), place, storage_options)) as reader:
        with_state = any(":" in name for name in asked)
        values = Decoded.of(reader, allow_pickle=allow_pickle, with_state=with_state).named()
        parts = []
        for name in asked:
            value = tensor_named(values, name)
            cut = sliced(name, text, value.info.shape)
            parts.append(_Part(name, value, cut.cut, cut.shape))
        suffix = Path(file).suffix
        if suffix == ".safetensors":  # elements begin at multiples of their size
            parts.sort(key=lambda part: -part.value.dtype.itemsize)
        frames = _FRAMES[suffix](parts)
        with open_output(file, storage_options, overwrite=overwrite) as new:
            for part in parts:
                new.write(next(frames))
                for flat in _elements(reader, part, Budget(bucket_nbytes, "the elements of the values")):
                    new.write(bytes_of(flat))
            for frame in frames:
                new.write(frame)
            reader.check_unchanged()
        nbytes = sum(part.nbytes for part in parts)
        return SaveResult(file, len(parts), nbytes, nbytes, ())


def _check(file: Path | str, names: Sequence[str]) -> None:
    """Refuse names and a file that cannot be written, before anything is read."""
    suffix = Path(file).suffix
    if suffix not in ENDINGS:
        raise wrong_use(f"{file}: the name of the new file must end with .npy, .safetensors or .pt")
    if not names:
        raise wrong_use(
            f"{file}: no names were given: give one or more, such as 'lm_head.weight' or 'lm_head.weight:exp_avg'"
        )
    if suffix == ".npy" and len(names) > 1:
        raise wrong_use(
            f"{file}: a .npy file has one array, and {len(names)} names were given: write .safetensors or .pt"
        )


def _elements(reader: Reader, part: _Part, budget: Budget) -> Iterator[torch.Tensor]:
    window_nbytes = window_nbytes_in(budget, 1)
    windows = WindowReader(reader, window_nbytes, Plans())
    for window in windows_of([(0, part.numel, part.value.dtype.itemsize)], window_nbytes):
        yield from windows.read([(part.value, part.cut, window.first, window.num)])


# ------------------------------------------------------------------------------------------- what is around the elements


def _of_numpy(parts: Sequence[_Part]) -> Iterator[bytes]:
    (part,) = parts
    code = _NUMPY_CODES.get(part.value.dtype)
    if code is None:
        raise wrong_use(f"{part.name}: numpy has no dtype for {part.dtype}: write .safetensors or .pt")
    text = f"{{'descr': {code!r}, 'fortran_order': False, 'shape': {part.shape!r}, }}".encode()
    start = b"\x93NUMPY\x01\x00"
    padding = -(len(start) + 2 + len(text) + 1) % _NUMPY_ALIGNMENT
    header = text + b" " * padding + b"\n"
    return iter([start + struct.pack("<H", len(header)) + header])


def _of_safetensors(parts: Sequence[_Part]) -> Iterator[bytes]:
    header = Header.of([(part.name, part.dtype, part.shape) for part in parts], {"format": "pt"})
    return iter([header.encoded(), *[b""] * (len(parts) - 1)])


def _of_torch(parts: Sequence[_Part]) -> Iterator[bytes]:
    stubs = [TensorStub(part.dtype, part.shape, number) for number, part in enumerate(parts)]
    return frames_around(dict(zip([part.name for part in parts], stubs, strict=True)), stubs)


_FRAMES = {".npy": _of_numpy, ".safetensors": _of_safetensors, ".pt": _of_torch}
