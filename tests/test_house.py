"""The house's rules for its files, functions and docstrings, and for the files of the tests."""

from __future__ import annotations

import ast
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

from kit import quick
from kit.source_tree import FILES, MODULES, PACKAGE, ROOT, nodes_of, tree_of
from parameterized import parameterized


def public_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes, and public methods of public classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if "overload" in [ast.unparse(decorator) for decorator in node.decorator_list]:
                continue
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node, f"{prefix}{node.name}.")


READ_BY_USERS = (
    *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "api").glob("*.py"))),
    "adapters/base.py",
    "checkpoint/run/manager.py",
    "testing/adapter_conformance.py",
    "fairscale.py",
    "testing/conformance.py",
    "testing/fairscale_cpu.py",
    "testing/ranks.py",
    "testing/worker.py",
)  # there methods need a docstring too
MOST_LINES, MOST_LINES_OF_FUNCTION = 400, 60
MOST_LINES_OF_TESTS = 600
MOST_POSITIONAL = 6  # arguments of one call
EXAMPLES = {f"{PACKAGE}.foreign.torch.roles"}  # "a key such as model, net or module"
ALIKE = {
    *("Reader", "Writer", "FsdpOptimCheckpointManager"),  # the names by which torch and trainers call them
    *("Chunks", "Kind", "RankReport"),  # each to be removed from here when one of the two has another name
}
PRONOUNS = {
    "one",
    "ones",
    "its",
    "everyones",
    "found",
    "mine",
    "theirs",
    "ours",
    "those",
    "these",
    "that",
    "it",
    "them",
}


def names_bound_in(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[tuple[str, int]]:
    """Yield the parameters and local variables of a function, also of comprehensions inside, each with its line."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name is not None:
            yield node.name, node.lineno


def names_a_test(name: str, tree: ast.Module) -> bool:
    """Whether a test of a file begins with this name, or is a case of one that this name begins with."""
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            functions = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            inherits = [ast.unparse(base) for base in node.bases] != ["unittest.TestCase"]
            tests += [f"{node.name}::{each}" for each in functions if each.startswith("test")]
            tests += (
                [f"{node.name}::{name.partition('::')[2]}"]
                if inherits and name.startswith(f"{node.name}::test")
                else []
            )
    return any(test.startswith(name) or re.fullmatch(re.escape(test) + r"(_\d+.*|\[.*)", name) for test in tests)


class TestHouse(unittest.TestCase):
    def test_no_file_is_long(self) -> None:
        lines = {file: file.read_text().count("\n") for file in FILES}
        long = {str(file.relative_to(ROOT)): num for file, num in lines.items() if num > MOST_LINES}
        assert not long, long
        assert max(lines.values()) > MOST_LINES // 2

    def test_no_file_of_tests_is_long(self) -> None:
        tests = Path(__file__).parent
        lines = {str(file.relative_to(tests)): file.read_text().count("\n") for file in tests.rglob("*.py")}
        long = {name: num for name, num in lines.items() if num > MOST_LINES_OF_TESTS}
        assert not long, f"split these by subject; helpers of several files go to tests/kit: {long}"

    def test_what_is_not_quick_is_there(self) -> None:
        """Folders, files, and the beginnings of names of tests; sorted, so that a place has its lines together."""
        missing = []
        for line in quick.listed():
            place, _, name = line.partition("::")
            file = quick.TESTS / f"{place}.py"
            if not file.is_file() or (name and not names_a_test(name, tree_of(file))):
                missing += [] if (quick.TESTS / place).is_dir() and not name else [line]
        assert not missing, missing
        places = [line.partition("::")[0] for line in quick.listed()]
        assert places == sorted(places)

    def test_every_folder_of_tests_has_quick_ones(self) -> None:
        folders = {file.parent for file in quick.TESTS.rglob("test_*.py")} - {quick.TESTS / "hosts"}  # which needs root
        with_quick = {file.parent for file in quick.TESTS.rglob("test_*.py") if not quick.is_left_out(file)}
        assert not folders - with_quick

    def test_longest_are_files_that_there_are(self) -> None:
        tests = Path(__file__).parent
        names = (tests / "data" / "longest.txt").read_text().split()
        assert not (gone := set(names) - {file.stem for file in tests.rglob("test_*.py")}), gone

    def test_functions_fit_on_a_screen(self) -> None:
        """Without their docstrings, which are the contract and may be long."""
        long = {}
        for file in FILES:
            for node in ast.walk(tree_of(file)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                    lines = (node.end_lineno or 0) - body[0].lineno + 1
                    if lines > MOST_LINES_OF_FUNCTION:
                        long[f"{file.relative_to(ROOT)}: {node.name}"] = lines
        assert not long, long

    @parameterized.expand(
        [("adapters/base.py",), ("formats/base/protocols.py",), ("storage/base",), ("transport/base.py",)]
    )
    def test_protocols_fit_on_a_screen(self, place: str) -> None:
        files = [file for file in FILES if str(file.relative_to(ROOT)).startswith(place)]
        classes = [node for file in files for node in tree_of(file).body if isinstance(node, ast.ClassDef)]
        protocols = [
            node for node in classes if {ast.unparse(base).split("[")[0] for base in node.bases} & {"Protocol", "ABC"}
        ]
        assert protocols, place
        long = {node.name: lines for node in protocols if (lines := (node.end_lineno or 0) - node.lineno + 1) > 100}
        assert not long, long

    def test_calls_have_few_positional_arguments(self) -> None:
        """A reader cannot tell which of many values is which. A log line, a packed struct and a `Copy` are rows of values."""
        rows = (re.compile(r"log\.(debug|info|warning|error)"), re.compile(r".*\.pack"), re.compile("Copy"))
        many, num_rows = [], 0
        for module, file in MODULES.items():
            for node in nodes_of(file):
                if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                    name = ast.unparse(node.func)
                    if any(row.fullmatch(name) for row in rows):
                        num_rows += 1
                    else:
                        many.append(f"{module}, line {node.lineno}: {name} gets {len(node.args)}")
        assert not many, many
        assert num_rows, "nothing was looked at"

    def test_lists_are_shortened_by_one_function(self) -> None:
        """Which names the number that it leaves out; a list that is cut in silence looks whole."""
        cut = []
        for module, file in MODULES.items():
            for node in nodes_of(file):
                if not (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
                ):
                    continue
                is_join = ast.unparse(node.func).endswith((", '.join", "; '.join", "n'.join"))
                if is_join and any(isinstance(part, ast.Slice) for arg in node.args for part in ast.walk(arg)):
                    cut += [f"{module}, line {node.lineno}"] if module not in EXAMPLES else []
        assert not cut, cut

    def test_a_list_is_shortened(self) -> None:
        from fsdp_optim.errors import shortened

        self.assertEqual(shortened("abc", 3), "a, b, c")
        self.assertEqual(shortened("abcde", 3), "a, b, c and 2 more")
        self.assertEqual(shortened(["a: 1", "b: 2", "c: 3"], 2, "\n"), "a: 1\nb: 2\nand 1 more")
        self.assertEqual(shortened(iter((1, 2, 3)), 1, "; "), "1; and 2 more")
        self.assertEqual(shortened([]), "")

    def test_no_file_is_named_utils(self) -> None:
        named = [file for file in FILES if file.stem.strip("_") in ("utils", "util", "helpers", "common", "misc")]
        assert not named, named

    def test_every_file_and_public_function_has_a_docstring(self) -> None:
        missing = []
        for file in FILES:
            tree, name = tree_of(file), str(file.relative_to(ROOT))
            if tree.body and not ast.get_docstring(tree):
                missing.append(name)
            for function, node in public_functions(tree):
                is_method = "." in function
                if not ast.get_docstring(node) and (name in READ_BY_USERS or not is_method):
                    missing.append(f"{name}: {function}")
        assert not missing, missing

    def test_no_variable_is_named_by_a_pronoun(self) -> None:
        """A pronoun makes readers look for what it stands for; the name of the thing says it. In tests too."""
        wrong = []
        for file in [*FILES, *Path(__file__).parent.rglob("*.py")]:
            for node in ast.walk(tree_of(file)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                    wrong += [f"{file}:{line}: {name}" for name, line in names_bound_in(node) if name in PRONOUNS]
        assert not wrong, sorted(set(wrong))

    def test_no_two_classes_have_one_name(self) -> None:
        """One word, one thing, in all rooms. Classes that begin with `_` belong to their file."""
        files: dict[str, list[str]] = {}
        for file in FILES:
            for node in ast.walk(tree_of(file)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
        self.assertEqual({name: where for name, where in files.items() if len(where) > 1 and name not in ALIKE}, {})

    def test_what_is_public_is_what_is_listed(self) -> None:
        import fsdp_optim

        assert sorted(fsdp_optim.__all__) == fsdp_optim.__all__
        for name in fsdp_optim.__all__:
            assert getattr(fsdp_optim, name).__doc__, name
        promised = {
            *("gather_full_optim_state_dict", "get_shard_from_optim_state_dict", "scatter_full_optim_state_dict"),
            *("iter_full_optim_state", "rekey_optim_state_dict", "load_optim_state_dict"),
        }
        assert promised <= set(fsdp_optim.__all__)

    def test_errors_are_builtin_errors_too(self) -> None:
        from fsdp_optim import errors

        builtin = {"LayoutError": ValueError, "StateError": ValueError, "WrapperError": TypeError}
        builtin |= {"RankError": RuntimeError, "RankTimeoutError": TimeoutError}
        for name, parent in builtin.items():
            assert issubclass(getattr(errors, name), (errors.FsdpOptimError,)), name
            assert issubclass(getattr(errors, name), parent), name

    def test_no_file_of_the_kit_hides_a_module_of_python(self) -> None:
        """A file of the kit that runs as a program has the kit's folder first in sys.path."""
        files = {file.stem for file in (Path(__file__).parent / "kit").glob("*.py")}
        self.assertEqual(sorted(files & sys.stdlib_module_names), [])

    def test_tests_come_by_the_doors_of_rooms(self) -> None:
        """A name that the `__init__` of a room gives is imported from there, so that the files of the room can move."""
        tests = Path(__file__).parent
        doors = {
            module: {
                alias.name for node in tree_of(file).body if isinstance(node, ast.ImportFrom) for alias in node.names
            }
            for module, file in MODULES.items()
            if file.name == "__init__.py"
        }
        line = re.compile(rf"^ *from ({PACKAGE}(?:\.\w+)+)\.\w+ import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
        wrong = []
        for file in sorted(tests.rglob("*.py")):
            for room, listed in line.findall(file.read_text()):
                given = set(re.findall(r"\w+", listed)) & doors.get(room, set())
                wrong += [f"{file.relative_to(tests)}: from {room} import {', '.join(sorted(given))}"] if given else []
        assert not wrong, "\n".join(wrong)

    def test_tests_share_by_the_kit_alone(self) -> None:
        """An error in one test's file is no error of another; what tests share is in the kit."""
        tests = Path(__file__).parent
        shared = {file.stem for file in (tests / "kit").glob("*.py")} - {"__init__"}
        # Only a file with such a line, which may also stand in a string, is worth parsing.
        line = re.compile(
            rf"^\s*(?:from|import)\s+(?:[\w. ]+,\s*)*(?:{'|'.join(sorted(shared))}|test_\w+|tests)\b", re.MULTILINE
        )
        files = sorted(tests.rglob("*.py"))
        borrowed = []
        for file in [file for file in files if line.search(file.read_text())]:
            for node in ast.walk(tree_of(file)):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in modules:
                    if module in shared or module.startswith(("test_", "tests.")):
                        borrowed.append(f"{file.relative_to(tests)}: {module}")
        assert not borrowed, borrowed
