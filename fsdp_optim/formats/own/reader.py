"""The reader of this library's own format: the manifest of a checkpoint, and the place of every tensor. No content is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, ClassVar

import msgspec
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.bools import BOOL, BoolRanges
from fsdp_optim.formats.base.checksums import Sums, hex_of, num_segments, sums_of, table_nbytes
from fsdp_optim.formats.base.description import decoded, decoded_text
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.extents import DataSection, Extent, read_extents
from fsdp_optim.formats.base.header import ReadHeader, length_of_header, parse_header
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, SavedOptim, StoredExtra, StoredOptim
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.protocols import Half, replaced_error
from fsdp_optim.formats.base.records import COMMON, SavedWeights, StoredTensor
from fsdp_optim.formats.base.saved_optim import saved_optim
from fsdp_optim.formats.base.stored_columns import StoredColumns, StoredEntries
from fsdp_optim.formats.base.tree_values import keys_in, with_tensors
from fsdp_optim.formats.own.extras import Extra, planned_extras, read_extra
from fsdp_optim.formats.own.folders import folder_of, in_folder, joined_key, models_with_optim, stem_of, stems_of
from fsdp_optim.formats.own.manifest import FINGERPRINT, NAME, FileInfo, Manifest, ModelInfo, manifest_in
from fsdp_optim.formats.own.small_files import MOST_INDEX_NBYTES, fingerprint_in, read_small
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.storage.base import Opened, check_name
from fsdp_optim.tensors.memory import dtype_named

_MOST_TABLES = 4  # of checksums, in memory
_SHORT_NBYTES, _SEGMENTS_IN_RUN = 128 << 10, 32
_EXTRA, _SUFFIX = "extra/", ".safetensors"
INDEX = ".safetensors.index.json"
"""The end of the name of an index."""

DESCRIPTION_FILE = "extra/optim.safetensors"
"""The file of the optimizer's description, if the description contains tensors."""


def file_of_extra(name: str) -> str:
    """Return the file name of an extra."""
    return f"{_EXTRA}{name}{_SUFFIX}"


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file: its tensors, and the byte at which its data begins.

    Attributes:
        sums: the checksum of the file's table of checksums; None: the file is not verified.
        num_segments: the number of segments in that table.
    """

    name: str
    header: ReadHeader
    offset: int
    sums: str | None = None
    num_segments: int = 0

    @cached_property
    def bools(self) -> BoolRanges:
        return BoolRanges((entry.start, entry.stop, entry.key) for entry in self.header.entries.of_code(BOOL))

    @property
    def short_nbytes(self) -> int:
        """A range of fewer bytes costs too much to read by itself, because whole segments are read."""
        if not self.num_segments:
            return _SHORT_NBYTES
        return max(_SHORT_NBYTES, _SEGMENTS_IN_RUN * self.header.data_nbytes // self.num_segments)

    def table(self, opened: Opened) -> Sums | None:
        """Return the table of checksums, read on demand, because the tables of all files together are large."""
        if self.sums is None:
            return None
        name = sums_of(self.name)
        data, path = opened.read_whole(name, table_nbytes(self.num_segments)), opened.named(name)
        if hex_of(data) != self.sums:
            raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
        return Sums.parse(path, data, self.header.data_nbytes)


@dataclass(frozen=True)
class Checkpoint:
    """The `Reader` of this library's own format. The caller closes it after use.

    `opened`: the open files, which stay readable when another checkpoint replaces them.
    """

    format_name: ClassVar[str] = "fsdp_optim"

    opened: Opened
    manifest: Manifest
    files: Mapping[str, StoredFile]
    model: Mapping[str, StoredTensor]
    optim: Mapping[str, StoredTensor]
    trees: Mapping[str, StoredTensor]
    verifies: bool = True
    _manifest_version: tuple[object, ...] | None = None
    _tables: dict[str, Sums | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def opened_in(cls, opened: Opened, *, verify: bool) -> Checkpoint:
        """Read the manifest and all headers. Raises CheckpointError that names the damaged file."""
        version = opened.version_of(NAME)
        try:
            return cls._opened_in(opened, version, verify=verify)
        except CheckpointError as error:
            if opened.version_of(NAME) not in (None, version):  # thin has removed files meanwhile
                raise replaced_error(opened.where) from error
            raise

    @classmethod
    def _opened_in(cls, opened: Opened, version: tuple[object, ...] | None, *, verify: bool) -> Checkpoint:
        manifest = manifest_in(opened)
        files: dict[str, StoredFile] = {}
        columns: Mapping[Half, StoredColumns] = {
            half: StoredColumns(opened.request_nbytes) for half in ("model", "optim", "state")
        }
        stems = stems_of(manifest.model.models, manifest.model.weights_name)
        for name, info in manifest.files.items():
            if name.startswith("extra/"):
                continue
            if name.endswith(".json"):
                # An index is compared below, and fingerprints where they are read.
                if verify and name != FINGERPRINT and not name.endswith(INDEX):
                    read_small(opened, name, info)
                continue
            folder, half = folder_of(name), stems.get(stem_of(name))
            if half is None:
                raise CheckpointError(
                    f"{opened.where}: the manifest names {name}, which is a file of neither the model, nor the optimizer, nor "
                    "the trainer's values"
                )
            file = files[name] = _open_file(opened, name, info, verify=verify)
            entries, keys = file.header.entries, file.header.entries.keys
            if folder:
                keys = [joined_key(folder, half, key) for key in keys]
            twice = columns[half].add(StoredEntries(name, keys, entries, short_nbytes=file.short_nbytes))
            if twice is not None:
                raise CheckpointError(f"{opened.named(name)}: {twice} is in another file too")
        if columns["state"] and file_of_extra(COMMON) not in manifest.files:
            raise CheckpointError(f"{opened.where}: has tensors of values, and no {file_of_extra(COMMON)}")
        for stem, half in stems.items():
            _check_index(opened, stem, half, manifest, columns[half], verify=verify)
        return cls(
            opened=opened,
            manifest=manifest,
            files=files,
            model=columns["model"],
            optim=columns["optim"],
            trees=columns["state"],
            verifies=verify,
            _manifest_version=version,
        )

    @cached_property
    def index(self) -> CheckpointIndex:
        names = (name for name in self.manifest.files if name.startswith(_EXTRA) and name != DESCRIPTION_FILE)
        return CheckpointIndex(
            self.opened.where,
            self.model,
            Facts(
                self.format_name,
                self.manifest.world_size,
                self.manifest.effective_summary.step,
                SavedWeights(self.manifest.model.weights, self.manifest.model.weights_dtype),
                has_checksums=all(file.sums is not None for file in self.files.values()),
                about=self._about(),
                was_thinned=self.manifest.thinned is not None,
                wrapper=self.manifest.effective_summary.wrapper,
                models=self.manifest.model.models,
                with_optim=models_with_optim(self.manifest.model.models, self.files),
                views=self.manifest.model.views,
                fused_state=self.manifest.model.fused_state,
                joint_steps=self.manifest.model.joint_steps,
            ),
            self.manifest.model.aliases,
            StoredOptim(self.optim, self._decoded_optim) if self.manifest.has_optim else None,
            planned_extras(
                self.where,
                {name.removeprefix(_EXTRA).removesuffix(_SUFFIX): _LazyExtra(self, name) for name in names},
            ),
            trees=self.trees,
            identify=self._identity,
            read_fingerprint=self._fingerprint,
        )

    def _fingerprint(self) -> Fingerprint | None:
        with self._noticing_replacement():
            return fingerprint_in(self.opened, self.manifest)

    def _decoded_optim(self, allow_pickle: bool, records: Mapping[str, type]) -> SavedOptim:
        where, text = f"{self.where}: the optimizer", self.manifest.optim
        if text is not None:
            description = decoded_text(where, bytes(text), allow_pickle=allow_pickle, records=records)
        else:
            file = self.extra(DESCRIPTION_FILE, verify=self.verifies)
            description = decoded(file.path, file.values, file.tensors, allow_pickle=allow_pickle, records=records)
        return saved_optim(self.where, description, self.optim)

    def close(self) -> None:
        """Close the files, and forget the index: it refers to this reader, so both would stay until the collector comes."""
        self.opened.close()
        self.__dict__.pop("index", None)

    @property
    def where(self) -> str:
        """The name of the place of the checkpoint."""
        return self.opened.where

    def _identity(self) -> Mapping[str, Any]:
        """Values that differ between two checkpoints, and the numbers of segments, which decide how ranks read the tensors."""
        nums = {name: file.num_segments for name, file in self.files.items()}
        return {"token": self.manifest.token, "checksum": self.manifest.checksum, "segments": nums}

    def check_unchanged(self) -> None:
        """Raise ReplacedError if another manifest was written into this folder since the checkpoint was opened.

        A folder that lost its path or its files stays readable, because they are open.
        """
        version = self.opened.version_of(NAME)
        if version is not None and version != self._manifest_version:
            raise replaced_error(self.where)

    def _about(self) -> Mapping[str, str]:
        """Facts for users: the version of the format, the time of the save, and the treatment of the weights."""
        saved = datetime.fromtimestamp(self.manifest.created_ns / 1e9, timezone.utc)
        return {
            "saved by": f"fsdp_optim, version {self.manifest.version} of its format",
            **_about_weights(self.manifest.model),
            **({"models": ", ".join(self.manifest.model.models)} if self.manifest.model.models else {}),
            **({"optimizer": "removed by thin"} if self.manifest.thinned is not None else {}),
            "saved at": f"{saved:%Y-%m-%d %H:%M:%S} UTC, by the clock of the machine that saved",
        }

    def extra(self, name: str, *, verify: bool) -> Extra:
        """Return the file of an extra, or of the description."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.where}: the manifest does not name {name}")
        with self._noticing_replacement():
            return read_extra(self.opened, name, self.manifest.files[name], verify=verify)

    def small_file(self, name: str) -> bytes:
        """Return the verified bytes of the file of an extra or of the description."""
        self.extra(name, verify=True)
        with self._noticing_replacement():
            return self.opened.read_whole(name, self.manifest.files[name].nbytes)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill memory from ranges of the data sections of files, given by file name."""
        with self._noticing_replacement():
            for name, ranges in extents.items():
                file = self.files[name]
                sums = self._table(file)
                fill = partial(self.opened.read_into, name)
                section = DataSection(
                    self.opened.named(name), fill, file.offset, file.header.tensors_in, self.opened.num_requests
                )
                read_extents(section, ranges, sums, did_read)
                file.bools.check(section.name, ranges)

    def complete(self, stored: StoredTensor) -> torch.Tensor:
        """Read one tensor completely, on the CPU."""
        tensor = torch.empty(stored.shape, dtype=dtype_named(stored.dtype))
        if tensor.numel():
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            self.read({stored.file: [Extent(stored.start, memory)]})
        return tensor

    def verified(self) -> Checkpoint:
        """Return the same checkpoint, read with verification. Closing this reader closes both."""
        with self._noticing_replacement():
            return self.opened_in(self.opened, verify=True)

    @contextmanager
    def _noticing_replacement(self) -> Iterator[None]:
        """Raise ReplacedError in the place of a CheckpointError, if another save has replaced the checkpoint."""
        try:
            yield
        except CheckpointError as error:
            if self._is_replaced():
                raise replaced_error(self.where) from error
            raise

    def _is_replaced(self) -> bool:
        """Return whether another save has taken the place, or `thin` has taken the files of the optimizer."""
        return self.opened.was_replaced() or self.opened.version_of(NAME) not in (None, self._manifest_version)

    def _table(self, file: StoredFile) -> Sums | None:
        """Return the table of checksums of a file. A few tables are kept, because several threads may read different files."""
        if file.name not in self._tables:
            table = file.table(self.opened)
            for name in list(self._tables)[: 1 - _MOST_TABLES]:
                self._tables.pop(name, None)
            self._tables[file.name] = table
            return table
        return self._tables.get(file.name) or file.table(self.opened)


@dataclass(frozen=True)
class _LazyExtra(StoredExtra):
    """An extra whose file is read when its value is asked for, and verified if the reader verifies."""

    reader: Checkpoint
    name: str

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self._read(self._extra().decoded(allow_pickle=allow_pickle))

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self._read(self.as_tree(allow_pickle=allow_pickle))

    def as_tree(self, *, allow_pickle: bool) -> Any:
        tree = self._extra().decoded_each(allow_pickle=allow_pickle)
        self._check(keys_in(tree))
        return tree

    def _extra(self) -> Extra:
        return self.reader.extra(self.name, verify=self.reader.verifies)

    def _check(self, keys: Sequence[str]) -> None:
        """Raise CheckpointError where a tree names a tensor that no file has."""
        lacking = next((key for key in keys if key not in self.reader.trees), None)
        if lacking is not None:
            raise CheckpointError(f"{self.reader.where}: {self.name} names the tensor {lacking}, which is in no file")

    def _read(self, tree: Any) -> Any:
        """Read the tensors of a tree completely."""
        keys = keys_in(tree)
        if not keys:
            return tree
        self._check(keys)
        return with_tensors(tree, {key: self.reader.complete(self.reader.trees[key]) for key in keys})


def _about_weights(model: ModelInfo) -> dict[str, str]:
    """Return the treatment of the weights by a save, in words for users; empty where all were written as they were."""
    words = {"trainable": "the trainable parameters, and buffers", "none": "none were saved"}
    which = {"weights": words[model.weights]} if model.weights in words else {}
    return which if model.weights_dtype is None else {**which, "weights were cast to": model.weights_dtype}


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


class _Index(msgspec.Struct, frozen=True):
    """The part of an index file, as Hugging Face writes it, that this library reads."""

    weight_map: dict[str, str]


def _check_index(
    opened: Opened, stem: str, half: Half, manifest: Manifest, tensors: StoredColumns, *, verify: bool
) -> None:
    """Check that the index of a split half, which other tools read, agrees with the files.

    `stem`: how the names of the files begin. `tensors`: those of the half, of all models.
    """
    if not any(name.startswith(f"{stem}-") for name in manifest.files):
        return
    folder, file_of = folder_of(stem), tensors.file_of_each()
    if folder:
        file_of = {key: file for key, file in file_of.items() if folder_of(file) == folder}
    name = f"{stem}{INDEX}"
    path = opened.named(name)
    text = opened.read_whole(name, most_nbytes=MOST_INDEX_NBYTES)
    info = manifest.files.get(name)
    if verify and (info is None or (len(text), hex_of(text)) != (info.nbytes, info.header)):
        raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
    with as_checkpoint_error(path):
        listed = msgspec.convert(parse_json(path, text), _Index).weight_map
        for file in listed.values():
            check_name(path, file)
        weight_map = {joined_key(folder, half, key): in_folder(folder, file) for key, file in listed.items()}
    for key in {**weight_map, **file_of}:
        if key not in file_of or weight_map.get(key) != file_of[key]:
            is_in = file_of.get(key, "in no file")
            raise CheckpointError(f"{path}: says that {key} is in {weight_map.get(key)}, but it is {is_in}")
