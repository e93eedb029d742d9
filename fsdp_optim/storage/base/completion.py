"""How processes that save in the background learn how the save ends."""

from __future__ import annotations

from typing import Protocol


class Completion(Protocol):
    """The means by which processes that save in the background learn how the save ends, through the store alone.

    completion = store.completion(address, rank, ranks, timeout)    # every process, while all are known to be alive
    completion.watch()                                              # when every process has its completion
    completion.done(content)                                        # or completion.failed(why)
    contents = completion.wait_for_all()                            # the leader, before it commits
    completion.saved()                                              # or completion.not_saved(why)
    completion.wait_for_end(failed)                                 # the others
    completion.close()
    """

    def watch(self) -> None:
        """Begin to observe whether the other processes are alive, if the store can show that."""

    def done(self, content: bytes) -> None:
        """Announce that this process has written its part. The leader gets `content`."""

    def failed(self, why: str) -> None:
        """Announce that this process cannot write its part. Raises nothing."""

    def wait_for_all(self) -> list[bytes]:
        """Wait for all processes, and return the contents that they gave to `done`, in the order of `ranks`.

        Raises CheckpointError with the reasons of the processes that failed or with the name of one that died;
        RankTimeoutError with the name of a process that announced nothing in time.
        """

    def saved(self) -> None:
        """Announce that the checkpoint is there. Raises nothing."""

    def not_saved(self, why: str) -> bool:
        """Announce that the save has failed; return when the other processes know it, or cannot be reached. Raises nothing.

        Returns whether all of them know it, so that none of them writes any more.
        """

    def wait_for_end(self, failed: str | None) -> None:
        """Return when the checkpoint is there; raise CheckpointError when the save has failed.

        `failed`: the reason why this process could not write its part; None if it could.
        """

    def close(self) -> None:
        """Release everything. Raises nothing."""
