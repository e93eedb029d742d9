"""The facts that file systems of fsspec give about files, each under names of its own: the version, and the time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

_TAGS = ("generation", "ETag", "etag", "version_id", "VersionId", "blob_id", "content_md5", "checksum")
"""Each differs when a file is written again, in the order in which they are looked for."""

_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "modificationTime", "created")
_MILLISECONDS = 1e11  # a number of seconds since 1970 is smaller for thousands of years


def version_of(info: Mapping[str, Any]) -> str:
    """Return a word that differs when the file is written again: its tag, where the store has any, or its size and its time."""
    for tag in _TAGS:
        if info.get(tag):
            return f"{tag} {info[tag]}"
    written = time_of(info)
    return f"{info['size']}" if written is None else f"{info['size']} {written:.9f}"


def has_tag(info: Mapping[str, Any]) -> bool:
    """Return whether a version is a tag: times do not distinguish files that follow one another closely."""
    return any(info.get(tag) for tag in _TAGS)


def time_of(info: Mapping[str, Any]) -> float | None:
    """Return the time when a file was written, in seconds since 1970; None where the store does not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) / 1000 if value > _MILLISECONDS else float(value)
    return None
