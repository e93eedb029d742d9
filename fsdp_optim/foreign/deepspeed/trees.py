"""Values of the pickles of DeepSpeed's files, with the types that they should have; other types are a CheckpointError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, read_archive
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import unread_in
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened


class LossScaler:
    """Stands for a loss scaler. Only its numbers are kept."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.numbers = {str(name): value for name, value in mapping(state, "the state of a loss scaler").items()}


def _stage(number: object) -> int:
    return whole_number(number, "the stage of ZeRO")


STAND_INS: Mapping[str, Callable[..., Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
}
"""The stand-ins for the classes of DeepSpeed that its files name. Objects of other classes are not read."""


def read_files(opened: Opened, names: Sequence[str]) -> list[TorchArchive]:
    """Read the values of several files, as many at a time as suits the store. Raises the error of the first that fails."""
    num = min(opened.num_requests, len(names))
    if num <= 1:
        return [read_archive(opened, name, stand_ins=STAND_INS) for name in names]
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda name: read_archive(opened, name, stand_ins=STAND_INS), names))


def mapping(value: object, what: str) -> Mapping[Any, Any]:
    """Return the value, if it is a dict. Raises TypeError that names `what`, as the functions below do."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} is a {type(value).__name__}, not a dict")
    return value


def listed(value: object, what: str) -> Sequence[Any]:
    """Return the value, if it is a list or a tuple."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{what} is a {type(value).__name__}, not a list")
    return value


def whole_number(value: object, what: str) -> int:
    """Return the value, if it is an int of at least 0."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{what} is {value!r:.40}, not a number of at least 0")
    return value


def shape_of(value: object, what: str) -> Shape:
    """Return the value as a shape, if it is a list of sizes."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{what} is a {type(value).__name__}, not a shape")
    return tuple(whole_number(size, what) for size in value)


def shapes_of(value: object, what: str) -> dict[str, Shape]:
    """Shapes by the names of parameters, in their order."""
    shapes = {}
    for name, shape in mapping(value, what).items():
        if not isinstance(name, str):
            raise TypeError(f"{what} has the name {name!r:.40}")
        shapes[name] = shape_of(shape, f"{what} of {name}")
    return shapes


def flat_tensor(value: object, what: str) -> StoredTensor:
    """Return the value, if it is a tensor of one dimension."""
    if not isinstance(value, StoredTensor) or len(value.shape) != 1:
        raise TypeError(f"{what} is {_kind(value)}, not a flat tensor")
    return value


def any_tensor(value: object, what: str) -> StoredTensor:
    """Return the value, if it is a tensor."""
    if not isinstance(value, StoredTensor):
        raise TypeError(f"{what} is {_kind(value)}, not a tensor")
    return value


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, StoredTensor) else f"a {type(value).__name__}"


def check_same_dtype(what: str, parts: Sequence[StoredTensor], files: Sequence[str]) -> None:
    """Raise CheckpointError unless the parts of all ranks have one dtype. `files`: the names of their files."""
    for part, file in zip(parts, files, strict=True):
        if part.dtype != parts[0].dtype:
            raise CheckpointError(
                f"{file}: {what} is {part.dtype}, but {parts[0].dtype} in {files[0]}: the files are of different saves"
            )


def readable(archive: TorchArchive, name: str, value: Any) -> Any:
    """Return a value of the trainer with its tensors; Withheld for one with an object that is not read."""
    unread = unread_in(value)
    if unread is not None:
        return Withheld(
            f"{archive.where}: {name} has an object of the class {unread.what}, which is not read: load with allow_pickle=True "
            "if you trust the author of the file"
        )
    return archive.materialised(value)
