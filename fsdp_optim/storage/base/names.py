"""Names of files that stay inside their place, and the names of files in errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

from fsdp_optim.errors import CheckpointError, causes_of

_NAME = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata|zero/((?!\.{1,2}/)[^/\0]+/)?[^/\0]+\.pt"
)
_RESERVED = re.compile(r".*\.(new|saving|old|gone)-[0-9a-f]{16}", re.DOTALL)
_NUMBERED = re.compile(
    r"(.*[^a-z])?(step|epoch|checkpoint|ckpt|iter|iteration)s?[-_=.]?[0-9]+.*", re.IGNORECASE | re.DOTALL
)

MOST_DEPTH = 3
"""The number of folders above a file in a place of any content."""

MOST_FILES = 1_000_000
"""The number of files that a listing of a place of any content may have."""

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The error numbers that mean a missing file. ELOOP: the name is a symbolic link, and a checkpoint has none."""


class Undecided(Exception):
    """The cause of an error that does not show whether a file is missing or damaged."""


def is_sure_that_not(error: BaseException) -> bool:
    """Return whether an error proves that a checkpoint is missing or damaged. False: it may be intact, and unreadable now."""
    return not any(
        isinstance(cause, (MemoryError, Undecided))
        or (isinstance(cause, OSError) and cause.errno is not None and cause.errno not in NOT_THERE)
        for cause in causes_of(error)
    )


def check_name(where: str, name: object) -> str:
    """Return a file name that stays inside its checkpoint: in the place itself, or in a folder of a plain name there, or in
    the folders of parameters in `zero`, as DeepSpeed names them; no `..`, nothing absolute.

    Raises CheckpointError for any other name. `where`: the place that gave the name, for the error.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: names the file {name!r}, which is not one of a checkpoint's own")
    return name


def check_inside(where: str, name: object) -> str:
    """Return a file name of any format that stays inside its place: relative, with "/" between folders, and without `..`.

    Raises CheckpointError for any other name. `where`: the place that gave the name, for the error.
    """
    parts = name.split("/") if isinstance(name, str) and "\0" not in name else [""]
    if any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{where}: names the file {name!r}, which is not inside the checkpoint")
    return str(name)


def is_reserved(name: str) -> bool:
    """Return whether saves give this name to a place that is not yet, or no longer, a checkpoint."""
    return _RESERVED.fullmatch(name) is not None


def check_not_reserved(where: str, parts: Iterable[str]) -> None:
    """Raise CheckpointError for a place below a reserved name (`is_reserved`): the next save beside it would remove the place.

    `parts`: the names of the place and of the folders that it is in.
    """
    for name in parts:
        if is_reserved(name):
            raise CheckpointError(
                f"{where}: {name} is a name that saves give to unfinished and removed checkpoints, so the next save would remove "
                "it: save to a path without this name"
            )


def names_checkpoint(name: str) -> bool:
    """Return whether people give such a name to checkpoints: it has a step, an epoch or the like, with its number."""
    return _NUMBERED.fullmatch(name) is not None
