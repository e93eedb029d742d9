"""The shell blocks of the docs: they are shell, they name commands, options, files and targets that exist, and some are run.

A `fsdp-optim` line below a Python block that is run, in the same section, runs in the folder that this block has filled. What
needs a scheduler, an index of packages or a bucket is parsed only. The quickstart's blocks are run by test_quickstart.py.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from kit.folders import InFolder, at
from parameterized import parameterized

from fsdp_optim.cli.app import PROGRAM, group, main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```(?P<how>[^\n]+)\n(?P<code>.*?)^```|^(?P<section>##? [^\n]*)$", re.MULTILINE | re.DOTALL)
ELSEWHERE = "://"
"""In the lines that need a store of the user's."""


class Block(NamedTuple):
    where: str
    section: str
    how: str
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page in their order."""
    section = ""
    for match in BLOCK.finditer(page.read_text()):
        if match["section"]:
            section = match["section"]
        else:
            line = page.read_text()[: match.start()].count("\n") + 1
            yield Block(f"{page.name}:{line}", section, match["how"], match["code"])


SHELL = [block for page in PAGES for block in blocks(page) if block.how in ("sh", "bash", "shell", "console")]


def words_of(code: str) -> Iterator[list[str]]:
    """The words of each line, without comments; a substitution is one word."""
    for line in re.sub(r"\$\([^)]*\)", "substituted", code.replace("\\\n", " ")).splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def commands_in(code: str) -> Iterator[list[str]]:
    """The arguments of each call of this library's command."""
    for words in words_of(code):
        for begin in ([PROGRAM], ["-m", "fsdp_optim"]):
            for place in range(len(words) - len(begin) + 1):
                if words[place : place + len(begin)] == begin:
                    yield words[place + len(begin) :]


def runs() -> Iterator[tuple[str, Block, list[str]]]:
    """Where, the Python block before, and the arguments of each command that can be run."""
    for page in PAGES:
        python: Block | None = None
        for block in blocks(page):
            if block.how == "python run":
                python = block
            elif block.how == "sh" and python is not None and python.section == block.section:
                calls = [call for call in commands_in(block.code) if not any(ELSEWHERE in word for word in call)]
                for number, call in enumerate(calls):
                    yield f"{block.where} {number}", python, call


class ShellBlockTest(InFolder):
    @parameterized.expand([(block.where, block) for block in SHELL])
    def test_it_is_shell(self, _: str, block: Block) -> None:
        done = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    @parameterized.expand([(block.where, block) for block in SHELL])
    def test_it_names_what_there_is(self, _: str, block: Block) -> None:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for words in words_of(block.code):
            if words[0] == "make":
                self.assertLessEqual({word for word in words[1:] if "=" not in word}, targets)
            for word in words:
                if re.fullmatch(r"(examples|tests|benchmarks|website|release)/[\w/]+\.py", word):
                    self.assertTrue((ROOT / word).is_file(), word)
        for arguments in commands_in(block.code):
            self.check_parsed(arguments)

    def check_parsed(self, arguments: list[str]) -> None:
        context = click.Context(group, info_name=PROGRAM)
        if arguments[0].startswith("-"):  # --help and --version of the program
            self.assertIn(arguments[0], ("--help", "--version"))
            return
        command = group.get_command(context, arguments[0])
        assert command is not None, arguments
        command.make_context(arguments[0], arguments[1:], parent=context)

    @parameterized.expand(runs())
    def test_it_runs(self, _: str, python: Block, arguments: list[str]) -> None:
        with at(self.root), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(python.code, python.where, "exec"), {"__name__": "example"})
            code = main(arguments)
        self.assertIn(code, (0, 1) if arguments[0] == "diff" else (0,), out.getvalue())

    def test_some_are_there(self) -> None:
        self.assertGreater(len(SHELL), 20)
        self.assertGreaterEqual({call[0] for _, _, call in runs()}, {"diff", "show", "extract"})
        self.assertGreater(sum(1 for block in SHELL for _ in commands_in(block.code)), 15)

    def test_a_wrong_option_is_found(self) -> None:
        with self.assertRaisesRegex(click.UsageError, "no-such"):
            self.check_parsed(["ls", "run", "--no-such"])
        with self.assertRaises(AssertionError):
            self.check_parsed(["lss", "run"])


TASKS = {
    "OOM": "recipes",
    "out of memory": "recipes",
    "install": "install",
    "slurm": "recipes",
    "requeue": "recipes",
    "kubernetes": "recipes",
    "ray": "recipes",
    "trl": "recipes",
    "ema": "recipes",
    "hub": "recipes",
    "list checkpoints": "recipes",
    "statefuldataloader": "recipes",
    "resume at another world size": "recipes",
    "compare two checkpoints": "recipes",
    "shared disk": "recipes",
}
"""What a user types into the site's search, and the page that should come first: a heading of it has all of these words."""


class SearchTest(unittest.TestCase):
    @parameterized.expand(TASKS.items())
    def test_a_heading_has_the_words_of_the_task(self, query: str, wanted: str) -> None:
        pages = {
            page.stem
            for page in ROOT.glob("docs/*.md")
            for heading in re.findall(r"^#{1,3} (.*)$", page.read_text(), re.MULTILINE)
            if set(query.lower().split()) <= set(re.findall(r"[\w']+", heading.lower()))
        }
        self.assertIn(wanted, pages)
        self.assertLessEqual(len(pages), 3)


if __name__ == "__main__":
    unittest.main()
