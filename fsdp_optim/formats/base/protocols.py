"""The protocols of a checkpoint format, which recognises, reads and writes the files of a checkpoint; one screen each.

Reading. All ranks make the same calls, and each rank reads only the bytes that it needs:

    format.recognises(opened)                     # a quick look: are the files of this format?
    reader = format.open(opened, verify=...)      # raises CheckpointError for damage; reads no elements of tensors
    reader.index                                  # all that the checkpoint says: weights, optimizer, values of the trainer, facts
    reader.read(extents)                          # elements, as often as needed, into memory of the caller
    reader.check_unchanged()                      # after the last read
    reader.close()

Writing. One rank leads, and prepares the index that a reader of the new checkpoint will have; the other ranks get
`prepared.shared`, a string. Every rank plans the same files and writes its own bytes into them. At the end the leader puts the
files that depend on all others:

    writer = format.writer()                      # None: the format can only be read
    prepared = writer.prepare(index, ...)         # the leader, before anything is written; refuses unreadable values
    files = writer.files({half: tensors}, shared) # every rank: of both halves together, or of one after the other
    name, data = writer.small(name, value, ...)   # every rank: small files of its own
    for name, data in writer.last(prepared, files, written, stamp): ...     # the leader; the last of them is the manifest

A stored tensor has a placement like any other tensor. In this placement storage is modelled as ranks with negative numbers; the
elements of each such rank are one range of bytes of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

from msgspec import Struct

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.records import (
    COMMON,
    MODULES,
    UNKNOWN_WEIGHTS,
    CheckpointContents,
    Chunks,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    SavedWeights,
    Stamp,
    StoredTensor,
    WrittenFiles,
    rank_extra_name,
)
from fsdp_optim.storage.base import CheckpointProbe, Opened

__all__ = [
    "COMMON",
    "MODULES",
    "UNKNOWN_WEIGHTS",
    "CheckpointContents",
    "Chunks",
    "Format",
    "Half",
    "OpenedAs",
    "PlannedFile",
    "PlannedTensor",
    "Prepared",
    "Reader",
    "SavedWeights",
    "SeenAs",
    "Stamp",
    "StoredTensor",
    "TensorReader",
    "Writer",
    "WrittenFiles",
    "WrittenFormat",
    "rank_extra_name",
    "replaced_error",
    "written",
]


def replaced_error(where: str) -> ReplacedError:
    """Return the error of a reader when another save has replaced its checkpoint."""
    return ReplacedError(
        f"{where}: was replaced by another checkpoint again and again during the load: load when no process saves to this path"
    )


class TensorReader(Protocol):
    """A source of tensors and their elements: an open checkpoint, or a dict in memory."""

    @property
    def index(self) -> CheckpointIndex:
        """All that the checkpoint says, without elements."""

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of files, given by file name. `did_read` is called with the number of bytes after each read.

        Several threads may read at the same time.
        """


class Reader(TensorReader, Protocol):
    """An open checkpoint. No content is trusted: damage raises a CheckpointError that names the file."""

    def verified(self) -> Reader:
        """Return the same checkpoint, read with verification. Closing this reader closes both."""

    def check_unchanged(self) -> None:
        """Raise ReplacedError if another checkpoint was written over this one since it was opened."""

    def close(self) -> None:
        """Close the files."""


class Writer(Protocol):
    """The plan of the files of one save, or of one conversion. Every rank makes one, and plans the same files with it.

    Attributes:
        writes_trees: whether it gets the tensors of trees (`index.trees`) as the half "state", with an `InFile` in their places
            among the values of the trainer. False: it gets these values with their tensors, which no other rank writes.
        keeps_fingerprint: whether `last` writes the `fingerprint` that it gets, and the reader's index has it.
        keeps_fused_state: whether the reader's index has the facts `views` and `fused_state`.
    """

    writes_trees: ClassVar[bool] = False
    keeps_fingerprint: ClassVar[bool] = False
    keeps_fused_state: ClassVar[bool] = False

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        """Encode all that an index says besides elements. Raises CheckpointError that names a value which cannot be written.

        In a save the leader prepares alone; in a conversion every rank does.
        """

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan files for the tensors of both halves, or of one, in this order.

        Each file has at most `most_nbytes`, with its header and the bytes between tensors, or one tensor that is larger alone.
        """

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        """Encode one extra as a file; return its name and bytes. Raises CheckpointError that names an unsavable part."""

    def info_of(self, data: bytes) -> Any:
        """Return the facts about a small file that `last` needs, as JSON values."""

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the names and bytes of the files that depend on all others. The last one is the manifest."""


class Format(Protocol):
    """One format of checkpoints; its options are the fields of the class.

    Attributes:
        name: the name of the format, for users.
        probe: the answers about its files that stores ask for before they remove anything, and listings; None for a format that
            is only read, whose checkpoints are not listed. A format that is listed gives summaries that are `ManifestSummary`.
        opens_any: whether its files may have been written by any program, so that `Store.open_any` opens them.
        needs_names: whether other tools find its files by their names alone, so that a store must not keep them in a folder of
            the save.
        saves: whether `save` can write it. False: only `convert` does, because its files have parts of several tensors, say.
        claims_folders: whether a folder that it recognises surely is one checkpoint, and no folder of checkpoints.
    """

    opens_any: ClassVar[bool] = False
    needs_names: ClassVar[bool] = False
    saves: ClassVar[bool] = True
    claims_folders: ClassVar[bool] = True

    @property
    def name(self) -> str: ...
    @property
    def probe(self) -> CheckpointProbe[Any] | None: ...

    def recognises(self, opened: Opened) -> bool:
        """Return whether an open checkpoint is of this format, damaged or not. Raises nothing."""

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        """Open a checkpoint for reading. Raises CheckpointError if it is damaged or is not a checkpoint."""

    def writer(self) -> Writer | None:
        """Return the writer for one save; None if the format can only be read."""

    def sequence_in(self, opened: Opened) -> int:
        """Return the number of a checkpoint in its folder; 0 if unknown. Raises nothing."""


class SeenAs(Struct, frozen=True):
    """In the place of a format to open a checkpoint with: that which recognises its files, seen through `view`."""

    view: Callable[[Format], Format]


OpenedAs: TypeAlias = "Format | SeenAs | None"
"""How a checkpoint is opened; None: by the format that recognises its files."""


class WrittenFormat(Format, Protocol):
    """A format that is written, as saves and conversions use it."""

    @property
    def probe(self) -> CheckpointProbe[Any]: ...

    def writer(self) -> Writer:
        """Return the writer for one save."""


def written(format: Format) -> WrittenFormat:
    """Return the same format. Raises CheckpointError if it can only be read."""
    if format.probe is None or format.writer() is None:
        raise CheckpointError(f"checkpoints of the format {format.name!r} can be read, but not written")
    return format  # type: ignore[return-value]  # both members are there
