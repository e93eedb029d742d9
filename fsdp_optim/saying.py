"""Lines that a user sees without setting up any logging: what a save, a load or a resume has done, with its figures in words."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass, replace

from fsdp_optim.errors import shortened

QUIET = "FSDP_OPTIM_QUIET"
"""The environment variable that, set to 1, leaves these lines to the application's logging alone."""

log = logging.getLogger("fsdp_optim")

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class LoadReceipt:
    """What a load has done; as text the line that says it, without its first word. Parts that do not apply are left out.

    Attributes:
        where: the path or URL of the checkpoint.
        ranks, wrapper: the numbers of ranks and the wrappers, at the save and now, in words.
        nbytes, num_tensors: of the loaded tensors, each counted once.
        seconds: the time that the load took.
        is_verified: their bytes were compared with checksums.
        num_random: the number of ranks that got their random states; 0 if none were asked for.
        names: the names of the objects that were restored.
        num_absent: the number of the optimizer's parameters without state in the checkpoint.
        num_proven: the number of values whose fingerprints are those that the save has made of its live values.
    """

    where: str
    ranks: str
    wrapper: str
    nbytes: int
    num_tensors: int
    seconds: float
    is_verified: bool = False
    num_random: int = 0
    names: tuple[str, ...] = ()
    num_absent: int = 0
    num_proven: int = 0

    def joined(self, later: LoadReceipt) -> LoadReceipt:
        """Join the receipts of two loads of one checkpoint. Ranks, wrapper and place are those of `later`."""
        return replace(
            later,
            where=self.where,
            nbytes=self.nbytes + later.nbytes,
            num_tensors=self.num_tensors + later.num_tensors,
            seconds=self.seconds + later.seconds,
            is_verified=self.is_verified and later.is_verified,
            num_random=max(self.num_random, later.num_random),
            names=tuple(dict.fromkeys((*self.names, *later.names))),
            num_absent=max(self.num_absent, later.num_absent),
            num_proven=self.num_proven + later.num_proven,
        )

    def __str__(self) -> str:
        tensors = counted(self.num_tensors, "tensor") + (" verified" if self.is_verified else "")
        parts = [self.ranks, self.wrapper, moved(self.nbytes, self.seconds), tensors]
        parts += [f"{counted(self.num_proven, 'fingerprint')} equal to the saved"] if self.num_proven else []
        parts += [f"random states of {counted(self.num_random, 'rank')}"] if self.num_random else []
        parts += [f"{shortened(self.names)} restored"] if self.names else []
        line = f"{self.where}: {', '.join(filter(None, parts))}"
        return f"{line}; {counted(self.num_absent, 'parameter')} without optimizer state" if self.num_absent else line


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


def speed_of(nbytes: int, since: float) -> str:
    """The seconds since a time of `time.monotonic`, and the MB/s."""
    seconds = time.monotonic() - since
    return f"{seconds:.2f} s, {nbytes / 1e6 / max(seconds, 1e-9):.0f} MB/s"


def sized(nbytes: float) -> str:
    """Return a number of bytes in words: `14.1 GB`."""
    for unit in _UNITS:
        if nbytes < 999.5 or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return `1 tensor`, `1,163 tensors`, `1.3 M elements`."""
    if number < 1_000_000:
        text = f"{number:,}"
    elif number < 999_950_000:  # four digits round what is above up to 1 G
        text = f"{number / 1e6:.4g} M"
    else:
        text = f"{number / 1e9:.4g} G"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def lasted(seconds: float) -> str:
    """Return a duration in words: `0.05 s`, `6.2 s`, `75 s`."""
    return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def moved(nbytes: int, seconds: float) -> str:
    """Return how fast bytes were moved, in words: `14.1 GB in 6.2 s (2.3 GB/s)`."""
    return f"{sized(nbytes)} in {lasted(seconds)} ({sized(nbytes / max(seconds, 1e-9))}/s)"
