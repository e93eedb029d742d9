"""The error of one rank, kept until all ranks meet, so that no rank waits for a rank that has stopped."""

from __future__ import annotations

from typing import TypeGuard

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What a signal handler or a notebook raises on one rank."""

RANK_ERRORS = (Exception, *INTERRUPTS)
"""What ends a call on one rank, so that the other ranks must be told."""


def is_interrupt(error: BaseException | None) -> TypeGuard[KeyboardInterrupt | SystemExit]:
    """Whether this is an interrupt of this rank, which is raised as it is, while the other ranks hear of it as of an error."""
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
        """`with failure:` notes an error of its block and goes on after the block; an error of all ranks is not caught."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, RANK_ERRORS) or getattr(error, "on_all_ranks", False):
            return False
        self.note(error)
        return True
