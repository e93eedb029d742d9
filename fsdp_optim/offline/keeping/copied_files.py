"""The files of a checkpoint of this library as a copy reads them: in units of bytes that are compared with their checksums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.formats.base.checksums import hash_of, sums_of
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.formats.own.probe import PROBE
from fsdp_optim.formats.own.reader import Checkpoint
from fsdp_optim.storage.base import Opened, check_name


@dataclass(frozen=True)
class CopiedUnit:
    """The bytes [start, stop) of a file, at most a unit. `segments`: their hashes, each with its end in the file; () if none."""

    name: str
    start: int
    stop: int
    segments: tuple[tuple[int, int], ...] = ()

    def check(self, where: str, data: memoryview) -> None:
        """Raise CheckpointError unless the bytes have their checksums."""
        begin = self.start
        for end, wanted in self.segments:
            if hash_of(data[begin - self.start : end - self.start]) != wanted:
                raise CheckpointError(
                    f"{where}/{self.name}: bytes [{begin}, {end}) are not those that were saved: the file was damaged; copy "
                    "another checkpoint"
                )
            begin = end


@dataclass(frozen=True)
class CopiedFile:
    """A large file: its size, the verified bytes that it begins with, and the units of the rest."""

    name: str
    nbytes: int
    head: bytes
    units: tuple[CopiedUnit, ...]


def large_files(checkpoint: Checkpoint, unit_nbytes: int) -> Iterator[CopiedFile]:
    """Yield the files with tensors. Their headers have been compared with the manifest when the checkpoint was opened."""
    for name, stored in checkpoint.files.items():
        size, table = checkpoint.manifest.files[name].nbytes, stored.table(checkpoint.opened)
        if table is None:
            units = tuple(_plain_units(name, stored.offset, size, unit_nbytes))
        else:
            ends = (table.ends + stored.offset).tolist()
            segments = list(zip(ends, table.hashes.tolist(), strict=True))
            units = tuple(_checked_units(name, stored.offset, segments, unit_nbytes))
        yield CopiedFile(name, size, checkpoint.opened.read(name, 0, stored.offset), units)


def _plain_units(name: str, start: int, stop: int, unit_nbytes: int) -> Iterator[CopiedUnit]:
    for begin in range(start, stop, unit_nbytes):
        yield CopiedUnit(name, begin, min(begin + unit_nbytes, stop))


def _checked_units(name: str, start: int, segments: list[tuple[int, int]], unit_nbytes: int) -> Iterator[CopiedUnit]:
    """Yield units of complete segments. A segment is never longer than a unit."""
    held: list[tuple[int, int]] = []
    for end, wanted in segments:
        if held and end - start > unit_nbytes:
            yield CopiedUnit(name, start, held[-1][0], tuple(held))
            start, held = held[-1][0], []
        held.append((end, wanted))
    if held:
        yield CopiedUnit(name, start, held[-1][0], tuple(held))


def small_files(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Yield all other files of the checkpoint but the manifest, compared with their checksums."""
    opened = checkpoint.opened
    for name, info in checkpoint.manifest.files.items():
        if name not in checkpoint.files:
            is_values = name.startswith("extra/")
            yield name, checkpoint.small_file(name) if is_values else opened.read_whole(name, info.nbytes)
        elif info.sums is not None:
            yield sums_of(name), opened.read_whole(sums_of(name))


def files_beside(files: Opened, checkpoint: Checkpoint, *, in_folder: bool) -> tuple[list[str], list[str]]:
    """Return the names of files that no save has written, such as a tokenizer's: those that a copy can have, and the others.

    `in_folder`: the place is a folder. Elsewhere the stores' own objects are in folders, so that only names without one count.
    """
    is_own = PROBE.is_own(checkpoint.opened)
    strangers = [name for name in files.names() if name != NAME and not is_own(name) and (in_folder or "/" not in name)]
    copied = [name for name in strangers if _is_name(name)]
    return copied, [name for name in strangers if name not in copied]


def _is_name(name: str) -> bool:
    try:
        check_name("", name)
    except CheckpointError:
        return False
    return True


def opened_source(opened: Opened) -> Checkpoint:
    """Open the checkpoint that is copied, with all its checksums. Raises CheckpointError for one of another format."""
    if not opened.has(NAME):
        raise wrong_use(
            f"{opened.where}: has no {NAME}: copy takes complete checkpoints of this library; convert reads every format"
        )
    return Checkpoint.opened_in(opened, verify=True)
