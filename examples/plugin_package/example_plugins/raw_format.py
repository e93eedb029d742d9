"""A minimal format: a raw file for each tensor, and an index in JSON, which is the manifest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy
from xxhash import xxh3_64_hexdigest

from fsdp_optim import CheckpointError
from fsdp_optim.plugins import (
    CheckpointIndex,
    CheckpointProbe,
    CheckpointStatus,
    Chunks,
    DataSection,
    Extent,
    Facts,
    FileInfo,
    FlatChunks,
    Format,
    Half,
    ManifestSummary,
    Opened,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Reader,
    SavedOptim,
    Stamp,
    StoredExtra,
    StoredOptim,
    StoredTensor,
    Sums,
    ValuesFile,
    Writer,
    WrittenFiles,
    as_checkpoint_error,
    check_bools,
    check_name,
    contents_of,
    decoded_optim,
    dtype_named,
    encode_values,
    extras_in,
    info_of_values,
    is_sure_that_not,
    join_tables,
    parse_json,
    plain_optim,
    read_extents,
    read_values,
    replaced_error,
    saved_optim,
)

INDEX = "index.json"
DESCRIPTION = "extra/description.safetensors"
_SEGMENT_NBYTES = 1 << 16


class RawProbe(CheckpointProbe[ManifestSummary]):
    """The answers that stores and listings ask for."""

    manifest = INDEX

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[ManifestSummary]:
        summary: ManifestSummary | None = None
        try:
            summary = ManifestSummary.from_json(opened.named(INDEX), index_in(opened)["summary"])
            for name, nbytes in summary.files.items():
                if opened.nbytes_of(name) != nbytes:
                    reason = f"{opened.named(name)} does not have the {nbytes} bytes that were saved"
                    return CheckpointStatus(reason=reason, partial=summary)
        except OSError as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error), partial=summary)
        return CheckpointStatus(summary)

    def token_in(self, opened: Opened) -> str | None:
        try:
            return str(index_in(opened)["summary"]["token"])
        except OSError:
            return None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        return lambda name: name == INDEX or name.endswith((".raw", ".safetensors"))


def index_in(opened: Opened) -> Any:
    path = opened.named(INDEX)
    text = opened.read_whole(INDEX, most_nbytes=1 << 28)
    with as_checkpoint_error(path):
        outer = parse_json(path, text)
        if _hash_of(outer["index"]) != outer["hash"]:
            raise CheckpointError(f"{path}: is not what was saved")
        return outer["index"]


def encoded_index(index: Any) -> bytes:
    return json.dumps({"hash": _hash_of(index), "index": index}).encode()


def _hash_of(index: Any) -> str:
    return xxh3_64_hexdigest(json.dumps(index, sort_keys=True).encode())


class Raw(Format):
    """`index`: the other files by name with sizes and hashes, and the tensors by half and key: dtype, shape and files."""

    name = "raw"
    probe = RawProbe()

    def recognises(self, opened: Opened) -> bool:
        return opened.has(INDEX)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return RawReader(opened)

    def writer(self) -> Writer:
        return RawWriter()

    def sequence_in(self, opened: Opened) -> int:
        status = self.probe.status_in(opened, whole=False)
        summary = status.summary or status.partial
        return summary.sequence if summary is not None else 0


RAW = Raw()


class RawWriter(Writer):
    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        extras = extras_in(index, allow_pickle=allow_pickle)
        files = dict(self.small(name, value, allow_pickle=allow_pickle) for name, value in extras)
        if contents.optim is not None:
            plain = plain_optim(contents.optim)
            files[DESCRIPTION] = encode_values("optim", plain, allow_pickle=allow_pickle, records=records)
        document = {"world_size": contents.world_size, "aliases": dict(contents.aliases)}
        return Prepared(contents.content, "", files, contents.optim, document)

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        return [
            PlannedFile(
                name=f"{half}-{number:05}.raw",
                half=half,
                head=b"",
                tensors=(one,),
                starts=(0,),
                nbytes_of_data=int(numpy.prod(one.shape, dtype=object)) * dtype_named(one.dtype).itemsize,
                segment_nbytes=_SEGMENT_NBYTES,
                tensors_in=lambda start, stop, key=one.key: key,  # type: ignore[misc]
            )
            for half, its in tensors.items()
            for number, one in enumerate(its)
        ]

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        return f"extra/{name}.safetensors", encode_values(name, value, allow_pickle=allow_pickle)

    def info_of(self, data: bytes) -> Any:
        return [len(data), info_of_values(data).header]

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        tensors: dict[str, Any] = {"model": {}, "optim": {}}
        for file in files:
            sums = join_tables(file.name, written.rows[file.name], file.nbytes_of_data)
            (one,) = file.tensors
            chunk = {"file": file.name, "ends": sums.ends.tolist(), "hashes": sums.hashes.tolist()}
            tensors[file.half][one.key] = {"dtype": one.dtype, "shape": list(one.shape), "chunks": [chunk]}
        summary = ManifestSummary(
            version=1,
            sequence=stamp.sequence,
            step=stamp.step,
            keep_last=None,
            created_ns=time.time_ns(),
            token=stamp.token,
            content=prepared.content,
            world_size=prepared.document["world_size"],
            files={file.name: file.nbytes for file in files} | {name: its[0] for name, its in written.extras.items()},
            manager=stamp.manager,
        )
        index = {**prepared.document, "tensors": tensors, "extras": dict(written.extras)}
        yield INDEX, encoded_index({**index, "summary": summary.to_json()})


class RawReader:
    """The chunks of a tensor are equal runs of elements, in the order of its files."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.version = opened, opened.version_of(INDEX)
        self.document = index_in(opened)
        self.sums: dict[str, tuple[Sums, str, str]] = {}
        with as_checkpoint_error(opened.named(INDEX)):
            self.model, self.optim = ({k: self.tensor(k, v) for k, v in its.items()} for its in self.halves())
            for name, (nbytes, _) in self.document["extras"].items():
                self._check_size(name, nbytes)

    def halves(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.document["tensors"]["model"], self.document["tensors"]["optim"]

    def tensor(self, key: str, described: Any) -> StoredTensor:
        dtype, shape, names = (
            described["dtype"],
            tuple(described["shape"]),
            [chunk["file"] for chunk in described["chunks"]],
        )
        for chunk in described["chunks"]:
            ends, hashes = (numpy.array(chunk[what], dtype="<u8") for what in ("ends", "hashes"))
            self._check_size(chunk["file"], int(ends[-1]) if len(ends) else 0)
            self.sums[chunk["file"]] = (Sums(ends, hashes), key, dtype)
        if len(names) == 1:
            return StoredTensor(key, dtype, shape, names[0], 0)
        length = -(-int(numpy.prod(shape)) // len(names))
        placement = FlatChunks(shape, 0, length, (range(-len(names), 0),))
        at = {rank: (name, 0) for rank, name in zip(range(-len(names), 0), names, strict=True)}
        return StoredTensor(key, dtype, shape, names[0], 0, chunks=Chunks(placement, at))

    def _check_size(self, name: str, nbytes: int) -> None:
        if self.opened.size_of(check_name(self.where, name)) != nbytes:
            raise CheckpointError(f"{self.named(name)}: does not have the {nbytes} bytes that were saved")

    @cached_property
    def index(self) -> CheckpointIndex:
        summary, listed = self.document["summary"], self.document["extras"]
        return CheckpointIndex(
            self.where,
            self.model,
            Facts("raw", summary["world_size"], summary["step"], has_checksums=True),
            self.document["aliases"],
            StoredOptim(self.optim, self._decoded_optim) if DESCRIPTION in listed else None,
            {
                name.removeprefix("extra/").removesuffix(".safetensors"): RawExtra(self, name)
                for name in listed
                if name != DESCRIPTION
            },
            identify=lambda: {"token": summary["token"]},
        )

    def _decoded_optim(self, allow_pickle: bool, records: Mapping[str, type]) -> SavedOptim:
        file = self.extra(DESCRIPTION)
        description = decoded_optim(file.path, file.values, file.tensors, allow_pickle=allow_pickle, records=records)
        return saved_optim(self.where, description, self.optim)

    @property
    def where(self) -> str:
        return self.opened.where

    def named(self, name: str) -> str:
        return self.opened.named(name)

    def extra(self, name: str) -> ValuesFile:
        nbytes, header = self.document["extras"][name]
        return read_values(self.opened, name, FileInfo(nbytes, header, None), verify=True)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        for name, its in extents.items():
            sums, key, dtype = self.sums[name]
            section = DataSection(self.named(name), partial(self.opened.read_into, name), 0, lambda *_: key)  # noqa: B023
            read_extents(section, its, sums, did_read)
            for one in its if dtype == "bool" else ():
                check_bools(section.name, key, one.memory)

    def verified(self) -> Reader:
        return self

    def check_unchanged(self) -> None:
        if self.opened.version_of(INDEX) != self.version:
            raise replaced_error(self.where)

    def close(self) -> None:
        self.opened.close()


@dataclass(frozen=True)
class RawExtra(StoredExtra):
    reader: RawReader
    name: str

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self.reader.extra(self.name).decoded(allow_pickle=allow_pickle)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.reader.extra(self.name).decoded_each(allow_pickle=allow_pickle)
