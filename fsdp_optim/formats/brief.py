"""The brief at the beginning of a manifest: enough to order the checkpoints of a folder and to tell which are alike.

It is read without the rest of the manifest, which is large where a model has many parameters. Nothing in it is trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import hex_of
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.json_text import without_duplicates
from fsdp_optim.storage.base import check_name

MOST_NBYTES = 1 << 20
"""Bytes at the beginning of a manifest in which a brief ends, or the whole manifest is read instead."""

# The brief is the first of all keys when they are sorted, so that it is where the manifest begins.
_BEGINS = re.compile(r'\{"checksum":"[0-9a-f]{16}","checkpoint":\{"brief":')


class Brief(Struct, frozen=True):
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
    sequence: Annotated[int, Meta(ge=0)]
    step: int | None
    keep_last: int | None
    created_ns: int
    token: str
    content: str
    world_size: int
    files: dict[str, int]

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts checkpoints of one folder, the oldest first."""
        return self.sequence, -1 if self.step is None else self.step, self.created_ns, self.token

    def written(self) -> dict[str, Any]:
        """The brief as JSON values, with its checksum."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values | {"xxh3_64": hex_of(_canonical(values))}

    @classmethod
    def read(cls, where: str, values: Any) -> Brief:
        """The inverse of `written`. Raises CheckpointError where it is not what was saved, or not of the right types."""
        with distrusted(where):
            rest = {name: value for name, value in values.items() if name != "xxh3_64"}
            if hex_of(_canonical(rest)) != values["xxh3_64"]:
                raise CheckpointError(f"{where}: is not what was saved: the checksum of its brief differs")
            brief = msgspec.convert(rest, cls)
            for name in brief.files:
                check_name(where, name)
            return brief


def content_of(names: Collection[str], *, has_optim: bool) -> str:
    """Stands for the names of a checkpoint's parameters, and for whether it has an optimizer."""
    return hex_of(_canonical([sorted(names), has_optim]))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def brief_in(where: str, beginning: bytes) -> Brief | None:
    """The brief in the first bytes of a manifest; None where there is none, or it does not end there."""
    text = beginning.decode("latin-1")  # what a brief is made of is ASCII, wherever the bytes were cut
    begins = _BEGINS.match(text)
    if begins is None:
        return None
    try:
        values, _ = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode(text, begins.end())
    except (ValueError, RecursionError, MemoryError):
        return None
    return Brief.read(where, values)
