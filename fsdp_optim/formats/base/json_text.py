"""A JSON parser for files of unknown origin."""

from __future__ import annotations

import json
import re
from typing import Any

from fsdp_optim.errors import CheckpointError

_FEW = 4096  # lists that even a tiny file may have
_NBYTES_EACH = 4  # bytes that a file needs for each further list; an object counts as two
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WORD = re.compile(rb'"(?:[^"\\]|\\.)*"')


def parse_json(where: str, data: bytes) -> Any:
    """Parse a text. Raises CheckpointError for a text that is not JSON, has a key twice or half of a character, or is nested too
    deeply.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=without_duplicates)
        if _SURROGATE.search(data):  # two of them are a character, one alone cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: is not readable JSON: {reason}") from error


def check_density(where: str, data: bytes) -> None:
    """Raise CheckpointError for a JSON text with more lists and objects than names, numbers and sizes need.

    Such a text could fill the memory: an empty list takes two bytes in a file, and some sixty in memory.
    """
    most = _FEW + len(data) // _NBYTES_EACH
    weight = _weight(data)
    if weight > most and weight - sum(_weight(word.group()) for word in _WORD.finditer(data)) > most:
        raise CheckpointError(
            f"{where}: has so many lists and objects in {len(data)} bytes that they would take many times as much memory"
        )


def _weight(data: bytes) -> int:
    return data.count(b"[") + 2 * data.count(b"{")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of pairs. Raises ValueError if a key occurs twice, because readers differ in the value that they take."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key[:200]!r} occurs twice")
            seen.add(key)
    return unique
