"""A finished checkpoint, opened: its marker, and where in which file every tensor is. Nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import TracebackType
from typing import Any

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.bools import BOOL, check_bools
from fsdp_optim.formats.checksums import Sums, hex_of, num_segments, sums_of, table_nbytes
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.extents import DataSection, Extent, read_extents
from fsdp_optim.formats.extras import Extra, read_extra
from fsdp_optim.formats.header import Entry, Header, length_of_header, parse_header
from fsdp_optim.formats.json_text import parse_json
from fsdp_optim.formats.marker import NAME, FileInfo, Marker, marker_in
from fsdp_optim.storage.base import Opened, Store, check_name

MOST_INDEX_NBYTES = 1 << 28
_SHORT_NBYTES, _SEGMENTS_IN_RUN = 128 << 10, 32
_LOOKS = 5  # times: for a place that is given to another checkpoint while this one is opened


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file: its tensors, and where its data begins.

    Attributes:
        sums: the checksum of its table of checksums; None: nothing is to be verified.
        num_segments: of that table.
    """

    name: str
    header: Header
    offset: int
    sums: str | None = None
    num_segments: int = 0

    @cached_property
    def bools(self) -> tuple[Entry, ...]:
        """The tensors of bools, in the order of their bytes."""
        return tuple(entry for entry in self.header.entries if entry.code == BOOL)

    @property
    def short_nbytes(self) -> int:
        """Runs that are shorter cost too much to read by themselves: the rest of their segments comes with them."""
        if not self.num_segments:
            return _SHORT_NBYTES
        return max(_SHORT_NBYTES, _SEGMENTS_IN_RUN * self.header.data_nbytes // self.num_segments)

    def table(self, opened: Opened) -> Sums | None:
        """The table of checksums, read when it is needed: those of all files at once are large."""
        if self.sums is None:
            return None
        name = sums_of(self.name)
        data, path = opened.read_whole(name, table_nbytes(self.num_segments)), opened.named(name)
        if hex_of(data) != self.sums:
            raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
        return Sums.parse(path, data, self.header.data_nbytes)


@dataclass(frozen=True)
class Stored:
    """One tensor, in its file."""

    file: StoredFile
    entry: Entry


@dataclass(frozen=True)
class Checkpoint:
    """All tensors by key: those of the model, and those of the optimizer's state. To be closed after use.

    `opened`: its files, from which everything is read, whatever takes their place meanwhile.
    """

    opened: Opened
    marker: Marker
    model: Mapping[str, Stored]
    optim: Mapping[str, Stored]
    _marker_version: tuple[object, ...] | None = None
    _last_table: dict[str, Sums | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, store: Store, *, verify: bool) -> Checkpoint:
        """Read the marker and all headers of the checkpoint in a store, looking again where another save replaces it meanwhile.

        Raises CheckpointError that names the file that is not as it was saved.
        """
        for attempt in range(1, _LOOKS + 1):
            opened = store.open()
            try:
                return cls.opened_in(opened, verify=verify)
            except BaseException as error:
                replaced = isinstance(error, CheckpointError) and opened.was_replaced()
                opened.close()
                if not replaced:
                    raise
                if attempt == _LOOKS:
                    raise _replaced(opened.where) from error
        raise CheckpointError(f"{store.where}: unreachable")

    @classmethod
    def opened_in(cls, opened: Opened, *, verify: bool) -> Checkpoint:
        """As `open`, of what is open already."""
        version = opened.version_of(NAME)
        marker = marker_in(opened)
        found: dict[str, dict[str, Stored]] = {"model": {}, "optim": {}}
        for name, info in marker.files.items():
            if name.startswith("extra/") or name.endswith(".json"):
                continue
            stem = name.split("-")[0].split(".")[0]
            if stem not in found:
                raise CheckpointError(
                    f"{opened.where}: the marker names {name}, which is neither the model's nor the optimizer's"
                )
            file = _open_file(opened, name, info, verify=verify)
            for entry in file.header.entries:
                if entry.key in found[stem]:
                    raise CheckpointError(f"{opened.named(name)}: {entry.key} is in another file too")
                found[stem][entry.key] = Stored(file, entry)
        for stem, tensors in found.items():
            _check_index(opened, stem, marker, tensors, verify=verify)
        return cls(opened, marker, found["model"], found["optim"], version)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self.opened.close()

    @property
    def where(self) -> str:
        """Where it was opened."""
        return self.opened.where

    def named(self, name: str) -> str:
        """One of its files, for errors."""
        return self.opened.named(name)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What differs between two checkpoints; and, because it decides how tensors are read, the segments of their files."""
        nums = {name: file.num_segments for name, file in self._files.items()}
        return {"token": self.marker.said.get("token"), "checksum": self.marker.checksum, "segments": nums}

    def check_unchanged(self) -> None:
        """Raise ReplacedError where another marker was written into this folder since it was opened.

        A folder that lost its path or its files while they were open is as good as before.
        """
        version = self.opened.version_of(NAME)
        if version is not None and version != self._marker_version:
            raise _replaced(self.where)

    def extra(self, name: str, *, verify: bool) -> Extra:
        """One of the extra files."""
        if name not in self.marker.files:
            raise CheckpointError(f"{self.where}: the marker does not name {name}")
        with self._replacement_told():
            return read_extra(self.opened, name, self.marker.files[name], verify=verify)

    def extra_bytes(self, name: str) -> bytes:
        """One of the extra files as it is, verified."""
        self.extra(name, verify=True)
        with self._replacement_told():
            return self.opened.read_whole(name, self.marker.files[name].nbytes)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of files' data sections, by file name; `did_read` hears of the bytes as they come."""
        with self._replacement_told():
            for name, its in extents.items():
                file = self._files[name]
                sums = self._table(file)
                fill = partial(self.opened.read_into, name)
                section = DataSection(self.named(name), fill, file.offset, file.header.tensors_in)
                read_extents(section, its, sums, did_read)
                check_bools(section.name, file.bools, its)

    def verified(self) -> Checkpoint:
        """The same checkpoint, read with verification. It is closed with this one."""
        with self._replacement_told():
            return self.opened_in(self.opened, verify=True)

    @contextmanager
    def _replacement_told(self) -> Iterator[None]:
        """What cannot be read because another save has put its checkpoint in this one's place is no damage."""
        try:
            yield
        except CheckpointError as error:
            if self.opened.was_replaced():
                raise _replaced(self.where) from error
            raise

    def _table(self, file: StoredFile) -> Sums | None:
        """The table of a file; the last one is kept."""
        if file.name not in self._last_table:
            self._last_table.clear()
            self._last_table[file.name] = file.table(self.opened)
        return self._last_table[file.name]

    @cached_property
    def _files(self) -> Mapping[str, StoredFile]:
        return {stored.file.name: stored.file for stored in (*self.model.values(), *self.optim.values())}


def _replaced(where: str) -> ReplacedError:
    return ReplacedError(
        f"{where}: was replaced by another checkpoint again and again while it was loaded: load it when nobody saves to it"
    )


def _open_file(opened: Opened, name: str, info: FileInfo, *, verify: bool) -> StoredFile:
    path, nbytes = opened.named(name), opened.size_of(name)
    if nbytes != info.nbytes:
        raise CheckpointError(f"{path}: has {nbytes} bytes, {info.nbytes} were saved: it was cut short or changed")
    prefix = opened.read(name, 0, min(8, nbytes))
    text = opened.read(name, 8, length_of_header(path, prefix, nbytes))
    if verify and hex_of(prefix + text) != info.header:
        raise CheckpointError(f"{path}: its header is not what was saved: its checksum differs")
    offset = 8 + len(text)
    header = parse_header(path, text, nbytes - offset)
    if not verify or info.sums is None:
        return StoredFile(name, header, offset)
    number = num_segments(f"{path}.sums", opened.size_of(sums_of(name)), header.data_nbytes)
    return StoredFile(name, header, offset, info.sums, number)


def _check_index(opened: Opened, stem: str, marker: Marker, tensors: Mapping[str, Stored], *, verify: bool) -> None:
    """Where a half is split, other tools read its index: it has to say what the files say."""
    if not any(name.startswith(f"{stem}-") for name in marker.files):
        return
    name = f"{stem}.safetensors.index.json"
    path = opened.named(name)
    text = opened.read_whole(name, most_nbytes=MOST_INDEX_NBYTES)
    info = marker.files.get(name)
    if verify and (info is None or (len(text), hex_of(text)) != (info.nbytes, info.header)):
        raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
    with distrusted(path):
        weight_map = parse_json(path, text)["weight_map"]
        said = {key: check_name(path, file) for key, file in weight_map.items()}
    for key in {**said, **tensors}:
        stored = tensors.get(key)
        if stored is None or said.get(key) != stored.file.name:
            where = stored.file.name if stored is not None else "in no file"
            raise CheckpointError(f"{path}: says that {key} is in {said.get(key)}, it is {where}")
