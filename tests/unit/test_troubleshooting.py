"""docs/troubleshooting.md quotes messages that the source can raise: each is a text of the source, with … for its fields."""

from __future__ import annotations

import ast
import functools
import re
import unittest
from collections.abc import Iterator
from pathlib import Path

from parameterized import parameterized

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^> `(.+)`$", re.MULTILINE)
FIELD = "\0"


def texts_in(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, with a mark for each field; parts side by side are one text. Docstrings are left out."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else FIELD for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


@functools.cache
def texts() -> list[str]:
    return [
        text
        for file in sorted((ROOT / "fsdp_optim").rglob("*.py"))
        for text in texts_in(ast.parse(file.read_text(encoding="utf-8")))
    ]


def is_in(quotation: str, text: str) -> bool:
    """Whether a text is as quoted: its parts between ellipses are there, in this order."""
    at = 0
    for part in quotation.split("…"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


QUOTATIONS = QUOTED.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))


class TestTroubleshooting(unittest.TestCase):
    @parameterized.expand([(quotation,) for quotation in QUOTATIONS])
    def test_a_message_is_quoted_as_it_is(self, quotation: str) -> None:
        longest = max(quotation.split("…"), key=len)
        self.assertGreater(len(longest), 12, "too few words to search for")
        matches = [text for text in texts() if is_in(quotation, text)]
        self.assertTrue(matches, f"no text in fsdp_optim says: {quotation}")

    def test_messages_are_quoted_and_others_are_found_out(self) -> None:
        self.assertGreater(len(QUOTATIONS), 25)
        self.assertTrue(is_in("…: already exists: save", f"{FIELD}: already exists: save to another path"))
        self.assertFalse(is_in("…: already exists; save", f"{FIELD}: already exists: save to another path"))
        self.assertFalse(is_in("one … three", "three one"))


if __name__ == "__main__":
    unittest.main()
