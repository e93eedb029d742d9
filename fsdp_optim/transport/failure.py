"""What went wrong on one rank, kept until all ranks meet, so that no rank waits for one that has stopped."""

from __future__ import annotations

from fsdp_optim.errors import FsdpOptimError


class Failure:
    """The first error of this rank in a step that all ranks take. `fatal`: it broke the connection to another rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fatal = False

    def note(self, error: Exception, *, fatal: bool = False) -> None:
        self.error = self.error or error
        self.fatal = self.fatal or fatal

    def __enter__(self) -> None:
        """`with failure:` notes what its block raises and goes on after it; what all ranks raise alike is raised on."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or (isinstance(error, FsdpOptimError) and error.on_all_ranks):
            return False
        self.note(error)
        return True
