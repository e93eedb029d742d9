"""The brief at the beginning of a marker: enough to order the checkpoints of a folder and to tell which are alike.

It is read without the rest of the marker, which is large where a model has many parameters. Nothing in it is trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import hex_of
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.json_text import without_duplicates
from fsdp_optim.storage.base import check_name

KEY = "brief"
"""The first of all keys when they are sorted, so that it is where the marker begins."""

MOST_NBYTES = 1 << 20
"""Bytes at the beginning of a marker in which a brief ends, or the whole marker is read instead."""

_BEGINS = re.compile(r'\{"checksum":"[0-9a-f]{16}","checkpoint":\{"brief":')


@dataclass(frozen=True)
class Brief:
    """What a checkpoint says of itself, in short.

    Attributes:
        version: of the format.
        sequence: higher than that of every checkpoint that was in the folder; 0 where a version without it has saved.
        step: what the trainer gave.
        keep_last: what the save was asked for.
        created_ns: by the clock of the machine that saved.
        token: no other save has it.
        content: alike for checkpoints with the same names of parameters, and with or without an optimizer.
        files: the size of each file.
    """

    version: int
    sequence: int
    step: int | None
    keep_last: int | None
    created_ns: int
    token: str
    content: str
    world_size: int
    files: Mapping[str, int]

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts checkpoints of one folder, the oldest first."""
        return self.sequence, -1 if self.step is None else self.step, self.created_ns, self.token

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Brief:
        """The brief of a marker that has none, or of one that is about to be written."""
        return cls(
            version=said["version"],
            sequence=0,
            step=None,
            keep_last=None,
            created_ns=said["created_ns"],
            token=str(said.get("token", "")),
            content=content_of(said["model"]["params"], has_optim=said["has_optim"]),
            world_size=said["world_size"],
            files={name: info["size"] for name, info in said["files"].items()},
        )

    def said(self) -> dict[str, Any]:
        said = {name: value for name, value in vars(self).items() if name != "files"} | {"files": dict(self.files)}
        return said | {"xxh3_64": hex_of(_canonical(said))}

    @classmethod
    def read(cls, where: str, said: Mapping[str, Any]) -> Brief:
        """The inverse of `said`. Raises CheckpointError where it is not what was saved, or not of the right types."""
        with distrusted(where):
            values = {name: value for name, value in said.items() if name != "xxh3_64"}
            if hex_of(_canonical(values)) != said["xxh3_64"]:
                raise CheckpointError(f"{where}: is not what was saved: the checksum of its brief differs")
            brief = cls(**{name: values[name] for name in cls.__dataclass_fields__})
            numbers = [brief.version, brief.sequence, brief.created_ns, brief.world_size, *brief.files.values()]
            numbers += [number for number in (brief.step, brief.keep_last) if number is not None]
            if any(type(number) is not int for number in numbers) or brief.sequence < 0:
                raise ValueError("a number of its brief is of another type")
            if not all(isinstance(word, str) for word in (brief.token, brief.content)):
                raise ValueError("a word of its brief is of another type")
            return cls(**{**vars(brief), "files": {check_name(where, name): n for name, n in brief.files.items()}})


def content_of(names: Collection[str], *, has_optim: bool) -> str:
    """Stands for the names of a checkpoint's parameters, and for whether it has an optimizer."""
    return hex_of(_canonical([sorted(names), has_optim]))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def brief_in(where: str, beginning: bytes) -> Brief | None:
    """The brief in the first bytes of a marker; None where there is none, or it does not end there."""
    text = beginning.decode("latin-1")  # what a brief is made of is ASCII, wherever the bytes were cut
    begins = _BEGINS.match(text)
    if begins is None:
        return None
    try:
        said, _ = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode(text, begins.end())
    except (ValueError, RecursionError, MemoryError):
        return None
    return Brief.read(where, said)
