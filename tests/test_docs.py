"""The examples in the docs: every python block is python, and those that say so run.

The word after the language decides: "```python" is compiled, "```python run" is run in one process, and
"```python ranks=2" is run on each of two ranks, where fairscale works on CPU. All in an empty folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python *(?P<how>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str, str]]:
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match["how"].strip(), match["code"]


BLOCKS = list(blocks())


@pytest.mark.parametrize(("where", "how", "code"), BLOCKS, ids=[where for where, *_ in BLOCKS])
def test_example(where: str, how: str, code: str, tmp_path: Path) -> None:
    program = compile(code, where, "exec")
    if how == "run":
        before = os.getcwd()
        try:
            os.chdir(tmp_path)
            exec(program, {"__name__": "example"})
        finally:
            os.chdir(before)
    elif how.startswith("ranks="):
        run_on_ranks(run_on_a_rank, int(how.removeprefix("ranks=")), where, code, str(tmp_path))
    else:
        assert how == "", f"{where}: what does {how!r} mean?"


def run_on_a_rank(where: str, code: str, folder: str) -> None:
    before = os.getcwd()
    try:
        os.chdir(folder)
        with fairscale_on_cpu():
            exec(compile(code, where, "exec"), {"__name__": "example"})
    finally:
        os.chdir(before)


def test_blocks_are_found_and_judged(tmp_path: Path) -> None:
    page = "text\n```python\nx = 1\n```\n```sh\nmake\n```\n```python ranks=2\ny = (\n```\n"
    found = [(match["how"], match["code"]) for match in BLOCK.finditer(page)]
    assert found == [("", "x = 1\n"), ("ranks=2", "y = (\n")]
    with pytest.raises(SyntaxError):
        test_example("page.md:8", "ranks=2", found[1][1], tmp_path)
    with pytest.raises(AssertionError, match="what does 'rnu' mean"):
        test_example("page.md:8", "rnu", "pass", tmp_path)
    with pytest.raises(ZeroDivisionError):
        test_example("page.md:8", "run", "1 / 0", tmp_path)
