"""The docs site: the reference is whole, pages lead where the files of the repository lead, and faults are found."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from parameterized import parameterized

import fsdp_optim
import fsdp_optim.testing
from website import fetched, reference, stage
from website.as_for import filled
from website.docstrings import linked, rewritten

PAGES = stage.ROOT / "website" / "reference"
GOOD = '''
__all__ = ["Thing", "act"]


class Thing:
    """A thing.

    Args:
        size, weight: numbers.
    """

    def __init__(self, size, weight): ...

    def grow(self, by):
        """Grow.

        Args:
            by: how much.
        """


def act(thing, *, times=1):
    """Act.

    Args:
        thing: what acts.
        times: how
            often.

    Raises (on all ranks):
        ValueError, TypeError: it cannot.
    """
'''


class TestReference(unittest.TestCase):
    def test_every_public_name_is_described(self):
        self.assertEqual(reference.problems(PAGES), [])

    def test_the_names_that_are_looked_for_are_those_that_users_import(self):
        described = set(reference.described(PAGES))
        for module in (fsdp_optim, fsdp_optim.testing):
            self.assertLessEqual({f"{module.__name__}.{name}" for name in module.__all__}, described)

    def problems(self, code: str, page: str = "::: thing.Thing\n\n::: thing.act\n") -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "thing.py").write_text(code)
            (Path(folder) / "pages").mkdir()
            (Path(folder) / "pages" / "page.md").write_text(page)
            return reference.problems(Path(folder) / "pages", Path(folder), ("thing",))

    def test_a_whole_one_is_whole(self):
        self.assertEqual(self.problems(GOOD), [])

    @parameterized.expand(
        [
            (
                "argument",
                "        times: how\n            often.\n",
                "thing.act: the docstring does not describe the argument times",
            ),
            (
                "one of two",
                "size, weight:",
                "size:",
                "thing.Thing: the docstring does not describe the argument weight",
            ),
            (
                "method",
                "            by: how much.\n",
                "thing.Thing.grow: the docstring does not describe the argument by",
            ),
            ("function", '"""Act.', 'b"""Act.', "thing.act has no docstring"),
            ("class", '"""A thing.', 'b"""A thing.', "thing.Thing has no docstring"),
        ]
    )
    def test_what_is_missing_is_named(self, _, old, *rest):
        new, expected = rest if len(rest) == 2 else ("", rest[0])
        self.assertIn(old, GOOD)
        self.assertEqual(self.problems(GOOD.replace(old, new)), [expected])

    def test_a_name_has_one_place(self):
        self.assertEqual(self.problems(GOOD, "::: thing.Thing\n"), ["thing.act is on no page of the reference"])
        twice = "::: thing.Thing\n\n::: thing.act\n\n::: thing.act\n"
        self.assertEqual(self.problems(GOOD, twice), ["thing.act is described 2 times"])

    def test_sections_become_those_that_griffe_knows(self):
        docstring = (
            "Text.\n\nArgs:\n    a,\n        b: of both,\n        on two lines.\n\nRaises (always):\n    A, B: why."
        )
        self.assertEqual(
            rewritten(docstring).split("\n"),
            [
                "Text.",
                "",
                "Args:",
                *["    a: of both,", "        on two lines.", ""],
                *["    b: of both,", "        on two lines.", ""],
                "Errors are always.",
                "",
                *["Raises:", "    A: why.", "    B: why.", ""],
            ],
        )

    @parameterized.expand(
        [
            ("all", "as for `save`.", "where it is:\n        a path."),
            ("more", "as for `save`; or a URL.", "where it is:\n        a path; or a URL."),
            ("chain", "as for `load`.", "where it is:\n        a path, or none."),
            ("on the next line", "as for\n        `save`.", "where it is:\n        a path."),
            ("unknown", "as for `other`.", "as for `other`."),
            ("inside", "the same as for `save`.", "the same as for `save`."),
            ("itself", "as for `again`.", "as for `again`."),
        ]
    )
    def test_what_is_as_for_another_function_is_said_again(self, _, text, expected):
        known = {
            "save": "Save.\n\nArgs:\n    path: where it is:\n        a path.\n    more: not this.\n",
            "load": "Load.\n\nArgs:\n    path: as for `save`, or none.\n\nRaises:\n    path: no.\n",
            "again": "Again.\n\nArgs:\n    path: as for `again`.\n",
        }
        docstring = "Act.\n\nArgs:\n    path: {}\n    last: as for `save`.\n\nRaises:\n    Error: as for `save`."
        method = "Save it.\n\nArgs:\n    step: which.\n"  # of the same name, without this argument

        def find(name):
            return [method, known[name]] if name in known else []

        self.assertEqual(filled(docstring.format(text), find), docstring.format(expected))

    @parameterized.expand(
        [
            ("name", "as `load` does", "as [`load`][one.load] does"),
            ("whole name", "as `one.load` does", "as [`one.load`][one.load] does"),
            ("its own", "`save` and", "`save` and"),
            ("that of another", "as for `save`.", "as for [`save`][one.save]."),
            ("attribute", "`load.step` and `x.load`", "`load.step` and `x.load`"),
        ]
    )
    def test_public_names_become_links(self, _, text, expected):
        public = {"save": "one.save", "load": "one.load", "one.load": "one.load"}
        self.assertEqual(linked(text, public, {"save"}), expected)


class TestPages(unittest.TestCase):
    @parameterized.expand(
        [
            ("page", "docs/a.md", "[x](b.md#part)", "[x](b.md#part)"),
            ("from the top", "README.md", "[x](docs/b.md#part), ![y](docs/c.svg)", "[x](b.md#part), ![y](c.svg)"),
            ("to the top", "docs/deep/d.md", "[x](../../README.md) [y](../b.md)", "[x](../index.md) [y](../b.md)"),
            ("file", "docs/a.md", "[x](../src/one.py)", "[x](https://web/blob/main/src/one.py)"),
            ("folder", "README.md", "[x](src/)", "[x](https://web/tree/main/src)"),
            ("elsewhere", "README.md", "[x](https://b.org) [y](#part)", "[x](https://b.org) [y](#part)"),
            ("html", "README.md", '<img src="docs/c.svg">', '<img src="c.svg">'),
            ("code", "README.md", "`[x](docs/b.md)`", "`[x](docs/b.md)`"),
            ("block", "README.md", "```python ranks=2\n[x](docs/b.md)\n```", "```python\n[x](docs/b.md)\n```"),
            ("longer block", "README.md", "````md\n```python run\n```\n````", "````md\n```python run\n```\n````"),
            (
                "block in the middle",
                "docs/a.md",
                "```python ranks=2 given=X\nx\n```\n```python ranks=2 given=X\ny\n```",
                "```python\nx\n```\n\n<details markdown>\n<summary>What these lines begin with</summary>\n\n```python\n"
                "x = 1\n```\n\n</details>\n```python\ny\n```",
            ),
            ("block of the kit", "docs/a.md", "```python ranks=2 given=Y\nx\n```", "```python\nx\n```"),
            ("after a block", "README.md", "```sh\nx\n```\n[x](docs/b.md)", "```sh\nx\n```\n[x](b.md)"),
            (
                "note",
                "README.md",
                "> [!NOTE]\n> one\n>\n> [x](docs/b.md)\n\ny",
                "!!! note\n\n    one\n\n    [x](b.md)\n\ny",
            ),
            ("two notes", "docs/a.md", "> [!TIP]\n> a\n\n> [!CAUTION]\n> b", "!!! tip\n\n    a\n\n!!! danger\n\n    b"),
            ("quotation", "docs/a.md", "> a\n> b", "> a\n> b"),
            ("note in a block", "docs/a.md", "```md\n> [!NOTE]\n> a\n```", "```md\n> [!NOTE]\n> a\n```"),
        ]
    )
    def test_links_lead_to_the_same_places(self, _, source, text, expected):
        self.assertEqual(self.page(text, source), (expected + "\n", []))

    @parameterized.expand(
        [
            ("first paragraph", "# A\n\nOne `two`\n[three](four.md).\n\nFive.\n", "One two three."),
            ("after others", "# A\n\n<!-- b -->\n\n![c](c.svg)\n\n- d\n\n**E** f.", "E f."),
            ("after code", "# A\n\n```sh\nx\n```\n\nThen.", ""),
            ("none", "# A\n\n::: b.c\n", ""),
            ("long", "word, " * 40, ", ".join(["word"] * 26) + "…"),
        ]
    )
    def test_what_a_page_is_about(self, _, text, says):
        self.assertEqual(stage.description(text), says)
        self.assertLessEqual(len(says), stage.MOST_DESCRIPTION)
        self.assertTrue(stage.described(text).endswith(text))

    @parameterized.expand(
        [("page", "[x](none.md#part)"), ("file", "[x](../none.py)"), ("picture", '<img src="none.svg">')]
    )
    def test_a_link_to_no_file_is_named(self, _, text):
        _, [fault] = self.page(text, "docs/a.md")
        self.assertRegex(fault, r"docs/a.md: the link (../)?none\S+ leads to no file")

    def page(self, text: str, source: str) -> tuple[str, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for file in ("README.md", "docs/a.md", "docs/b.md", "docs/c.svg", "docs/deep/d.md", "src/one.py"):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).touch()
            (root / "website" / "preludes").mkdir(parents=True)
            (root / "website" / "preludes" / "X.py").write_text("x = 1\n")
            return stage.for_the_site(text, source, root, "https://web")

    def test_every_page_of_the_docs_is_on_the_site_and_in_its_contents(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(stage.stage(Path(folder)), [])
            pages = {
                page.relative_to(Path(folder) / "pages").as_posix() for page in Path(folder).rglob("pages/**/*.md")
            }
        docs = stage.ROOT / "docs"
        self.assertLessEqual({"index.md", *(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))}, pages)


class TestFetched(unittest.TestCase):
    def problems(self, page: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "index.html").write_text(page)
            return fetched.problems(Path(folder))

    def test_a_link_fetches_nothing(self):
        self.assertEqual(self.problems('<a href="https://example.org/">x</a><img src="own.svg">'), [])

    @parameterized.expand(
        [
            ("script", '<script src="https://example.org/x">'),
            ("fonts", '<link rel="stylesheet" href="//example.org/x">'),
        ]
    )
    def test_another_host_is_named(self, _, page):
        [problem] = self.problems(page)
        self.assertRegex(problem, "index.html: the page fetches .*//example.org/x from another host")


if __name__ == "__main__":
    unittest.main()
