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


def blocks() -> Iterator[tuple[str, str, str]]:
    """Of each block its page and line, the words behind its language, and its code."""
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match["how"].strip(), match["code"]
        for match in DIFF.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            for side, sign, given in (
                ("before", "-", match["before"] or match["given"]),
                ("after", "+", match["given"]),
            ):
                code = "".join(
                    part[1:] if part.strip() else part
                    for part in match["code"].splitlines(keepends=True)
                    if part[0] in (sign, " ", "\n")
                )
                how = f"{match['ranks']} given={given}"
                yield f"{page.relative_to(ROOT)}:{line} {side}", how, f"# {side}\n{code}"


BLOCKS = list(blocks())
