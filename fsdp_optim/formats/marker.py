"""`fsdp_optim.json`: written last, it makes a folder a checkpoint. It says what is in the files, and how to know them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.brief import KEY, Brief
from fsdp_optim.formats.checksums import hex_of
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.json_text import check_density, parse_json
from fsdp_optim.storage.base import Opened, Undecided, check_name

NAME = "fsdp_optim.json"
MOST_NBYTES = 1 << 28  # of a marker: some hundred for each parameter
FORMAT, VERSION = "fsdp_optim", 2


class NewerVersion(Undecided):
    """The cause of a CheckpointError: the checkpoint may be whole, but this version of the library cannot tell."""


@dataclass(frozen=True)
class FileInfo:
    """One safetensors file: its bytes, and the hashes of its header and of its table of checksums (None: it has none)."""

    nbytes: int
    header: str
    sums: str | None

    def said(self) -> dict[str, Any]:
        return {"size": self.nbytes, "header_xxh3_64": self.header, "sums_xxh3_64": self.sums}


@dataclass(frozen=True)
class Marker:
    """What a checkpoint says of itself.

    `said`: all of it, as JSON values. `brief`: what is said at its beginning. `checksum`: the hash of it, where it was read.
    """

    said: Mapping[str, Any]
    files: Mapping[str, FileInfo]
    brief: Brief
    checksum: str = ""

    @classmethod
    def of(
        cls,
        said: Mapping[str, Any],
        files: Mapping[str, FileInfo],
        *,
        sequence: int,
        step: int | None = None,
        keep_last: int | None = None,
    ) -> Marker:
        said = {"format": FORMAT, "version": VERSION, **said, "files": {n: f.said() for n, f in files.items()}}
        brief = replace(Brief.of(said), sequence=sequence, step=step, keep_last=keep_last)
        return cls(said | {KEY: brief.said()}, files, brief)

    def encoded(self) -> bytes:
        body = _canonical(self.said)
        check_density(NAME, body)  # what would not be read is not written
        return b'{"checksum":"%s","checkpoint":%s}\n' % (hex_of(body).encode(), body)


def _canonical(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def marker_in(opened: Opened) -> Marker:
    """The marker of a complete checkpoint. Raises CheckpointError for everything else."""
    if not opened.has(NAME):
        raise CheckpointError(
            f"{opened.where}: has no {NAME}, so it is no checkpoint of this library, or one whose save did not finish"
        )
    path = opened.named(NAME)
    text = opened.read_whole(NAME, most_nbytes=MOST_NBYTES)
    check_density(path, text)
    outer = parse_json(path, text)
    with distrusted(path):
        said, checksum = outer["checkpoint"], outer["checksum"]
        if said["format"] != FORMAT:
            raise CheckpointError(f"{path}: has the format {said['format']!r}, not {FORMAT!r}")
        if type(said["version"]) is not int or not 1 <= said["version"] <= VERSION:
            raise CheckpointError(
                f"{path}: has the schema version {said['version']!r}; this fsdp_optim reads up to {VERSION}: install a newer one"
            ) from NewerVersion()
        if not _is_as_written(text, checksum) and hex_of(_canonical(said)) != checksum:
            raise CheckpointError(f"{path}: is not what was saved: its checksum differs; load another checkpoint")
        files = {check_name(path, name): file_info(info) for name, info in said["files"].items()}
        _check_said(said, files)
        return Marker(said, files, _brief_of(path, said), checksum)


def _brief_of(path: str, said: Mapping[str, Any]) -> Brief:
    """The brief, which has to agree with the rest: those who read it alone see the same checkpoint."""
    made = Brief.of(said)
    if KEY not in said:
        return made
    brief = Brief.read(path, said[KEY])
    if replace(made, sequence=brief.sequence, step=brief.step, keep_last=brief.keep_last) != brief:
        raise CheckpointError(f"{path}: its brief and the rest of it say different things; load another checkpoint")
    return brief


def _is_as_written(text: bytes, checksum: object) -> bool:
    """Whether it is this library's own text, unchanged: then its values need not be written again to be compared."""
    prefix, suffix = b'{"checksum":"%s","checkpoint":' % str(checksum).encode(errors="replace"), b"}\n"
    if not text.startswith(prefix) or not text.endswith(suffix):
        return False
    return hex_of(memoryview(text)[len(prefix) : -len(suffix)]) == checksum


def _check_said(said: Mapping[str, Any], files: Mapping[str, FileInfo]) -> None:
    """That everything has the type that readers expect. Raises ValueError, or what a wrong type causes."""
    world_size, model = said["world_size"], said["model"]
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}")
    if type(said["created_ns"]) is not int or type(said["has_optim"]) is not bool:
        raise ValueError("created_ns or has_optim is of another type")
    beyond = [name for name in files if name.startswith("extra/rank-") and int(name[11:16]) >= world_size]
    if beyond:
        raise ValueError(f"{beyond[0]} is of a rank beyond the {world_size} that saved it")
    words = [word for pair in model["aliases"].items() for word in pair]
    shapes = [param["shape"] for param in model["params"].values()]
    if not all(isinstance(word, str) for word in words) or not all(isinstance(shape, list) for shape in shapes):
        raise ValueError("the model's names and shapes are of other types")


def file_info(said: Mapping[str, Any]) -> FileInfo:
    """The inverse of `FileInfo.said`."""
    nbytes, header, sums = said["size"], said["header_xxh3_64"], said["sums_xxh3_64"]
    if type(nbytes) is not int or nbytes < 0 or not isinstance(header, str) or not isinstance(sums, (str, type(None))):
        raise ValueError(f"{said} does not describe a file")
    return FileInfo(nbytes, header, sums)
