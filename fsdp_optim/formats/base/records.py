"""The values that formats and the rest of the library hand each other: tensors in files, the files of a save, its facts.

`protocols.py` has the protocols that take and return these values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from msgspec import Struct

from fsdp_optim.errors import shortened
from fsdp_optim.formats.base.checksums import Rows
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.extents import DataSection
from fsdp_optim.formats.base.frames import Frames, Pieces
from fsdp_optim.formats.base.summary import ManagerRecord, content_of
from fsdp_optim.layout import STORAGE, Placement, Shape, whole_on
from fsdp_optim.tensors.memory import dtype_named

Half = Literal["model", "optim", "state"]
"""What tensors belong to: the weights of the model, the state of the optimizer, or the trees of `state=`."""

COMMON, MODULES = "common", "model"
"""Names of extras: the values of the trainer, and the values of modules besides parameters and buffers."""


PLANNED = "dcp"
"""The name of the extra with the keys of torch's planner, of a checkpoint that torch's `save` has written in this format."""


def rank_extra_name(position: int) -> str:
    """Return the name of the extra of one rank. `position`: the index of the rank among the ranks that saved."""
    return f"rank-{position:05}"


class StoredTensor(Struct, frozen=True):
    """The place of one tensor of a checkpoint, without its elements.

    Attributes:
        key: the name of the tensor in its half.
        dtype: torch's name of the dtype, such as "float32".
        shape: the global shape.
        file, start: the file of the first chunk, and the byte at which the chunk begins, counted as the format's `read` counts.
        short_nbytes: a range of fewer bytes than this costs too much to read by itself.
        request_nbytes: a read of fewer bytes costs more than a message from a rank that reads the adjacent bytes.
        chunks: the files and bytes of all ranks of storage, if several have elements of the tensor; None if one has all.
    """

    key: str
    dtype: str
    shape: Shape
    file: str
    start: int
    short_nbytes: int = 128 << 10
    request_nbytes: int = 0
    chunks: Chunks | None = None

    @property
    def itemsize(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def placement(self) -> Placement:
        """The placement of the elements on ranks of storage."""
        return self.chunks.placement if self.chunks is not None else whole_on(self.shape, (STORAGE,))

    def place_on(self, rank: int) -> tuple[str, int]:
        """Return the file in which the elements of one rank of storage are, and the byte at which they begin."""
        return self.chunks.at[rank] if self.chunks is not None else (self.file, self.start)

    @property
    def first_place(self) -> tuple[str, int]:
        """The file, and the byte, at which the first elements begin. The tensor has some."""
        if self.chunks is None:
            return self.file, self.start
        placement = self.chunks.placement
        return self.chunks.at[next(rank for rank in placement.ranks if placement.numel_on(rank))]


@dataclass(frozen=True)
class Chunks:
    """The places of a tensor in several pieces. `at`: by rank of storage, its file and the byte at which its elements begin.

    `is_checked`: whether the format has checked that the pieces lie inside their files; `at` may then find the bytes out only
    when it is asked.
    """

    placement: Placement
    at: Mapping[int, tuple[str, int]]
    is_checked: bool = False


@dataclass(frozen=True)
class SavedWeights:
    """The treatment of the model's weights by a save.

    `which` it has written: "all", "trainable" or "none"; None if unknown. `dtype`: torch's name of the dtype to which it has cast
    floating-point weights; None if it has not, or if unknown.
    """

    which: str | None = None
    dtype: str | None = None


UNKNOWN_WEIGHTS = SavedWeights()


class PlannedTensor(Struct, frozen=True, gc=False):
    """A tensor that will be written: its key, torch's name of its dtype, its global shape, and the half that it belongs to."""

    key: str
    dtype: str
    shape: Shape
    half: Half = "model"


@dataclass(frozen=True)
class TensorNames:
    """Names the tensors in a range of the data of a file, by the byte at which each begins."""

    starts: tuple[int, ...]
    keys: tuple[str, ...]

    def __call__(self, start: int, stop: int) -> str:
        ends = (*self.starts[1:], stop)
        keys = [
            key for key, first, end in zip(self.keys, self.starts, ends, strict=True) if first < stop and start < end
        ]
        return shortened(keys)


@dataclass(frozen=True)
class PlannedFile:
    """One file to write.

    Attributes:
        half: the half that all tensors belong to; None: the file may have tensors of several.
        head: the first bytes of the file, which the process that creates the file writes.
        tensors, starts: the tensors in the order of their bytes, and the byte of the data at which each tensor begins. The data
            are all bytes of the file but the head and the frames.
        nbytes_of_data: the number of bytes of the data.
        segment_nbytes: the length of the segments that are hashed during the write, in bytes; 0: no hashes.
        tensors_in: a function that names the tensors in a range [start, stop) of the data, for errors.
        between: bytes between and after the data, each with the byte of the data before which they stand: increasing, above 0.
        slices: for each tensor, the first of its elements that the file has, and one past the last; empty: the file has all
            elements of all its tensors. One tensor may be in several files, and several times in one.
    """

    name: str
    half: Half | None
    head: bytes = field(repr=False)
    tensors: tuple[PlannedTensor, ...] = field(repr=False)
    starts: tuple[int, ...]
    nbytes_of_data: int
    segment_nbytes: int
    tensors_in: Callable[[int, int], str] = field(repr=False, compare=False)
    between: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    slices: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @cached_property
    def frames(self) -> Frames:
        """The places of the data and of the frames in the file."""
        at, contents = zip(*self.between, strict=True) if self.between else ((), ())
        return Frames(len(self.head), self.nbytes_of_data, at, contents)

    @property
    def nbytes(self) -> int:
        return self.frames.nbytes

    def section(self, write: Callable[[Pieces, int], None]) -> DataSection:
        """Return the data as `write_extents` writes it, with the frames.

        `write`: writes pieces of memory at a byte of the file.
        """
        if not self.between:
            return DataSection(self.name, write, len(self.head), self.tensors_in)

        def write_with_frames(pieces: Pieces, start: int) -> None:
            place, joined = self.frames.with_frames(pieces, start)
            write(joined, place)

        return DataSection(self.name, write_with_frames, 0, self.tensors_in)


@dataclass(frozen=True)
class CheckpointContents:
    """The index of a new checkpoint, decoded, as most writers take it.

    Attributes:
        params: the shapes of the model's tensors, by key.
        optim: None if no optimizer is saved.
        weights: which of the model's tensors are saved: "all", "trainable" or "none".
        weights_dtype: torch's name of the dtype to which floating-point weights are cast; None: they are saved as they are.
        cut: how the parameters were flattened and cut, as for `Facts`; None if unknown.
    """

    world_size: int
    params: Mapping[str, Shape]
    aliases: Mapping[str, str]
    optim: OptimDescription | None
    weights: Literal["all", "trainable", "none"] = "all"
    weights_dtype: str | None = None
    cut: Any = None

    @property
    def content(self) -> str:
        """The `content` of a `Prepared`."""
        return content_of(
            self.params, has_optim=self.optim is not None, weights=self.weights, weights_dtype=self.weights_dtype
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `Writer.prepare`, before anything is written.

    Attributes:
        content: a string that is equal for two checkpoints of the same parameters that have the same of these: which weights,
            and whether an optimizer.
        shared: a string that every rank needs to plan the files.
        files: small files that the leader writes, including the files of extras.
        description: the optimizer's description as a reader will read it; None if there is no optimizer to check.
        document: any object that the format itself needs in `last`.
    """

    content: str
    shared: str
    files: Mapping[str, bytes]
    description: OptimDescription | None
    document: Any


@dataclass(frozen=True)
class Stamp:
    """The facts of a save that are known only at its end.

    Attributes:
        sequence: the number of the checkpoint in its folder.
        manager: the record of a `CheckpointManager`.
        wrapper: what wraps the model, for users; empty for a plain one.
        folder: the beginning of the names of all files but the manifest where the store has put these, such as "0123/".
    """

    token: str
    sequence: int
    step: int | None = None
    checksums: bool = True
    manager: ManagerRecord | None = None
    folder: str = ""
    wrapper: str = ""


@dataclass(frozen=True)
class WrittenFiles:
    """The results of all ranks. `rows`: by file, the segments of each rank; `extras`: by file, the results of `info_of`.

    `fingerprint`: the `Fingerprint` of the values as JSON, for a writer that keeps it; empty if there is none.
    """

    rows: Mapping[str, Sequence[Rows]]
    extras: Mapping[str, Any]
    fingerprint: bytes = b""
