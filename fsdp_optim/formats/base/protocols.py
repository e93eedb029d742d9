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

    writer = format.writer()                      # None: the format can only be read
    prepared = writer.prepare(contents, ...)      # the leader, before anything is written; refuses unreadable values
    files = writer.files(half, tensors, shared)   # every rank: the model's files, then the optimizer's; or
    files = writer.all_files({half: tensors}, shared)   # those of both halves, for a conversion
    name, data = writer.extra(name, value, ...)   # every rank: small files of its own
    for name, data in writer.last(prepared, files, written, stamp): ...     # the leader; the last of them is the manifest

A stored tensor has a placement like any other tensor. In this placement storage is modelled as ranks with negative numbers; the
elements of each such rank are one range of bytes of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.records import (
    COMMON,
    MODULES,
    NO_REMARKS,
    UNKNOWN_WEIGHTS,
    CheckpointContents,
    Chunks,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Remarks,
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
    "NO_REMARKS",
    "UNKNOWN_WEIGHTS",
    "CheckpointContents",
    "Chunks",
    "ExtraValues",
    "Format",
    "FormatReader",
    "FormatWriter",
    "Half",
    "PlannedFile",
    "PlannedTensor",
    "Prepared",
    "Remarks",
    "SavedWeights",
    "Stamp",
    "StoredTensor",
    "WrittenFiles",
    "WrittenFormat",
    "rank_extra_name",
    "remarks_of",
    "replaced_error",
    "weights_in",
    "written",
]


def replaced_error(where: str) -> ReplacedError:
    """The error of a reader when another save has replaced its checkpoint."""
    return ReplacedError(
        f"{where}: was replaced by another checkpoint again and again during the load: load when no process saves to this path"
    )


class ExtraValues(Protocol):
    """One value of the trainer, which has been read but not decoded."""

    def decoded(self, *, allow_pickle: bool) -> Any:
        """The value. Raises CheckpointError for a pickle unless `allow_pickle` is True."""

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        """The value, but with `codec.Withheld` in the place of each item of a dict that is a pickle and not allowed."""


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
        weights: the treatment of the model's weights by the save.
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
    def remarks(self) -> Remarks:
        """What only readers of other tools' checkpoints know."""
        return NO_REMARKS

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
        """Other facts about the save, for users: its author and its time."""
        return {}

    def close(self) -> None:
        """Close the files."""


def weights_in(reader: FormatReader) -> SavedWeights:
    """The `weights` of a reader, which readers of other packages may lack."""
    found: SavedWeights = getattr(reader, "weights", UNKNOWN_WEIGHTS)
    return found


def remarks_of(reader: FormatReader) -> Remarks:
    """The `remarks` of a reader, which readers of other packages may lack."""
    found: Remarks = getattr(reader, "remarks", NO_REMARKS)
    return found


class FormatWriter(Protocol):
    """The plan of the files of one save. Every rank makes one, and plans the same files with it."""

    def prepare(self, contents: CheckpointContents, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        """Encode the small values. Raises CheckpointError that names a value which cannot be written."""

    def copied(self, reader: FormatReader) -> Prepared | None:
        """As `prepare`, but copied from a checkpoint of the same format without decoding; None for another format.

        Called first in a conversion, so that a writer may learn from the source what the contents do not say.
        """

    def files(
        self, half: Half, tensors: Sequence[PlannedTensor], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan files for the tensors of one half, in this order.

        Each file has at most `most_nbytes`, with its header and what is between tensors, or one tensor that is larger alone.
        """

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
        """Whether an open checkpoint is of this format, damaged or not. Raises nothing."""

    def open(self, opened: Opened, *, verify: bool) -> FormatReader:
        """Open a checkpoint for reading. Raises CheckpointError if it is damaged or is not a checkpoint."""

    def writer(self) -> FormatWriter | None:
        """The writer for one save; None if the format can only be read."""

    def sequence_in(self, opened: Opened) -> int:
        """The number of a checkpoint among those of its folder; 0 if unknown. Raises nothing."""


class WrittenFormat(Format, Protocol):
    """A format that is written, as saves and conversions use it."""

    @property
    def probe(self) -> CheckpointProbe[Any]: ...

    def writer(self) -> FormatWriter:
        """The writer for one save."""


def written(format: Format) -> WrittenFormat:
    """The same format. Raises CheckpointError if it can only be read."""
    if format.probe is None or format.writer() is None:
        raise CheckpointError(f"checkpoints of the format {format.name!r} can be read, but not written")
    return format  # type: ignore[return-value]  # both members are there
