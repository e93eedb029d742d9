"""The python blocks of README.md, CONTRIBUTING.md and the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python *(?P<how>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str, str]]:
    """Of each block its page and line, the words behind its language, and its code."""
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match["how"].strip(), match["code"]


BLOCKS = list(blocks())
