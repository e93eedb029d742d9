"""What a storage has to offer so that a checkpoint can be kept in it: protocols of one screen each.

A `Store` is one place for one checkpoint. Bytes have names in it: `model.safetensors`, `extra/common.safetensors`.

Reading, on any process:

    with store.open() as opened:                 # what is there now, whatever takes its place meanwhile
        opened.size_of(name)
        opened.read_into(name, pieces, offset)   # as often as needed, into memory that is there

Writing. One process leads; the others are given `staging.address`, a word, by whatever way they have:

    staging = store.begin(overwrite=..., durable=...)           # the leader
    staging.create(name, nbytes, head)                          # files that several processes write, where `Can` allows that
    writer = store.join(staging.address, ...)                   # every process, the leader too
    writer.create(name, nbytes, head)                           # files that this process alone writes
    writer.write(name, pieces, offset)                          # as often as needed
    writer.put(name, data)                                      # small files, whole, by one process each
    receipt = writer.finish()                                   # or writer.discard(), after a failure
    staging.seal(names, receipts)                               # the leader, when all have finished: `names` are whole now
    staging.put(name, data)                                     # what is known only now: checksums, an index
    staging.commit(name, manifest)                              # makes it the checkpoint, all at once; or staging.abandon()

Nothing of it is to be seen by `open` before `commit` returns, and what was there before is whole until then. Everything that goes
wrong is a CheckpointError that names the place.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Literal, Protocol, TypeVar

from fsdp_optim.errors import CheckpointError, causes_of

_NAME = re.compile(r"(extra/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What a store says of a name that it does not have; ELOOP: a link leads out of a checkpoint, which has none."""


class Undecided(Exception):
    """The cause of an error that shows neither that something is missing nor that it is damaged."""


def is_sure_that_not(error: BaseException) -> bool:
    """Whether what went wrong shows that something is missing or damaged; False: it may be whole, but could not be read."""
    return not any(
        isinstance(cause, (MemoryError, Undecided))
        or (isinstance(cause, OSError) and cause.errno is not None and cause.errno not in NOT_THERE)
        for cause in causes_of(error)
    )


def check_name(where: str, name: object) -> str:
    """A file name that stays inside its checkpoint: no folders but `extra`, no `..`, nothing absolute."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: names the file {name!r}, which is not one of a checkpoint's own")
    return name


@dataclass(frozen=True)
class Can:
    """What a store can do.

    Attributes:
        writes_ranges: from where several processes can write ranges of one file at the same time: from every machine, from one
            machine, or not at all. Then each file is written by one process.
        renames: whether a checkpoint gets its name by one rename; else its manifest is put last.
        part_nbytes: how many bytes one request of a store carries that takes files in equal parts; 0: any range is as good.
    """

    writes_ranges: Literal["anywhere", "on one machine", "no"] = "anywhere"
    renames: bool = True
    part_nbytes: int = 0


class Store(Protocol):
    """One place for one checkpoint. `where`: its name, for errors and for comparing places."""

    @property
    def where(self) -> str: ...

    def open(self) -> Opened:
        """Open the checkpoint that is there now. Raises CheckpointError where there is none."""

    def begin(self, *, overwrite: bool, durable: bool) -> Staging:
        """Begin to save. Raises CheckpointError where something is there, unless `overwrite`, and where nothing can be written.

        What saves that died have left is removed. `durable`: `commit` returns when nothing can be lost any more.
        """

    def join(self, address: str, *, durable: bool, who: str) -> Writer:
        """Take part in a save that another process has begun. `who`: this process, for errors."""

    def completion(self, address: str, rank: int, ranks: Sequence[int], timeout: float) -> Completion:
        """A way to hear how a save ends that is written in the background. `ranks`: the processes by number, the leader first."""

    def machine(self) -> str:
        """A word that is equal on processes that write ranges of one file safely where `Can` says "on one machine"."""

    def beside(self) -> Iterator[Opened]:
        """Everything that may be a checkpoint in the same folder or under the same prefix, this place too. To be closed."""


class Opened(Protocol):
    """A checkpoint's files, as they were when it was opened, as long as that can be; a read that cannot be served fails."""

    @property
    def where(self) -> str: ...

    def has(self, name: str) -> bool:
        """Whether there is anything of this name. What cannot be told is there."""

    def version_of(self, name: str) -> tuple[object, ...] | None:
        """What differs when a file has been written again; None: it has gone."""

    def size_of(self, name: str) -> int:
        """The bytes of a file. Raises CheckpointError where it is missing, or is no file."""

    def nbytes_of(self, name: str) -> int:
        """As `size_of`, at a look: -1 of what is no file. Raises OSError as the store does."""

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill pieces of memory, one after the other, from a file's bytes at `offset`."""

    def was_replaced(self) -> bool:
        """Whether another checkpoint has taken the place since."""

    def close(self) -> None:
        """Let go of it. Nothing is raised."""

    def named(self, name: str) -> str:
        """A file's name as users know it."""
        return f"{self.where}/{name}"

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """Some bytes of a file."""
        try:
            data = bytearray(nbytes)
        except MemoryError as error:
            raise CheckpointError(f"{self.named(name)}: {nbytes} bytes do not fit into memory") from error
        self.read_into(name, [memoryview(data)], start)
        return bytes(data)

    def read_whole(self, name: str, nbytes: int | None = None, *, most_nbytes: int | None = None) -> bytes:
        """All of a small file; `nbytes`: what it has to have, `most_nbytes`: what it may have."""
        size = self.size_of(name)
        if nbytes is not None and size != nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, {nbytes} were saved")
        if most_nbytes is not None and size > most_nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, {most_nbytes} at most make sense")
        return self.read(name, 0, size)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Staging(Protocol):
    """A save under way, in the hands of the process that leads it."""

    @property
    def address(self) -> str:
        """What the others need to join. Where parts have to be announced, after `create` of what several write."""

    @property
    def token(self) -> str:
        """A word that no other save has."""

    @property
    def can(self) -> Can:
        """What can be done there."""

    @property
    def replaces(self) -> bool:
        """Whether something that was saved before goes when this is committed."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Make a file of `nbytes` bytes that begins with `head`. Several processes write ranges of it."""

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        """All processes have finished, with these receipts: files that were written in ranges are whole now."""

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        """Write a small file, whole."""

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        """Write the manifest, and make this the checkpoint. Raises CheckpointError where another save was faster."""

    def abandon(self) -> None:
        """Remove what was written, after a failure. Nothing is raised."""


class Writer(Protocol):
    """One process's hand in a save."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Make a file of `nbytes` bytes that begins with `head`. Only this process writes the rest."""

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Write pieces of memory, one after the other, to a file's bytes at `offset`. Every byte is written once."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, whole."""

    def finish(self) -> bytes:
        """Return when what this process wrote is there, and on the disk where it has to be; with what `seal` needs of it."""

    def discard(self) -> None:
        """Let go of everything, after a failure. Nothing is raised."""


class Completion(Protocol):
    """How processes that write a save in the background tell each other how it ends, by way of the store alone.

    completion = store.completion(address, rank, ranks, timeout)    # every process, while all are known to live
    completion.watch()                                              # when all have one
    completion.done(content)                                        # or completion.failed(why)
    contents = completion.wait_for_all()                            # the leader, before it commits
    completion.saved()                                              # or completion.not_saved(why)
    completion.wait_for_end(failed)                                 # the others
    completion.close()
    """

    def watch(self) -> None:
        """Begin to see whether the others live, where a store can show that."""

    def done(self, content: bytes) -> None:
        """This process has written its part; the leader gets `content`."""

    def failed(self, why: str) -> None:
        """This process cannot write its part. Nothing is raised."""

    def wait_for_all(self) -> list[bytes]:
        """What all processes gave to `done`, in their order. Raises CheckpointError with the reasons of those that failed, and
        names one that died; RankTimeoutError names one that has said nothing.
        """

    def saved(self) -> None:
        """The checkpoint is there. Nothing is raised."""

    def not_saved(self, why: str) -> None:
        """It never will be; returns when the others have heard of it, or cannot hear. Nothing is raised."""

    def wait_for_end(self, failed: str | None) -> None:
        """Return when the checkpoint is there; raise CheckpointError when it never will be. `failed`: why this process did."""

    def close(self) -> None:
        """Let go of it. Nothing is raised."""


class Record(Protocol):
    """What a manifest says in short. `order` sorts the checkpoints of one place by age, the oldest first."""

    @property
    def order(self) -> tuple[int, int, int, str]: ...


RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True)
class Standing(Generic[RecordT]):
    """What a place is, at a look.

    Attributes:
        brief: of a complete checkpoint; None where it is not one, or cannot be told.
        has_manifest: whether it has a manifest, or could not be asked; False also where this user may not look into it.
        is_sure: False where it could not be read just now, or not by this version, and may be a complete checkpoint.
        has_moved: it went away, or another one has its name, while it was looked at.
        reason: why it is not complete, or cannot be told.
    """

    brief: RecordT | None = None
    has_manifest: bool = True
    is_sure: bool = True
    has_moved: bool = False
    reason: str = ""

    @property
    def is_complete(self) -> bool:
        return self.brief is not None


class Judge(Protocol[RecordT]):
    """What a store has to ask the format of what lies in it, before it removes or replaces anything.

    `manifest`: the file that makes a checkpoint one.
    """

    manifest: str

    def standing_in(self, opened: Opened, *, whole: bool) -> Standing[RecordT]:
        """Whether it is complete. `whole`: all of the manifest is verified, not its beginning alone."""

    def token_in(self, opened: Opened) -> str | None:
        """The token of the save that wrote it; None where that cannot be read."""

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """Whether a save has written a file of some name. `opened` None: it cannot be opened.

        Where the manifest cannot be read, what has a name that a save gives is the save's.
        """
