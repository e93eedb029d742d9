"""The protocols of a storage that keeps checkpoints, one screen each.

A `Store` is one place for one checkpoint, which consists of named files: `model.safetensors`, `extra/common.safetensors`.

Reading, on any process:

    with store.open() as opened:                 # the checkpoint that is there now, even if another one replaces it meanwhile
        opened.size_of(name)
        opened.read_into(name, pieces, offset)   # as often as needed, into memory of the caller

Writing. One process leads. It sends `staging.address`, a string, to the other processes:

    staging = store.begin(overwrite=..., durable=...)           # the leader
    staging.create(name, nbytes, head)                          # files that several processes write, if `Capabilities` allow that
    writer = store.join(staging.address, ...)                   # every process, including the leader
    writer.create(name, nbytes, head)                           # files that only this process writes
    writer.write(name, pieces, offset)                          # as often as needed
    writer.put(name, data)                                      # small whole files, each by one process
    receipt = writer.finish()                                   # or writer.discard(), after a failure
    staging.seal(names, receipts)                               # the leader, when all have finished: completes the files `names`
    staging.put(name, data)                                     # files that depend on the others: checksums, an index
    staging.commit(name, manifest)                              # makes the files a checkpoint, atomically; or staging.abandon()

`open` sees none of these files before `commit` returns, and the previous checkpoint stays whole until then. Every failure is a
CheckpointError that names the place.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeGuard, TypeVar

from fsdp_optim.errors import CheckpointError, causes_of

_NAME = re.compile(r"(extra/)?[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")

MOST_DEPTH = 3
"""The number of folders above a file in a place of any content."""

MOST_FILES = 1_000_000
"""The number of files that a listing of a place of any content may have."""

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The error numbers that mean a missing file. ELOOP: the name is a symbolic link, and a checkpoint has none."""


class Undecided(Exception):
    """The cause of an error that does not show whether a file is missing or damaged."""


def is_sure_that_not(error: BaseException) -> bool:
    """Whether an error proves that a checkpoint is missing or damaged. False: the checkpoint may be whole, but unreadable now."""
    return not any(
        isinstance(cause, (MemoryError, Undecided))
        or (isinstance(cause, OSError) and cause.errno is not None and cause.errno not in NOT_THERE)
        for cause in causes_of(error)
    )


def check_name(where: str, name: object) -> str:
    """Return a file name that stays inside its checkpoint: no folder but `extra`, no `..`, nothing absolute.

    Raises CheckpointError for any other name. `where`: the place that gave the name, for the error.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: names the file {name!r}, which is not one of a checkpoint's own")
    return name


def check_inside(where: str, name: object) -> str:
    """Return a file name of any format that stays inside its place: relative, with "/" between folders, and without `..`.

    Raises CheckpointError for any other name. `where`: the place that gave the name, for the error.
    """
    parts = name.split("/") if isinstance(name, str) and "\0" not in name else [""]
    if any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{where}: names the file {name!r}, which is not inside the checkpoint")
    return str(name)


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a store, by which a save chooses how the ranks write.

    Attributes:
        writes_ranges: whether several processes can write ranges of one file at the same time: from every machine, from one
            machine only, in whole parts ("parts": each of the file's equal parts by one process), or not at all. Without that
            ability each file is written by one process.
        renames: whether a checkpoint gets its name by one rename. False: its manifest is put last.
        part_nbytes: the size of the equal parts in which the store uploads a file, in bytes. 0: the store writes any range.
        most_parts: the highest number of parts of a file; 0: any number. The parts of a large file are larger for it.
    """

    writes_ranges: Literal["anywhere", "on one machine", "parts", "no"] = "anywhere"
    renames: bool = True
    part_nbytes: int = 0
    most_parts: int = 0

    def part_nbytes_of(self, nbytes: int) -> int:
        """The size of the parts of a file of `nbytes` bytes: `part_nbytes`, doubled until the parts are few enough."""
        size = self.part_nbytes
        while self.most_parts and size * self.most_parts < nbytes:
            size *= 2
        return size


class Store(Protocol):
    """One place for one checkpoint. `where`: the name of the place, for errors and for comparing places."""

    @property
    def where(self) -> str: ...

    def open(self) -> Opened:
        """Open the checkpoint that is there now. Raises CheckpointError where there is none."""

    def open_any(self) -> Opened:
        """Open the files that are there now, whoever wrote them. Symbolic links are followed, and a file's name may be any path
        inside the place. Where the place is one file, or the common beginning of the names of files, `selected` names it.

        Raises CheckpointError where there is nothing.
        """
        raise CheckpointError(f"{self.where}: this store opens no files of other libraries")

    def begin(self, *, overwrite: bool, durable: bool, token: str | None = None) -> Staging:
        """Begin a save, and remove the leftovers of saves that died.

        Raises CheckpointError where something is there, unless `overwrite` is True, and where nothing can be written.
        `durable`: `commit` returns only when the checkpoint survives a power cut. `token`: 16 hexadecimal digits at the end of
        the token that the manifest has, where the manifest was made for another place; None: a new one.
        """

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> StoreWriter:
        """Take part in a save that another process has begun.

        `who`: the name of this process, for errors. `budget_nbytes`: memory for bytes on their way to a store that takes parts;
        one part is held in any case.
        """

    def completion(self, address: str, rank: int, ranks: Sequence[int], timeout: float) -> Completion:
        """The means by which processes learn how a background save ends. `ranks`: the processes by number, the leader first."""

    def machine_id(self) -> str:
        """A string that is equal on processes that can share a file where `writes_ranges` is "on one machine"."""

    def shelf(self) -> Shelf[Any]:
        """The folder, or the prefix, that this place and its siblings are in."""

    def siblings(self) -> Iterator[Opened]:
        """All possible checkpoints in the same folder or under the same prefix, including this one. The caller closes each."""


class Opened(Protocol):
    """The files of one checkpoint, as they were when it was opened.

    A read fails where the store cannot serve those files any more; it never returns bytes of another checkpoint.
    """

    request_nbytes: int = 0
    """Fewer bytes than this cost more as a request of their own than as a message from a rank that reads their neighbours."""

    num_requests: int = 1
    """How many `read_into` are best under way at the same time."""

    is_any: bool = False
    """Whether `Store.open_any` opened the files."""

    selected: str = ""
    """The name of the only file that was asked for, or the name that files such as `<name>-shard0.pt` have in common; else ""."""

    @property
    def where(self) -> str: ...

    def has(self, name: str) -> bool:
        """Whether a file or anything else has this name. True where the store cannot tell."""

    def names(self) -> list[str]:
        """The names of all files, sorted, with "/" between folders. Only for `Store.open_any`. Raises CheckpointError."""
        raise CheckpointError(f"{self.where}: cannot be listed")

    def versions(self) -> list[tuple[str, tuple[object, ...] | None]]:
        """The names of all files, each with its `version_of` as of now or of the listing."""
        return [(name, self.version_of(name)) for name in self.names()]

    def version_of(self, name: str) -> tuple[object, ...] | None:
        """A value that changes when the file is written again. None: the file is gone."""

    def size_of(self, name: str) -> int:
        """The size of a file in bytes. Raises CheckpointError where the file is missing, or is not a regular file."""

    def nbytes_of(self, name: str) -> int:
        """The size of a file in bytes, without opening the file; -1 for anything but a regular file. Raises OSError."""

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill pieces of memory, one after the other, from a file from byte `offset` on."""

    def was_replaced(self) -> bool:
        """Whether another checkpoint has taken the place since this one was opened."""

    def close(self) -> None:
        """Release the files. Raises nothing."""

    def named(self, name: str) -> str:
        """The name of a file in words for users: the place and the file."""
        return f"{self.where}/{name}"

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes of a file, from byte `start` on."""
        try:
            data = bytearray(nbytes)
        except MemoryError as error:
            raise CheckpointError(f"{self.named(name)}: {nbytes} bytes do not fit into memory") from error
        self.read_into(name, [memoryview(data)], start)
        return bytes(data)

    def read_whole(self, name: str, nbytes: int | None = None, *, most_nbytes: int | None = None) -> bytes:
        """The content of a small file. Raises CheckpointError unless its size is `nbytes`, and at most `most_nbytes`."""
        size = self.size_of(name)
        if nbytes is not None and size != nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, {nbytes} were saved")
        if most_nbytes is not None and size > most_nbytes:
            raise CheckpointError(f"{self.named(name)}: has {size} bytes, and at most {most_nbytes} are allowed")
        return self.read(name, 0, size)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Staging(Protocol):
    """A save under way, as the process that leads it sees it."""

    @property
    def address(self) -> str:
        """The string with which the other processes join. Final only after `create` of the files that several processes write."""

    @property
    def token(self) -> str:
        """A string that no other save has."""

    @property
    def inner_folder(self) -> str:
        """The folder, with a slash at its end, that has all files but the manifest; "" where they are beside it."""
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store in this place."""

    @property
    def replaces(self) -> bool:
        """Whether `commit` removes an earlier checkpoint."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Create a file of `nbytes` bytes that begins with `head`. Several processes write ranges of the file."""

    def seal(self, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
        """Complete the files `names`, which were written in ranges. `receipts`: the results of `finish` of all processes."""

    def put(self, name: str, data: bytes, *, durable: bool) -> None:
        """Write a small whole file."""

    def commit(self, manifest: str, data: bytes, *, durable: bool) -> None:
        """Write the manifest, and make this save the checkpoint. Raises CheckpointError where another save was faster."""

    def abandon(self, *, late: bool = False) -> None:
        """Remove the files of this save, after a failure. Raises nothing.

        `late`: another process of this save may still write; a later save to the place removes what it writes.
        """


class StoreWriter(Protocol):
    """The access of one process to a save under way."""

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        """Create a file of `nbytes` bytes that begins with `head`. Only this process writes the rest of the file."""

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        """Write pieces of memory, one after the other, to a file from byte `offset` on. Each byte is written once."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small whole file."""

    def finish(self) -> bytes:
        """Return, with a receipt for `seal`, when all writes are complete, and on the disk if the save is durable."""

    def discard(self) -> None:
        """Release all files, after a failure. Raises nothing."""


UNTIL_COMMIT = "resume."
"""The beginning of the names of files that are needed to go on with a save, and that `commit` removes."""


class ResumableStaging(Staging, Protocol):
    """A save under way that another process can go on with after this one was killed."""

    def keep(self, note: str) -> None:
        """Keep the save for `ResumableStore.resume` with the same note, from now on until `commit` or `abandon`."""

    def leave(self) -> None:
        """Release the save without removing its files, so that `resume` finds them. Raises nothing."""

    def names(self) -> list[str]:
        """The names of the files that are there."""

    def drop(self, names: Sequence[str]) -> None:
        """Remove files."""


class ResumableStore(Store, Protocol):
    """A store in which a save can go on after it was killed."""

    def resume(self, note: str, *, overwrite: bool) -> ResumableStaging | None:
        """Take over the save to this place that was kept with this note and that nobody goes on with; None if there is none.

        Raises CheckpointError as `begin` does.
        """

    def staged(self, address: str) -> Opened:
        """The files of a save under way as they are now, for all its processes."""


def is_resumable(store: Store) -> TypeGuard[ResumableStore]:
    """Whether saves in a store can go on after they were killed, and the store gives back what they have written."""
    return hasattr(store, "staged")


def can_be_left(staging: Staging) -> TypeGuard[ResumableStaging]:
    """Whether another process can go on with a save."""
    return hasattr(staging, "leave")


class PartsStaging(Staging, Protocol):
    """A save under way in parts that another process can go on with after this one was killed."""

    def keep_parts(self, note: str) -> None:
        """Keep the save for `PartsStore.resume` with the same note, from now on until `commit` or `abandon`."""

    def leave_parts(self) -> None:
        """Release the save without removing its parts, so that `resume` finds them. Raises nothing."""

    def has_parts_of(self, files: Mapping[str, int], part_nbytes: Mapping[str, int]) -> bool:
        """Whether the save has these files, of these sizes, in parts of these sizes."""


class PartsWriter(StoreWriter, Protocol):
    """The access of one process to a save in parts, some of which may have been put by a process that was killed."""

    def note_part(self, name: str, number: int, data: bytes) -> None:
        """Note a part that this process has written, as soon as the store has it. `data`: for `PartsStore.noted`."""

    def adopt_part(self, name: str, number: int, receipt: str) -> None:
        """Count a part that a killed process has put as put by this one."""


class PartsStore(Store, Protocol):
    """A store in which a save can go on after it was killed, though the store does not give back its parts before the commit."""

    def resume(self, note: str, *, overwrite: bool) -> PartsStaging | None:
        """Take over the save to this place that was kept with this note and that nobody goes on with; None if there is none.

        Raises CheckpointError as `begin` does.
        """

    def noted(self, address: str) -> Mapping[tuple[str, int], tuple[str, bytes]]:
        """The parts that were noted, by file and number: the receipt of each, and what was noted of it."""


def resumes_parts(store: Store) -> TypeGuard[PartsStore]:
    """Whether saves in a store can go on after they were killed, by notes of the parts that the store has."""
    return hasattr(store, "noted")


def keeps_parts(staging: Staging) -> TypeGuard[PartsStaging]:
    """Whether another process can go on with a save in parts."""
    return hasattr(staging, "keep_parts")


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


class BriefLike(Protocol):
    """The summary of a manifest, as a store needs it. `order` sorts the checkpoints of one place by age, the oldest first."""

    @property
    def order(self) -> tuple[int, int, int, str]: ...


BriefT = TypeVar("BriefT", bound=BriefLike)


@dataclass(frozen=True)
class Standing(Generic[BriefT]):
    """The state of a place: a complete checkpoint, surely none, or undecided.

    Attributes:
        brief: the summary of a complete checkpoint; None where the place has none, or is undecided.
        has_manifest: whether the place has a manifest, or could not be asked; False also where this user has no access to it.
        is_sure: False where the place may have a complete checkpoint, but could not be read just now, or not by this version.
        has_moved: whether the checkpoint went away, or another one took its name, during the look.
        reason: why the checkpoint is not complete, or is undecided.
        partial: the summary of a checkpoint that is not complete, or is undecided, where the summary could be read.
    """

    brief: BriefT | None = None
    has_manifest: bool = True
    is_sure: bool = True
    has_moved: bool = False
    reason: str = ""
    partial: BriefT | None = None

    @property
    def is_complete(self) -> bool:
        return self.brief is not None


@dataclass(frozen=True)
class Shelved(Generic[BriefT]):
    """A complete checkpoint on a shelf, as far as the beginning of its manifest shows.

    Attributes:
        where: its place now: the path or the URL from which it is loaded.
        base: the place for which it was saved, which is another one where a save was killed between two renames.
        can_go: False where `remove` would not remove the checkpoint itself, as of a symbolic link.
    """

    where: str
    base: str
    brief: BriefT
    can_go: bool = True


@dataclass(frozen=True)
class Listed(Generic[BriefT]):
    """A place on a shelf that has a manifest, complete or not. `where`, `base`, `can_go`: as for `Shelved`."""

    where: str
    base: str
    standing: Standing[BriefT]
    can_go: bool = True

    @property
    def brief(self) -> BriefT | None:
        """The summary, also of a checkpoint that is not complete; None where it cannot be read."""
        return self.standing.brief or self.standing.partial

    @classmethod
    def of_shelved(cls, one: Shelved[BriefT]) -> Listed[BriefT]:
        return cls(one.where, one.base, Standing(one.brief), one.can_go)


class Shelf(Protocol[BriefT]):
    """All checkpoints of one folder, or under one prefix. `where`: its name, for errors."""

    @property
    def where(self) -> str: ...

    def complete(self) -> tuple[list[Shelved[BriefT]], list[str]]:
        """The complete checkpoints, the oldest first, and why others that have a manifest could not be read just now.

        Raises CheckpointError where the shelf cannot be listed.
        """

    def listed(self) -> list[Listed[BriefT]]:
        """All places with a manifest, in no order, damaged checkpoints included where the shelf can tell.

        Raises CheckpointError where the shelf cannot be listed.
        """
        return [Listed.of_shelved(one) for one in self.complete()[0]]

    def standing_of(self, one: Shelved[BriefT] | Listed[BriefT]) -> Standing[BriefT]:
        """The state of a checkpoint by the whole of its manifest."""

    def remove(self, ones: Sequence[Shelved[BriefT] | Listed[BriefT]], reason: str) -> None:
        """Remove checkpoints. Each removal is logged with the reason; what cannot be removed is warned about."""


class Judge(Protocol[BriefT]):
    """The questions that a store asks a format before it removes or replaces anything.

    `manifest`: the name of the file whose presence makes a place a checkpoint. `others`: the manifests of other formats in which
    checkpoints may be beside those of this format, or in their place.
    """

    manifest: str
    others: tuple[str, ...] = ()

    def standing_in(self, opened: Opened, *, whole: bool) -> Standing[BriefT]:
        """Whether the checkpoint is complete. `whole`: verify the whole manifest, not only its beginning."""

    def token_in(self, opened: Opened) -> str | None:
        """The token of the save that wrote the checkpoint; None where the token cannot be read."""

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """A function that says whether a file of a given name was written by a save. `opened` None: the place cannot be opened.

        Where the manifest cannot be read, every name that a save could give counts as written by a save.
        """
