"""The save that a process has under way in the background: the next one waits for it, and so does the process's end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from pathlib import Path

from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.errors import CheckpointError, RankTimeoutError, StateError


class SaveHandle:
    """A save that is being written in the background."""

    def __init__(self, path: Path, write: Callable[[], Saved]) -> None:
        self.path = path
        self._write: Callable[[], Saved] | None = write
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._told = False
        # A daemon, so that the interpreter gets to the place where it waits for it, and can raise what went wrong.
        self._thread = threading.Thread(target=self._run, name=f"fsdp_optim: {path.name}", daemon=True)

    def done(self) -> bool:
        """Whether it is over: the checkpoint is there, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is there. Raises what went wrong, on any rank; RankTimeoutError after `timeout` seconds."""
        self._thread.join(_seconds(timeout))
        if self._thread.is_alive():
            raise RankTimeoutError(f"{self.path}: is not written after {timeout:g} s; it goes on")
        self._told = True
        if self._error is not None:
            raise self._error
        if self._saved is None:
            raise CheckpointError(f"{self.path}: the save ended without a result")
        return self._saved

    def error(self) -> BaseException | None:
        """Wait; the error that nobody has been told yet."""
        self._thread.join()
        told, self._told = self._told, True
        return None if told else self._error

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._write is not None:
                self._saved = self._write()
        except BaseException as error:
            self._error = error
        finally:
            self._write = None  # and the copy of the state with it


def _seconds(timeout: object) -> float | None:
    """How long to wait; None: for as long as it takes."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and timeout >= 0:
        return min(timeout, threading.TIMEOUT_MAX)
    raise StateError(f"timeout has to be a number of seconds that is not negative, or None, not {timeout!r}")


class Pending:
    """At most one save that is under way."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._waits_at_exit = False

    def begin(self, handle: SaveHandle) -> None:
        """Start it. The one before has to be settled."""
        if not self._waits_at_exit:
            atexit.register(self.settle)
            self._waits_at_exit = True
        handle.start()
        self._handle = handle

    def settle(self) -> None:
        """Wait for the save under way, and raise what went wrong in it, if nobody has been told yet."""
        handle, self._handle = self._handle, None
        error = handle.error() if handle is not None else None
        if error is not None:
            raise error


pending = Pending()
"""Of this process: its threads and its end are the process's too, whichever model they save."""
