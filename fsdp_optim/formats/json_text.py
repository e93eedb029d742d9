"""JSON that somebody else wrote: read without trust."""

from __future__ import annotations

import json
from typing import Any

from fsdp_optim.errors import CheckpointError


def parse_json(where: str, data: bytes) -> Any:
    """The value. Raises CheckpointError for what is no JSON, has a key twice, or is nested too deeply to be honest."""
    try:
        return json.loads(data.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: is not readable: {reason}") from error


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs. Raises ValueError where a key is there twice: two readers would see two things."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is in it twice")
    return found
