"""The protocols of a checkpoint format, which recognises, reads and writes the files of a checkpoint; one screen each.

Reading. All ranks make the same calls, and each rank reads only the bytes that it needs:

    format.recognises(opened)                     # a quick look: are the files of this format?
    reader = format.open(opened, verify=...)      # names, dtypes, places of elements; raises CheckpointError
    reader.model, reader.optim                    # tensors by key, without their elements
    reader.description(...)                       # the optimizer's state, without the elements of tensors
    reader.read(extents)                          # as often as needed, into memory of the caller
    reader.extra(name)                            # the trainer's values
    reader.check_unchanged()                      # after the last read
    reader.close()

Writing. One rank leads and prepares; the other ranks get `prepared.shared`, a string. Every rank plans the same files and
writes its own bytes into them. At the end the leader puts the files that depend on all others:

    writer = format.writer()
    prepared = writer.prepare(contents, ...)      # the leader, before anything is written; refuses unreadable values
    files = writer.files(half, tensors, shared)   # every rank: the model's files, then the optimizer's; or
    files = writer.all_files({half: tensors}, shared)   # those of both halves, for a conversion
    name, data = writer.extra(name, value, ...)   # every rank: small files of its own
    for name, data in writer.last(prepared, files, written, stamp): ...     # the leader; the last of them is the manifest

A stored tensor has a placement like any other tensor. In this placement storage is modelled as ranks with negative numbers; the
elements of each such rank are one range of bytes of one file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from fsdp_optim.errors import ReplacedError
from fsdp_optim.formats.brief import ManagerRecord, content_of
from fsdp_optim.formats.checksums import Rows
from fsdp_optim.formats.description import OptimDescription
from fsdp_optim.formats.extents import DataSection, Extent
from fsdp_optim.formats.frames import Frames, Pieces
from fsdp_optim.layout import STORAGE, Placement, Shape, Whole
from fsdp_optim.memory import dtype_named
from fsdp_optim.storage.base import Judge, Opened

Half = Literal["model", "optim"]


def replaced_error(where: str) -> ReplacedError:
    """The error of a reader when another save has replaced its checkpoint."""
    return ReplacedError(
        f"{where}: was replaced by another checkpoint again and again during the load: load when no process saves to this path"
    )


COMMON, MODULES = "common", "model"
"""Names of extras: the values of the trainer, and the values of modules besides parameters and buffers."""


def rank_extra_name(position: int) -> str:
    """The name of the extra of one rank. `position`: the index of the rank among the ranks that saved."""
    return f"rank-{position:05}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
        return self.chunks.placement if self.chunks is not None else _whole_in_storage(self.shape)

    def place_on(self, rank: int) -> tuple[str, int]:
        """The file in which the elements of one rank of storage are, and the byte at which they begin."""
        return self.chunks.at[rank] if self.chunks is not None else (self.file, self.start)


@functools.lru_cache(maxsize=256)
def _whole_in_storage(shape: Shape) -> Whole:
    return Whole(shape, (STORAGE,))


@dataclass(frozen=True)
class Chunks:
    """The places of a tensor in several pieces. `at`: by rank of storage, its file and the byte at which its elements begin.

    `is_checked`: whether the format has checked that the pieces lie inside their files; `at` may then find the bytes out only
    when it is asked.
    """

    placement: Placement
    at: Mapping[int, tuple[str, int]]
    is_checked: bool = False


class ExtraValues(Protocol):
    """One value of the trainer, which has been read but not decoded."""

    def decoded(self, *, allow_pickle: bool) -> Any:
        """The value. Raises CheckpointError for a pickle unless `allow_pickle` is True."""

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        """The value, but with `codec.Withheld` in the place of each item of a dict that is a pickle and not allowed."""


@dataclass(frozen=True)
class SavedWeights:
    """What a save has done with the model's weights.

    `which` it has written: "all", "trainable" or "none"; None if unknown. `dtype`: torch's name of the dtype to which it has cast
    floating ones; None if it has not, or if unknown.
    """

    which: str | None = None
    dtype: str | None = None


UNKNOWN_WEIGHTS = SavedWeights()


class FormatReader(Protocol):
    """An open checkpoint. No content is trusted: damage raises a CheckpointError that names the file.

    Attributes:
        model: the tensors of parameters and buffers, by FQN.
        optim: the tensors of the optimizer's state, by the keys in the description.
        aliases: other names of parameters and buffers, each with the stored name.
        extras: the names of the stored extras.
        has_optim: whether an optimizer was saved.
        world_size: the number of ranks that saved; 0 if unknown.
        step: the `step` that was given to `save`.
        weights: what the save has done with the model's weights.
        identity: JSON values that differ between any two checkpoints. Ranks compare them.
    """

    @property
    def model(self) -> Mapping[str, StoredTensor]: ...
    @property
    def optim(self) -> Mapping[str, StoredTensor]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def extras(self) -> Collection[str]: ...
    @property
    def has_optim(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    @property
    def step(self) -> int | None: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...
    @property
    def weights(self) -> SavedWeights:
        return UNKNOWN_WEIGHTS

    @property
    def format_name(self) -> str:
        """The name of the format, for users."""

    @property
    def has_checksums(self) -> bool:
        """Whether every byte of a tensor that is read is compared with a checksum."""
        return False

    @property
    def full_dict(self) -> Mapping[str, Any] | None:
        """The optimizer's full dict as another library has it, with a StoredTensor in the place of each tensor.

        None: `description` describes the optimizer.
        """
        return None

    @property
    def where(self) -> str:
        """The name of the place of the checkpoint."""

    def named(self, name: str) -> str:
        """The name of one file in words for users."""

    def description(self, *, allow_pickle: bool, records: Mapping[str, type]) -> OptimDescription:
        """The description of the optimizer. `records`: the dataclasses that may occur in the description, by name."""

    def extra(self, name: str, *, verify: bool) -> ExtraValues:
        """The extra of this name."""

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of files, given by file name. `did_read` is called with the number of bytes after each read.

        Several threads may read at the same time.
        """

    def verified(self) -> FormatReader:
        """The same checkpoint, read with verification. Closing this reader closes both."""

    def check_unchanged(self) -> None:
        """Raise ReplacedError if another checkpoint was written over this one since it was opened."""

    def versions(self) -> Sequence[object]:
        """Values that change when any of the files is written again."""
        return ()

    def about(self) -> Mapping[str, str]:
        """What else is known of the save, for users: who saved it, and when."""
        return {}

    def close(self) -> None:
        """Close the files."""


def weights_in(reader: FormatReader) -> SavedWeights:
    """The `weights` of a reader, which readers of other packages may lack."""
    found: SavedWeights = getattr(reader, "weights", UNKNOWN_WEIGHTS)
    return found


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written: its key, torch's name of its dtype, its global shape, and the half that it belongs to."""

    key: str
    dtype: str
    shape: Shape
    half: Half = "model"


@dataclass(frozen=True)
class PlannedFile:
    """One file to write.

    Attributes:
        half: the half that all tensors belong to; None: the file may have tensors of both.
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
        """The data as `write_extents` writes it, with the frames. `write`: writes pieces of memory at a byte of the file."""
        if not self.between:
            return DataSection(self.name, write, len(self.head), self.tensors_in)

        def write_with_frames(pieces: Pieces, start: int) -> None:
            place, joined = self.frames.with_frames(pieces, start)
            write(joined, place)

        return DataSection(self.name, write_with_frames, 0, self.tensors_in)


@dataclass(frozen=True)
class CheckpointContents:
    """The content of a new checkpoint without tensor elements.

    Attributes:
        params: the shapes of the model's tensors, by key.
        optim: None if no optimizer is saved.
        weights: which of the model's tensors are saved: "all", "trainable" or "none".
        weights_dtype: torch's name of the dtype to which floating ones are cast; None: they are saved as they are.
        units: the FQNs in each flat parameter of the model that saved, by the path of the wrapped module; None if unknown.
        flattens: False: the parameters of each wrapped module in `units` were cut by themselves.
    """

    world_size: int
    params: Mapping[str, Shape]
    aliases: Mapping[str, str]
    optim: OptimDescription | None
    weights: Literal["all", "trainable", "none"] = "all"
    weights_dtype: str | None = None
    units: Mapping[str, Sequence[str]] | None = None
    flattens: bool = True

    @property
    def content(self) -> str:
        """The `content` of a `Prepared`."""
        return content_of(
            self.params, has_optim=self.optim is not None, weights=self.weights, weights_dtype=self.weights_dtype
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `FormatWriter.prepare`, before anything is written.

    Attributes:
        content: a string that is equal for two checkpoints of the same parameters that have the same of these: which weights,
            and whether an optimizer.
        shared: a string that every rank needs to plan the files.
        files: small files that the leader writes.
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
        sequence: the number of the checkpoint among those of its folder.
        manager: the record of a `CheckpointManager`.
        folder: what stands before the names of all files but the manifest where the store has put these, such as "0123/".
    """

    token: str
    sequence: int
    step: int | None = None
    keep_last: int | None = None
    checksums: bool = True
    manager: ManagerRecord | None = None
    folder: str = ""


@dataclass(frozen=True)
class WrittenFiles:
    """The results of all ranks. `rows`: by file, the segments of each rank; `extras`: by file, the results of `info_of`."""

    rows: Mapping[str, Sequence[Rows]]
    extras: Mapping[str, Any]


class FormatWriter(Protocol):
    """The plan of the files of one save. Every rank makes one, and plans the same files with it.

    `needs_scalars`: whether `prepare` of a conversion gets the 0-dim tensors of the state themselves, as values of the kind
    SCALAR, because what the files say of them depends on their elements.
    """

    needs_scalars: bool = False

    def prepare(self, contents: CheckpointContents, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        """Encode the small values. Raises CheckpointError that names a value which cannot be written."""

    def copied(self, reader: FormatReader) -> Prepared | None:
        """As `prepare`, but copied from a checkpoint of the same format without decoding; None for another format."""

    def files(
        self, half: Half, tensors: Sequence[PlannedTensor], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan files for the tensors of one half, in this order: at most `most_nbytes` in each file, or one larger tensor."""

    def all_files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan the files of a conversion. Overridden by formats whose files have tensors of both halves, or slices of tensors."""
        return [
            file
            for half, its in tensors.items()
            for file in self.files(half, its, shared, most_nbytes=most_nbytes, num_ranks=num_ranks)
        ]

    def keeps_extra(self, name: str, value: Any, *, allow_pickle: bool) -> bool:
        """Take an extra of a conversion into the planned files; False if `extra` makes a file of it."""
        return False

    def extra(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        """Encode one extra as a file; return its name and bytes. Raises CheckpointError that names an unsavable part."""

    def info_of(self, data: bytes) -> Any:
        """The facts about a small file that `last` needs, as JSON values."""

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the names and bytes of the files that depend on all others. The last one is the manifest."""


class Format(Protocol):
    """One format of checkpoints. `name`: its name for users; `judge`: the object that stores ask before they remove anything.

    `is_foreign`: whether other libraries write it, so that it is opened by `Store.open_any`. `needs_names`: whether other tools
    find its files by their names alone, so that a store must not keep them in a folder of the save.
    """

    is_foreign: bool = False
    needs_names: bool = False

    @property
    def name(self) -> str: ...
    @property
    def judge(self) -> Judge[Any]: ...

    def recognises(self, opened: Opened) -> bool:
        """Whether an open checkpoint is of this format, damaged or not. Raises nothing."""

    def open(self, opened: Opened, *, verify: bool) -> FormatReader:
        """Open a checkpoint for reading. Raises CheckpointError if it is damaged or is not a checkpoint."""

    def writer(self) -> FormatWriter:
        """The writer for one save. Raises CheckpointError if the format can only be read."""

    def sequence_in(self, opened: Opened) -> int:
        """The number of a checkpoint among those of its folder; 0 if unknown. Raises nothing."""
