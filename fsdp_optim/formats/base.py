"""What a checkpoint format is: how its files are recognised, read and written. Protocols of one screen each.

Reading. Every rank does the same, and each reads only the bytes that it needs:

    format.recognises(opened)                     # a look: is this one of mine?
    reader = format.open(opened, verify=...)      # what there is: names, dtypes, where elements lie; raises CheckpointError
    reader.model, reader.optim                    # tensors by key, without their elements
    reader.description(...)                       # the optimizer's state, without the elements of tensors
    reader.read(extents)                          # as often as needed, into memory that is there
    reader.extra(name)                            # the trainer's values
    reader.check_unchanged()                      # when all is read
    reader.close()

Writing. One rank leads. It prepares; the other ranks get `prepared.shared`, a text; every rank plans the same files and writes
its own bytes into them; the leader puts what is known only at the end:

    writer = format.writer()
    prepared = writer.prepare(contents, ...)      # the leader, before anything is written; raises for what no reader takes
    files = writer.files(half, tensors, shared)   # every rank: the model's files, then the optimizer's
    name, data = writer.extra(name, value, ...)   # every rank: small files of its own
    for name, data in writer.last(prepared, files, written, stamp): ...     # the leader; the last of them is the manifest

A stored tensor has a placement like any other: storage is modelled as ranks with negative numbers, and each of them has its
elements in one run of bytes of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fsdp_optim.errors import ReplacedError
from fsdp_optim.formats.checksums import Rows
from fsdp_optim.formats.description import OptimDescription
from fsdp_optim.formats.extents import Extent
from fsdp_optim.layout import STORAGE, Placement, Shape, Whole
from fsdp_optim.memory import dtype_named
from fsdp_optim.storage.base import Judge, Opened

Half = Literal["model", "optim"]


def replaced(where: str) -> ReplacedError:
    """The error of a reader whose checkpoint another save has put its own in the place of."""
    return ReplacedError(
        f"{where}: was replaced by another checkpoint again and again while it was loaded: load it when nobody saves to it"
    )


COMMON, MODULES = "common", "model"
"""Names of extras: the trainer's values, and what modules have besides parameters and buffers."""


def of_rank(position: int) -> str:
    """The name of the extra of one rank, by its place among those that saved."""
    return f"rank-{position:05}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: not its elements, but where they are.

    Attributes:
        key: its name in its half.
        dtype: torch's name of it.
        file, start: its file, and the byte at which it begins, counted as the format's `read` counts; of the first chunk.
        short_nbytes: shorter runs of bytes cost too much to read by themselves.
        chunks: where several ranks of storage have its elements, each one's file and byte; None: one has all of them.
    """

    key: str
    dtype: str
    shape: Shape
    file: str
    start: int
    short_nbytes: int = 128 << 10
    chunks: Chunks | None = None

    @property
    def itemsize(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def placement(self) -> Placement:
        """Where its elements are, on ranks of storage."""
        return self.chunks.placement if self.chunks is not None else Whole(self.shape, (STORAGE,))

    def place_on(self, rank: int) -> tuple[str, int]:
        """The file, and the byte at which the elements of one of the ranks of storage begin."""
        return self.chunks.at[rank] if self.chunks is not None else (self.file, self.start)


@dataclass(frozen=True)
class Chunks:
    """A tensor in several pieces. `at`: by rank of storage, the file and the byte at which its elements begin, row-major."""

    placement: Placement
    at: Mapping[int, tuple[str, int]]


class ExtraValues(Protocol):
    """One value that a trainer gave, read and not decoded yet."""

    def decoded(self, *, allow_pickle: bool) -> Any:
        """The value. Raises CheckpointError for a pickle, unless it is allowed."""

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        """The same, with `codec.Withheld` in the place of each item of a dict that needs a pickle which is not allowed."""


class Reader(Protocol):
    """A checkpoint that is open. Nothing in it is trusted: what is damaged is a CheckpointError that names the file.

    Attributes:
        model, optim: tensors by key: parameters and buffers by FQN; those of the description.
        aliases: other names of parameters and buffers, each with the one that is stored.
        extras: the names of the extras that there are.
        has_optim: whether an optimizer was saved.
        world_size: how many ranks saved it; 0 where that is not known.
        step: what the trainer gave.
        identity: what differs between two checkpoints, as JSON values: ranks compare it.
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
    def where(self) -> str:
        """Where it was opened."""

    def named(self, name: str) -> str:
        """One of its files, for errors."""

    def description(self, *, allow_pickle: bool, records: Mapping[str, type]) -> OptimDescription:
        """The optimizer. `records`: dataclasses that may be in it, by name."""

    def extra(self, name: str, *, verify: bool) -> ExtraValues:
        """One of the extras."""

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of files, by name; `did_read` hears of the bytes as they come."""

    def verified(self) -> Reader:
        """The same checkpoint, read with verification. It is closed with this one."""

    def check_unchanged(self) -> None:
        """Raise ReplacedError where another checkpoint was written over this one since it was opened."""

    def close(self) -> None:
        """Let go of the files."""


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written: its key, torch's name of its dtype, its shape."""

    key: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class PlannedFile:
    """One file to write.

    Attributes:
        head: its first bytes, which whoever makes the file writes.
        tensors, starts: its tensors in the order of their bytes, and where each begins behind the head.
        nbytes_of_data: how many bytes follow the head.
        segment_nbytes: the length of the segments that are hashed as they are written; 0: nothing is.
        tensors_in: the names of the tensors in a range of the data, for errors.
    """

    name: str
    half: Half
    head: bytes = field(repr=False)
    tensors: tuple[Planned, ...] = field(repr=False)
    starts: tuple[int, ...]
    nbytes_of_data: int
    segment_nbytes: int
    tensors_in: Callable[[int, int], str] = field(repr=False, compare=False)

    @property
    def offset(self) -> int:
        """Where its data begins."""
        return len(self.head)

    @property
    def nbytes(self) -> int:
        return self.offset + self.nbytes_of_data


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to say. `params`: the tensors of the model, by key; `optim`: None: there is no optimizer."""

    world_size: int
    params: Mapping[str, Shape]
    aliases: Mapping[str, str]
    optim: OptimDescription | None


@dataclass(frozen=True)
class Prepared:
    """What the leader has made of it before anything is written.

    Attributes:
        content: alike for checkpoints of the same parameters, with or without an optimizer.
        shared: what every rank needs to plan the files.
        files: small files that the leader writes with its own.
        description: the optimizer as a reader will read it.
        document: whatever the format needs at the end.
    """

    content: str
    shared: str
    files: Mapping[str, bytes]
    description: OptimDescription | None
    document: Any


@dataclass(frozen=True)
class Stamp:
    """What only the end of a save shows: its token, its number in the folder, and what it was asked for."""

    token: str
    sequence: int
    step: int | None = None
    keep_last: int | None = None
    checksums: bool = True


@dataclass(frozen=True)
class Written:
    """What all ranks have written. `rows`: by file, the segments of each rank; `extras`: by file, what `Writer.info_of` gave."""

    rows: Mapping[str, Sequence[Rows]]
    extras: Mapping[str, Any]


class Writer(Protocol):
    """How one save is written. Made on every rank; what it plans is the same on all of them."""

    def prepare(self, contents: Contents, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        """Refuse what cannot be written, and encode what is small. Raises CheckpointError that names it."""

    def copied(self, reader: Reader) -> Prepared | None:
        """As `prepare`, of a checkpoint of the same format, without decoding it; None for another format's."""

    def files(
        self, half: Half, tensors: Sequence[Planned], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """The tensors of one half in files of at most `most_nbytes` each, or one tensor that is larger; in this order."""

    def extra(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        """One of the extras as a file: its name and bytes. Raises CheckpointError that names a part that cannot be saved."""

    def info_of(self, data: bytes) -> Any:
        """What `last` has to know of a small file that a rank has written, as JSON values."""

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: Written, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        """The files that are known only now, by name. The last of them is the manifest: all before is there when it is put."""


class Format(Protocol):
    """One format of checkpoints. `name`: how users call it; `judge`: what a store asks before it removes anything."""

    @property
    def name(self) -> str: ...
    @property
    def judge(self) -> Judge[Any]: ...

    def recognises(self, opened: Opened) -> bool:
        """Whether what is open is of this format, damaged or not. Raises nothing."""

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        """Read it. Raises CheckpointError for what is damaged, or is no checkpoint."""

    def writer(self) -> Writer:
        """For one save. Raises CheckpointError where the format is only read."""

    def sequence_in(self, opened: Opened) -> int:
        """The number of a checkpoint in its folder; 0 where there is none, or it is not known. Raises nothing."""
