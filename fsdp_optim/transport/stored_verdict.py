"""What ranks state in a meeting, and its verdict, in the forms in which the rendezvous store has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from fsdp_optim.errors import RankError
from fsdp_optim.transport.verdict import Reason, at_another_step

STEP, CONTENT = "step", "content"
"""The two kinds of notes."""


def note_line(kind: str, rank: int, one: object, two: object) -> str:
    """One note of a rank: `STEP` with its step and digest, or `CONTENT` with the number of parts and the content in base64."""
    return json.dumps([kind, rank, one, two]) + "\n"


@dataclass(frozen=True)
class StoredVerdict:
    """A verdict in the form that is put into the store.

    Attributes:
        all_equal, reasons, missing, text, is_early: as in `Verdict`.
        whole: all ranks had come when the verdict was made.
        contents: (rank, number of parts of the rank's content in the store, the content itself in base64 where there are none).
        num_errors: the number of errors in the store.
    """

    all_equal: bool = False
    whole: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_early: bool = False
    contents: tuple[tuple[int, int, str], ...] = ()
    num_errors: int = 0

    def encoded(self) -> str:
        """The verdict as JSON."""
        fields = (self.reasons, self.missing, self.text, self.is_early, self.contents, self.num_errors)
        return json.dumps([self.all_equal, self.whole, *fields])

    @classmethod
    def decoded(cls, encoded: bytes) -> StoredVerdict:
        """The inverse of `encoded`."""
        all_equal, whole, reasons, missing, text, is_early, contents, num_errors = json.loads(encoded)
        named = tuple((rank, name, message) for rank, name, message in reasons)
        found = tuple((rank, num_parts, short) for rank, num_parts, short in contents)
        return cls(all_equal, whole, named, tuple(missing), text, is_early, found, num_errors)


@dataclass
class Notes:
    """What ranks have stated, in the order in which they came: lines of one value in the store, to which each rank appends.

    Attributes:
        steps: (rank, step, digest of what it compares); for a rank with an error, the last two are empty.
        contents: as in `StoredVerdict`.
    """

    steps: list[tuple[int, str, str]] = field(default_factory=list)
    contents: list[tuple[int, int, str]] = field(default_factory=list)

    @classmethod
    def decoded(cls, lines: bytes) -> Notes:
        """Lines of `note_line`."""
        notes = cls()
        for line in lines.splitlines():
            kind, rank, one, two = json.loads(line)
            (notes.steps if kind == STEP else notes.contents).append((rank, one, two))
        return notes

    @property
    def are_alike(self) -> bool:
        """Whether all ranks compare the same."""
        return len({digest for _, _, digest in self.steps}) == 1

    def at_other_steps(self) -> list[Reason]:
        """The errors of the ranks that are at another step than the first one that came without an error."""
        stated = [(rank, step) for rank, step, digest in self.steps if digest]
        return [
            (rank, RankError.__name__, at_another_step(step, *stated[0]))
            for rank, step in stated
            if step != stated[0][1]
        ]
