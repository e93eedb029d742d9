"""The common part of all tortures: cases from a seed and a number, figures, and failures with the command that repeats them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_FAILURES = 20  # per torture
PATIENCE = float(os.environ.get("SOAK_PATIENCE") or 1)
"""The factor of all time limits: on a busy machine, a slow process is not a hung one."""

_ROOM = 2 << 30  # bytes that a torture may need in memory


@dataclasses.dataclass
class Torture:
    """One torture at work.

    Attributes:
        seconds, cases: when to stop: after this time, after so many cases, or after the first of both.
        only: the number of a single case to run again.
        short: whether this is the part of `make test-all`, where a case that takes long does less.
        first, stride: the cases of this process, where several processes share them.
        stopped: whether to end after the current case.
        figures: counts by name.
        failures: the failed cases, each with its error.
    """

    name: str
    seed: int
    seconds: float | None = None
    cases: int | None = None
    only: int | None = None
    short: bool = False
    first: int = 0
    stride: int = 1
    stopped: bool = False
    figures: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def numbers(self) -> Iterator[int]:
        """The numbers of the cases, until the time is up."""
        if self.only is not None:
            yield self.only
            return
        end = time.monotonic() + self.seconds if self.seconds is not None else float("inf")
        number = self.first
        while (
            not self.stopped
            and (self.cases is None or number < self.cases)
            and time.monotonic() < end
            and len(self.failures) < MOST_FAILURES
        ):
            yield number
            number += self.stride

    def rng(self, number: int) -> random.Random:
        """A random generator that is the same whenever this case runs."""
        return random.Random(f"{self.seed} {self.name} {number}")

    def stop(self, *_: Any) -> None:
        """Stop after the current case; a signal handler."""
        self.stopped = True

    def fail(self, number: int, text: str) -> None:
        """Record a failure."""
        again = f"make soak SEED={self.seed} SOAK_ONLY={self.name} SOAK_CASE={number}"
        self.failures.append(f"{self.name}, case {number} ({again}): {text}")

    @contextlib.contextmanager
    def case(self, number: int, what: str = "") -> Iterator[None]:
        """Record an exception inside the block as a failure of this case."""
        try:
            yield
        except Exception as error:
            expected = isinstance(error, AssertionError)
            text = str(error) if expected else "".join(traceback.format_exception(error))
            self.fail(number, f"{what}: {text}" if what else text)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A folder in memory if there is room, which is faster than a disk; otherwise a temporary folder."""
    memory = Path("/dev/shm")
    in_memory = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    with tempfile.TemporaryDirectory(
        prefix="fsdp_optim_soak_", dir=memory if in_memory else None, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
