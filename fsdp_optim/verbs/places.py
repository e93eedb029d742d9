"""Where a checkpoint is, the same on all ranks."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_optim.formats.files import absolute
from fsdp_optim.transport.agree import tell
from fsdp_optim.transport.callers import Callers


def common_path(callers: Callers, path: str | os.PathLike[str]) -> Path:
    """A user's path from the root. A relative one counts from the working directory of the lowest rank, on all of them.

    Called by all ranks.
    """
    mine = absolute(path)
    content = os.fsencode(mine)
    told = tell(callers, "path", content if callers.rank == callers.ranks[0] else b"", said=content)
    return mine if told.alike else Path(os.fsdecode(told.by(callers.ranks[0])))
