"""JSON that somebody else wrote: read without trust."""

from __future__ import annotations

import json
import re
from typing import Any

from fsdp_optim.errors import CheckpointError

_FEW = 4096  # lists that any file may have, however small it is
_NBYTES_EACH = 4  # in a file, for each of the others; an object counts twice
_WORD = re.compile(rb'"(?:[^"\\]|\\.)*"')


def parse_json(where: str, data: bytes) -> Any:
    """The value. Raises CheckpointError for what is no JSON, has a key twice, or is nested too deeply to be honest."""
    try:
        return json.loads(data.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: is not readable: {reason}") from error


def check_density(where: str, data: bytes) -> None:
    """Raise CheckpointError where names, numbers and sizes have so many lists and objects that they can only fill the memory.

    An empty list has two bytes in a file, and some sixty in memory.
    """
    most = _FEW + len(data) // _NBYTES_EACH
    weight = _weight(data)
    if weight > most and weight - sum(_weight(word.group()) for word in _WORD.finditer(data)) > most:
        raise CheckpointError(
            f"{where}: has so many lists and objects in {len(data)} bytes that they would take many times that in memory"
        )


def _weight(data: bytes) -> int:
    return data.count(b"[") + 2 * data.count(b"{")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs. Raises ValueError where a key is there twice: two readers would see two things."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key[:200]!r} is in it twice")
            seen.add(key)
    return found
