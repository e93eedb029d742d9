"""The error of one rank, kept until all ranks meet, so that no rank waits for a rank that has stopped."""

from __future__ import annotations

from fsdp_optim.errors import FsdpOptimError


class Failure:
    """The first error of this rank in a step that all ranks take. `fatal`: the error broke the connection to another rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fatal = False

    def note(self, error: Exception, *, fatal: bool = False) -> None:
        self.error = self.error or error
        self.fatal = self.fatal or fatal

    def __enter__(self) -> None:
        """`with failure:` notes an error of its block and goes on after the block; an error of all ranks is not caught."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or (isinstance(error, FsdpOptimError) and error.on_all_ranks):
            return False
        self.note(error)
        return True
