"""Sizes in words: `512MiB` to a number of bytes, and back."""

from __future__ import annotations

import re

from fsdp_optim.saying import counted as counted
from fsdp_optim.saying import sized as sized

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)[bB]?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(text: str) -> int:
    """Return a number of bytes from a text such as 4GB, 512MiB or 1000000. Raises ValueError for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size such as 4GB, 512MiB or 1000000")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])


def aged(seconds: float) -> str:
    """Return a time that has passed in words: `12 s`, `3 min`, `5 h`, `9 d`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
