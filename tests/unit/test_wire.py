"""Records that ranks send each other arrive as they were sent, whatever characters a message has; others are refused."""

from __future__ import annotations

import unittest

import msgspec
from parameterized import parameterized

from fsdp_optim.transport.stored_verdict import ContentNote, Notes, StepNote, StoredVerdict, WaitingPlace
from fsdp_optim.transport.verdict import Reason
from fsdp_optim.wire import decode, encode

REASONS = (Reason(0, "CheckpointError", "a\ncheckpoint"), Reason(3, "OSError", "no UTF-8: \udcff, \x00, ä"))


class WireTest(unittest.TestCase):
    @parameterized.expand(
        [
            (StoredVerdict(),),
            (StoredVerdict(True, True, REASONS, (1, 2), "\udc80", True, (ContentNote(5, 0, "YQ=="),), 2),),
            (WaitingPlace("a/b", 7, (0, 1), "gather: read", "\udcff", False),),
            *((reason,) for reason in REASONS),
        ]
    )
    def test_what_is_sent_arrives(self, record: StoredVerdict | WaitingPlace | Reason) -> None:
        text = encode(record)
        self.assertTrue(text.isascii())
        self.assertNotIn("\n", text)  # notes are lines
        self.assertEqual(decode(type(record), text.encode()), record)

    def test_notes_of_several_ranks(self) -> None:
        sent = [StepNote(1, "read", "ab"), ContentNote(1, 2, ""), StepNote(0, "", "")]
        notes = Notes.decoded("".join(f"{encode(note)}\n" for note in sent).encode())
        self.assertEqual((notes.steps, notes.contents), ([sent[0], sent[2]], [sent[1]]))

    @parameterized.expand([(b"[1]",), (b'["x","y","z"]',), (b"{}",), (b'[0,"E",1]',)])
    def test_another_record_is_refused(self, data: bytes) -> None:
        with self.assertRaises(msgspec.ValidationError):
            decode(Reason, data)


if __name__ == "__main__":
    unittest.main()
