"""A finished checkpoint, opened: its marker, and where in which file every tensor is. Nothing in it is trusted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import Sums, hex_of, num_segments, sums_of, table_nbytes
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.extents import DataSection, Extent, read_extents
from fsdp_optim.formats.extras import read_extra
from fsdp_optim.formats.files import check_name, read_into, read_whole, reading
from fsdp_optim.formats.header import Entry, Header, length_of_header, parse_header
from fsdp_optim.formats.json_text import parse_json
from fsdp_optim.formats.marker import FileInfo, Marker, read_marker

MOST_INDEX_NBYTES = 1 << 28
_SHORT_NBYTES, _SEGMENTS_IN_RUN = 128 << 10, 32


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

    @property
    def short_nbytes(self) -> int:
        """Runs that are shorter cost too much to read by themselves: the rest of their segments comes with them."""
        if not self.num_segments:
            return _SHORT_NBYTES
        return max(_SHORT_NBYTES, _SEGMENTS_IN_RUN * self.header.data_nbytes // self.num_segments)

    def table(self, folder: Path) -> Sums | None:
        """The table of checksums, read when it is needed: those of all files at once are large."""
        if self.sums is None:
            return None
        name = sums_of(self.name)
        data = read_whole(folder, name, table_nbytes(self.num_segments))
        if hex_of(data) != self.sums:
            raise CheckpointError(f"{folder / name}: is not what was saved: its checksum differs")
        return Sums.parse(str(folder / name), data, self.header.data_nbytes)


@dataclass(frozen=True)
class Stored:
    """One tensor, in its file."""

    file: StoredFile
    entry: Entry


@dataclass(frozen=True)
class Checkpoint:
    """All tensors by key: those of the model, and those of the optimizer's state."""

    folder: Path
    marker: Marker
    model: Mapping[str, Stored]
    optim: Mapping[str, Stored]
    _last_table: dict[str, Sums | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path, *, verify: bool) -> Checkpoint:
        """Read the marker and all headers. Raises CheckpointError that names the file that is not as it was saved."""
        marker = read_marker(folder)
        found: dict[str, dict[str, Stored]] = {"model": {}, "optim": {}}
        for name, info in marker.files.items():
            if name.startswith("extra/") or name.endswith(".json"):
                continue
            stem = name.split("-")[0].split(".")[0]
            if stem not in found:
                raise CheckpointError(
                    f"{folder}: the marker names {name}, which is neither the model's nor the optimizer's"
                )
            file = _open_file(folder, name, info, verify=verify)
            for entry in file.header.entries:
                if entry.key in found[stem]:
                    raise CheckpointError(f"{folder / name}: {entry.key} is in another file too")
                found[stem][entry.key] = Stored(file, entry)
        for stem, tensors in found.items():
            _check_index(folder, stem, marker, tensors, verify=verify)
        return cls(folder, marker, found["model"], found["optim"])

    def extra(self, name: str, *, verify: bool, allow_pickle: bool, records: Mapping[str, type] | None = None) -> Any:
        """The value in one of the extra files."""
        if name not in self.marker.files:
            raise CheckpointError(f"{self.folder}: the marker does not name {name}")
        info = self.marker.files[name]
        return read_extra(self.folder, name, info, verify=verify, allow_pickle=allow_pickle, records=records)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of files' data sections, by file name; `did_read` hears of the bytes as they come."""
        for name, its in extents.items():
            file = self._files[name]
            with reading(self.folder, name) as fd:
                section = DataSection(fd, self.folder / name, file.offset, file.header.tensors_in)
                read_extents(section, its, self._table(file), did_read)

    def _table(self, file: StoredFile) -> Sums | None:
        """The table of a file; the last one is kept."""
        if file.name not in self._last_table:
            self._last_table.clear()
            self._last_table[file.name] = file.table(self.folder)
        return self._last_table[file.name]

    @property
    def nums_of_segments(self) -> Mapping[str, int]:
        """What all ranks have to see alike besides the marker, because it decides how tensors are read."""
        return {name: file.num_segments for name, file in self._files.items()}

    @cached_property
    def _files(self) -> Mapping[str, StoredFile]:
        return {stored.file.name: stored.file for stored in (*self.model.values(), *self.optim.values())}


def _open_file(folder: Path, name: str, info: FileInfo, *, verify: bool) -> StoredFile:
    path = folder / name
    with reading(folder, name) as fd:
        nbytes = os.fstat(fd).st_size
        if nbytes != info.nbytes:
            raise CheckpointError(f"{path}: has {nbytes} bytes, {info.nbytes} were saved: it was cut short or changed")
        prefix = bytearray(min(8, nbytes))
        read_into(fd, path, [memoryview(prefix)], 0)
        text = bytearray(length_of_header(str(path), bytes(prefix), nbytes))
        read_into(fd, path, [memoryview(text)], 8)
    if verify and hex_of(bytes(prefix + text)) != info.header:
        raise CheckpointError(f"{path}: its header is not what was saved: its checksum differs")
    offset = 8 + len(text)
    header = parse_header(str(path), bytes(text), nbytes - offset)
    if not verify or info.sums is None:
        return StoredFile(name, header, offset)
    with reading(folder, sums_of(name)) as fd:
        number = num_segments(f"{path}.sums", os.fstat(fd).st_size, header.data_nbytes)
    return StoredFile(name, header, offset, info.sums, number)


def _check_index(folder: Path, stem: str, marker: Marker, tensors: Mapping[str, Stored], *, verify: bool) -> None:
    """Where a half is split, other tools read its index: it has to say what the files say."""
    if not any(name.startswith(f"{stem}-") for name in marker.files):
        return
    name = f"{stem}.safetensors.index.json"
    path = folder / name
    text = read_whole(folder, name, most_nbytes=MOST_INDEX_NBYTES)
    info = marker.files.get(name)
    if verify and (info is None or (len(text), hex_of(text)) != (info.nbytes, info.header)):
        raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
    with distrusted(str(path)):
        weight_map = parse_json(str(path), text)["weight_map"]
        said = {key: check_name(str(path), file) for key, file in weight_map.items()}
    for key in {**said, **tensors}:
        stored = tensors.get(key)
        if stored is None or said.get(key) != stored.file.name:
            where = stored.file.name if stored is not None else "in no file"
            raise CheckpointError(f"{path}: says that {key} is in {said.get(key)}, it is {where}")
