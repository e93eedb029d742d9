"""The python blocks, and both sides of the diffs that are run, of README.md, CONTRIBUTING.md and the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIFF = re.compile(
    r"^```diff (?P<ranks>ranks=\d+)(?: before=(?P<before>\S+))? given=(?P<given>\S+)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
BLOCK = re.compile(r"^```python *(?P<how>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def side_of(diff: str, sign: str) -> str:
    """The program on one side of a diff: the lines with this sign, and those on both sides."""
    return "".join(
        line[1:] if line.strip() else line for line in diff.splitlines(keepends=True) if line[0] in sign + " \n"
    )


def blocks() -> Iterator[tuple[str, str, str]]:
    """Of each block its page and line, the words behind its language, and its code."""
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match["how"].strip(), match["code"]
        for match in DIFF.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            for side, given in (("before", match["before"] or match["given"]), ("after", match["given"])):
                code = side_of(match["code"], "-" if side == "before" else "+")
                if code.strip():
                    yield (
                        f"{page.relative_to(ROOT)}:{line} {side}",
                        f"{match['ranks']} given={given}",
                        f"# {side}\n{code}",
                    )


BLOCKS = list(blocks())
