"""A JSON parser for files of unknown origin."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from fsdp_optim.errors import CheckpointError

_FEW = 4096  # lists that even a tiny file may have
_NBYTES_EACH = 4  # bytes that a file needs for each further list; an object counts as two
_ESCAPED = rb"\u"  # how a character begins that is written as its number
DOUBTFUL = object()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WORD = re.compile(rb'"(?:[^"\\]|\\.)*"')


def parse_json(where: str, data: bytes) -> Any:
    """Parse a text. Raises CheckpointError for a text that is not JSON, has a key twice or half of a character, or is nested too
    deeply.
    """
    value = decoded_at_once(data, Any)
    return value if value is not DOUBTFUL else _parsed(where, data)


def decoded_at_once(data: bytes, schema: Any) -> Any:
    """Decode a text as msgspec does, in half the time of `_parsed`; `DOUBTFUL` for one that may be wrong or has another schema.

    Such a parser takes the last of two equal keys. Each key has a colon behind it, and a colon in a string stays one unless it is
    escaped: where the value as text has as many colons, no key was lost.
    """
    if _ESCAPED in data:
        return DOUBTFUL
    try:
        value = msgspec.json.decode(data, type=schema)
        num_colons = msgspec.json.encode(value).count(b":")
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return DOUBTFUL
    return value if num_colons == data.count(b":") else DOUBTFUL


def _parsed(where: str, data: bytes) -> Any:
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
