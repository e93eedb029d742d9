"""Lines that a user sees without setting up any logging: what a save, a load or a resume has done."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

QUIET = "FSDP_OPTIM_QUIET"
"""The environment variable that, set to 1, leaves these lines to the application's logging alone."""

log = logging.getLogger("fsdp_optim")


def say(line: str) -> None:
    """Log a line at the level INFO; where the application has no handler for it, write the line to stderr.

    Called by one rank. `logging.getLogger("fsdp_optim").setLevel(logging.WARNING)` silences the lines, as for any logger; so does
    the environment variable FSDP_OPTIM_QUIET=1 where there is no handler.
    """
    log.info(line)
    is_silenced = log.level > logging.INFO or log.disabled or log.manager.disable >= logging.INFO
    if is_silenced or log.hasHandlers() or os.environ.get(QUIET, "0") not in ("", "0") or sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed must not fail a save
        print(line, file=sys.stderr, flush=True)
