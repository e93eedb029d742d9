"""Records that ranks send each other arrive as they were sent, whatever characters a message has; others are refused."""

from __future__ import annotations

import unittest

import msgspec
from parameterized import parameterized

from fsdp_optim.transport.stored_verdict import (
    Blob,
    LongContents,
    StatedContent,
    StatedStep,
    StoredVerdict,
    TreeSummary,
    WaitingPlace,
)
from fsdp_optim.transport.verdict import Reason, Statement
from fsdp_optim.wire import decode, encode

REASONS = (Reason(0, "CheckpointError", "a\ncheckpoint"), Reason(3, "OSError", "no UTF-8: \udcff, \x00, ä"))

CONTENTS = ((StatedContent("YQ==", ((5, 5),)),), (LongContents(2, ((1, 3),)),), (Blob(4, 1, ((6, 9),)),))


class WireTest(unittest.TestCase):
    @parameterized.expand(
        [
            (StoredVerdict(),),
            (StoredVerdict(True, True, REASONS, (1, 2), "\udc80", True, 5, *CONTENTS),),
            (TreeSummary(),),
            (TreeSummary((StatedStep("gather: \udcff", "ab", ((0, 3), (5, 5))),), REASONS, 3, *CONTENTS),),
            (WaitingPlace("a/b", 7, ((0, 1),), "gather: read", "\udcff", False),),
            *((reason,) for reason in REASONS),
        ]
    )
    def test_what_is_sent_arrives(self, record: StoredVerdict | TreeSummary | WaitingPlace | Reason) -> None:
        text = encode(record)
        self.assertTrue(text.isascii())
        self.assertNotIn("\n", text)
        self.assertEqual(decode(type(record), text.encode()), record)

    def test_summaries_of_several_ranks_are_one_in_any_order(self) -> None:
        """What ranks have in common is there once, with all of them; the step of the lowest rank comes first."""
        statements = {
            0: Statement("read", b"x", b"content", flags=1),
            1: Statement("read", b"x", b"content", flags=4),
            2: Statement("move", b"x"),
            3: Statement("read", b"y", b"other"),
            4: Statement("read", error=OSError("no")),
        }
        each = [TreeSummary.of(rank, statement) for rank, statement in statements.items()]
        at_once = TreeSummary.merged(each)
        self.assertEqual(
            [(step.step, step.runs) for step in at_once.steps], [("read", ((0, 1), (3, 3))), ("move", ((2, 2),))]
        )
        self.assertEqual(at_once.steps[0].digest, "", "the compared bytes differ")
        self.assertEqual(at_once.reasons, (Reason(4, "OSError", "no"),))
        self.assertEqual(at_once.flags, 5)
        self.assertEqual([content.runs for content in at_once.contents], [((0, 1),), ((3, 3),)])
        self.assertFalse(at_once.are_all_equal)
        for first, second in (([4, 2], [3, 1, 0]), ([1, 3], [0, 2, 4])):
            halves = [TreeSummary.merged([each[rank] for rank in half]) for half in (first, second)]
            merged = TreeSummary.merged(halves)
            self.assertEqual(
                (merged.steps, merged.reasons, merged.flags), (at_once.steps, at_once.reasons, at_once.flags)
            )
            self.assertEqual(set(merged.contents), set(at_once.contents))

    @parameterized.expand([(b"[1]",), (b'["x","y","z"]',), (b"{}",), (b'[0,"E",1]',)])
    def test_another_record_is_refused(self, data: bytes) -> None:
        with self.assertRaises(msgspec.ValidationError):
            decode(Reason, data)


if __name__ == "__main__":
    unittest.main()
