"""The statements of ranks in a meeting, and its verdict, in the forms in which the rendezvous store has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from fsdp_optim.errors import RankError
from fsdp_optim.transport.verdict import Reason, at_another_step
from fsdp_optim.wire import decode


class StepNote(Struct, array_like=True, frozen=True, tag="step"):
    """The step of a rank, and the digest of its compared bytes; both are empty for a rank with an error."""

    rank: int
    step: str
    digest: str


class ContentNote(Struct, array_like=True, frozen=True, tag="content"):
    """The content of a rank: in base64, or in a number of parts that have keys of their own."""

    rank: int
    num_parts: int
    short: str


class WaitingPlace(Struct, array_like=True, frozen=True):
    """Where a rank waits for others: a meeting, the ranks of it, the step, and the error that the rank has brought to it.

    `is_alone`: as in `RankGroup`.
    """

    prefix: str
    number: int
    ranks: tuple[int, ...]
    step: str
    reason: str
    is_alone: bool


class StoredVerdict(Struct, array_like=True, frozen=True):
    """A verdict in the form that is put into the store.

    Attributes:
        all_equal, reasons, missing, text, is_early: as in `Verdict`.
        is_complete: all ranks had come when the verdict was made.
        contents: where the content of each rank is.
        num_errors: the number of errors in the store.
    """

    all_equal: bool = False
    is_complete: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_early: bool = False
    contents: tuple[ContentNote, ...] = ()
    num_errors: int = 0


_ANY_NOTE: Any = StepNote | ContentNote


@dataclass
class Notes:
    """The notes of ranks, in the order in which they came: lines of one value in the store, to which each rank appends.

    Attributes:
        steps: one note of each rank.
        contents: the notes of the ranks that have a content.
    """

    steps: list[StepNote] = field(default_factory=list)
    contents: list[ContentNote] = field(default_factory=list)

    @classmethod
    def decoded(cls, lines: bytes) -> Notes:
        """Return the notes of a value to which each rank has appended lines."""
        notes = cls()
        for line in lines.splitlines():
            note: StepNote | ContentNote = decode(_ANY_NOTE, line)
            if isinstance(note, StepNote):
                notes.steps.append(note)
            else:
                notes.contents.append(note)
        return notes

    @property
    def are_all_equal(self) -> bool:
        """Whether the compared bytes are equal on all ranks."""
        return len({note.digest for note in self.steps}) == 1

    def at_other_steps(self) -> list[Reason]:
        """Return the errors of the ranks that are at another step than the first rank that came without an error."""
        stated = [(note.rank, note.step) for note in self.steps if note.digest]
        return [
            Reason(rank, RankError.__name__, at_another_step(step, *stated[0]))
            for rank, step in stated
            if step != stated[0][1]
        ]
