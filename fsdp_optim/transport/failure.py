"""The error of one rank, kept until all ranks meet, so that no rank waits for a rank that has stopped."""

from __future__ import annotations

from typing import TypeGuard

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Exceptions that a signal handler or a notebook raises on one rank."""

RANK_ERRORS = (Exception, *INTERRUPTS)
"""Errors that end a call on one rank, so that the other ranks must learn of them."""


def is_interrupt(error: BaseException | None) -> TypeGuard[KeyboardInterrupt | SystemExit]:
    """Return whether this is an interrupt of this rank. It is raised unchanged here; the other ranks get it as an error."""
    return isinstance(error, INTERRUPTS)


class Failure:
    """The first error of this rank in a step that all ranks take. `fatal`: the error broke the connection to another rank."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.fatal = False

    def note(self, error: BaseException, *, fatal: bool = False) -> None:
        self.error = self.error or error
        self.fatal = self.fatal or fatal

    def __enter__(self) -> None:
        """Note an error of the block and continue after the block; an error of all ranks is not caught."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is None or not isinstance(error, RANK_ERRORS) or getattr(error, "on_all_ranks", False):
            return False
        self.note(error)
        return True
