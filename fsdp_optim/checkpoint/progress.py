"""How far a save or a load is: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

_BAR_FROM = 256 << 20  # bytes; less is over before a bar can be read
_LINE_EVERY = 30.0  # seconds

log = logging.getLogger("fsdp_optim")


class Progress:
    """Shown on one rank, for work of `total` bytes. `wanted` None: where it is long enough, and as the place allows.

    `alone`: nothing else is shown meanwhile; beside a training that goes on there is a bar only where it is asked for.
    """

    def __init__(self, wanted: bool | None, what: str, total: int, *, shown: bool, alone: bool = True) -> None:
        on_terminal = alone and sys.stderr.isatty()
        visible = shown and wanted is not False and (wanted is True or total >= _BAR_FROM)
        self._what, self._total = what, total
        self._bar = (
            tqdm(total=total, desc=what, unit="B", unit_scale=True) if visible and (on_terminal or wanted) else None
        )
        self._logs = visible and self._bar is None
        self._told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def up_to(self, nbytes: int) -> None:
        """So much is done. The last hundredth is kept for `done`: what is moved may still turn out to be damaged."""
        self._show(min(nbytes, self._total * 99 // 100))

    def _show(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif self._logs and time.monotonic() - self._told > _LINE_EVERY:
            self._told = time.monotonic()
            log.info("%s: %d of %d bytes", self._what, done, self._total)

    def done(self) -> None:
        """All is done, and nothing went wrong."""
        self._show(self._total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
