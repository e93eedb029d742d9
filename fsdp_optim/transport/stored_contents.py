"""The contents that ranks bring to a meeting: short ones travel with the statements, and others have keys of their own."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.stored_verdict import (
    Blob,
    LongContents,
    Runs,
    StatedContent,
    StoredVerdict,
    TreeSummary,
    ranks_in,
    runs_of,
)

_PART_NBYTES = 4 << 20  # bytes of a content in one value of the store
_SHORT_NBYTES = 16 << 10  # bytes of contents that travel with the statements, and come with the verdict


@dataclass
class Contents:
    """What one rank has put into the store: its own content, or the contents of all ranks below it and its own.

    Attributes:
        written: the keys, each with the number of its meeting, in ascending order.
    """

    written: list[tuple[int, str]] = field(default_factory=list)

    def without_long(self, summary: TreeSummary, rank: int, put: Callable[[int, bytes], None]) -> TreeSummary:
        """Return what `rank` tells in place of a summary with too long contents. `put` writes a numbered part of them."""
        if summary.content_nbytes <= _SHORT_NBYTES:
            return summary
        if [content.runs for content in summary.contents] == [((rank, rank),)]:
            num_parts = _put(base64.b64decode(summary.contents[0].base64), put)
            own = LongContents(num_parts, ((rank, rank),))
            return msgspec.structs.replace(summary, contents=(), long_contents=(*summary.long_contents, own))
        runs = runs_of(each for content in summary.contents for each in ranks_in(content.runs))
        blob = Blob(rank, _put(_packed(summary.contents), put), runs)
        return msgspec.structs.replace(summary, contents=(), blobs=(*summary.blobs, blob))

    def forget(self, number: int, store: JobStore) -> None:
        """Delete the keys of the meetings before this number."""
        while self.written and self.written[0][0] < number:
            store.delete_key(self.written[0][1])
            self.written.pop(0)


def reader(verdict: StoredVerdict, read: Callable[[int, int], bytes]) -> Callable[[int], bytes]:
    """Return a function that gives the content of a rank. `read(rank, part)`: what a rank has put into the store."""
    contents: dict[int, bytes] = {}

    def content_of(rank: int) -> bytes:
        if rank in contents:
            return contents[rank]
        for content in verdict.contents:
            if _has(content.runs, rank):
                contents.update(dict.fromkeys(ranks_in(content.runs), base64.b64decode(content.base64)))
                return contents[rank]
        for own in verdict.long_contents:
            if _has(own.runs, rank):
                return b"".join(read(rank, part) for part in range(own.num_parts))
        for blob in verdict.blobs:
            if _has(blob.runs, rank):
                contents.update(_unpacked(b"".join(read(blob.writer, part) for part in range(blob.num_parts))))
                return contents[rank]
        return b""

    return content_of


def _has(runs: Runs, rank: int) -> bool:
    return any(first <= rank <= last for first, last in runs)


def _put(content: bytes, put: Callable[[int, bytes], None]) -> int:
    """Put bytes into the store; return the number of parts."""
    parts = range(0, len(content), _PART_NBYTES)
    for part, first in enumerate(parts):
        put(part, content[first : first + _PART_NBYTES])
    return len(parts)


def _packed(contents: Sequence[StatedContent]) -> bytes:
    """Return contents as the bytes of a blob."""
    return msgspec.msgpack.encode([(base64.b64decode(content.base64), content.runs) for content in contents])


def _unpacked(blob: bytes) -> dict[int, bytes]:
    """Return the contents of a blob by rank."""
    contents = msgspec.msgpack.decode(blob, type=list[tuple[bytes, Runs]])
    return {rank: content for content, runs in contents for rank in ranks_in(runs)}
