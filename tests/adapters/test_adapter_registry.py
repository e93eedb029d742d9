"""The registry of adapters: built-in adapters, those that a program adds, and those of installed packages."""

from __future__ import annotations

import ast
import sys
import tempfile
import unittest
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.adapters import Claiming
from kit.compare import check_refused, error_text
from kit.installed import installed
from kit.masters import Mixed, MixedAdapter
from torch import nn

import fsdp_optim
from fsdp_optim import WrapperError, registry
from fsdp_optim.adapters import ModelReader, all_adapters, use_adapters
from fsdp_optim.adapters.known import built_in_adapters
from fsdp_optim.plugins import Handle
from fsdp_optim.testing import run_on_ranks

ADAPTERS = Path(fsdp_optim.__file__).parent / "adapters"
WRAPPERS = {"fairscale", "fsdp1", "dtensor", "dtensor_handle", "replicated", "checkpointable"}

CODE = """
from kit.installed import installed
from kit.masters import MixedAdapter

class Found(MixedAdapter):
    pass

def make():
    return Found()

instance = Found()
word = "no adapter"

def broken():
    raise OSError("no such thing")
"""


class Claims(Claiming):
    """An adapter that claims every parameter of a Linear."""

    name = "Claims"

    def __init__(self) -> None:
        super().__init__(nn.Linear)


class Absent(Claims):
    """An adapter whose wrapper is not loaded, and whose other methods fail."""

    def is_present(self) -> bool:
        return False

    def rank_sets(self, tree: Any) -> Iterable[Any]:
        raise AssertionError("asked for the ranks of a wrapper that is not there")

    handles = is_wrapper_child = stand_ins = masters = has_cut = param_order = rank_sets  # type: ignore[assignment]


class TestList(unittest.TestCase):
    def test_the_order(self) -> None:
        """Added adapters come first, the last added before all others, until the block ends, also with an error."""
        first, second = Claims(), MixedAdapter()
        built_in = all_adapters()
        self.assertEqual(built_in, built_in_adapters())
        with use_adapters([first]):
            with self.assertRaises(KeyError), use_adapters([second]):
                self.assertEqual(all_adapters(), (second, first, *built_in))
                raise KeyError
            self.assertEqual(all_adapters(), (first, *built_in))
        self.assertEqual(all_adapters(), built_in)

    def test_the_first_that_claims_a_parameter_has_it(self) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        with use_adapters([Claims()]):
            view = ModelReader(model).read()
        self.assertEqual([named.fqns[0] for named in view.handles], ["0.weight", "0.bias", "1.weight", "1.bias"])
        claimed = [named.handle.synchronized for named in view.handles]
        self.assertEqual(claimed, [True, True, False, False])  # Claims marks the replicas as synchronized

    def test_one_of_two_that_claim_a_parameter_has_it(self) -> None:
        """The adapter that is called first, which is the last added."""

        class Others(Claims):
            def handles(self, tree: Any, ranks: Any, claimed: Any) -> Iterable[Handle]:
                return (replace(handle, num_padded=(7,)) for handle in super().handles(tree, ranks, claimed))

        for adapters, padding in (([Claims(), Others()], ()), ([Others(), Claims()], (7,))):
            with use_adapters(adapters):
                view = ModelReader(nn.Linear(2, 3)).read()
            self.assertEqual([named.handle.num_padded for named in view.handles], [padding] * 2)

    def test_what_is_no_adapter(self) -> None:
        with self.assertRaisesRegex(WrapperError, "use_adapters.. was given a str, which is no"), use_adapters(["x"]):  # type: ignore[list-item]
            pass
        self.assertEqual(all_adapters(), built_in_adapters())

    def test_an_adapter_whose_wrapper_is_not_loaded_is_asked_nothing(self) -> None:
        with use_adapters([Absent()]):
            model = nn.Linear(2, 3)
            full = fsdp_optim.gather_full_optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.assertEqual(full["param_groups"][0]["params"], [0, 1])

    def test_the_reader_knows_no_wrapper_by_name(self) -> None:
        """Only the registry does."""
        for file in sorted(ADAPTERS.glob("*.py")):
            if file.stem not in WRAPPERS:
                named = {
                    alias.name.rpartition(".")[2]
                    for node in ast.walk(ast.parse(file.read_text()))
                    if isinstance(node, (ast.Import, ast.ImportFrom))
                    for alias in [*node.names, ast.alias(getattr(node, "module", None) or "")]
                }
                self.assertEqual(named & WRAPPERS, set(), file.name)


class TestEntryPoints(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "found_adapters.py").write_text(CODE)
        patched = mock.patch.object(sys, "path", [str(self.root), *sys.path])
        patched.start()
        self.addCleanup(patched.stop)
        for name in ("found_adapters", "found_wrapper"):
            self.addCleanup(sys.modules.pop, name, None)
        self.forget()
        self.addCleanup(self.forget)

    def forget(self) -> None:
        registry.installed_points.cache_clear()
        registry.PluginKind.make.cache_clear()

    def install(self, *lines: str) -> None:
        info = self.root / "found-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: found\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{registry.ADAPTERS.group}]", *lines]))
        self.forget()

    def load_wrapper(self) -> None:
        sys.modules["found_wrapper"] = type(sys)("found_wrapper")

    def test_a_package_that_the_user_has_not_loaded(self) -> None:
        """The adapter of an absent wrapper is not even imported; it is when the wrapper is loaded."""
        self.install("found_wrapper = found_adapters:Found")
        self.assertEqual(all_adapters(), built_in_adapters())
        self.assertNotIn("found_adapters", sys.modules)
        self.load_wrapper()
        self.assertEqual(type(all_adapters()[0]).__name__, "Found")
        self.assertEqual(ModelReader(Mixed(nn.Linear(2, 3))).read().order, ("weight", "bias"))

    def test_a_class_a_function_and_an_object(self) -> None:
        for value in ("Found", "make", "instance"):
            with self.subTest(value), tempfile.TemporaryDirectory() as folder:
                self.root = Path(folder)
                (self.root / "found_adapters.py").write_text(CODE)
                self.install(f"found_wrapper = found_adapters:{value}")
                self.load_wrapper()
                with mock.patch.object(sys, "path", [folder, *sys.path]):
                    self.assertEqual(type(all_adapters()[0]).__name__, "Found")
                    self.assertIs(all_adapters()[0], all_adapters()[0])

    def test_the_search_is_made_once(self) -> None:
        """The lookup of entry points takes milliseconds, so it is made at most once per process."""
        self.install("found_wrapper = found_adapters:Found")
        self.load_wrapper()
        with mock.patch.object(registry, "entry_points", wraps=registry.entry_points) as search:
            for _ in range(3):
                ModelReader(nn.Linear(2, 3)).read()
        self.assertEqual(search.call_count, 1)

    def test_a_broken_one_is_named(self) -> None:
        """The error names the package, the cause and the way out, in every call, not in the first only."""
        cases = {
            "found_adapters:broken": "OSError: no such thing",
            "found_adapters:absent": "AttributeError",
            "nowhere_at_all:Found": "ModuleNotFoundError",
            "found_adapters:word": "",
        }
        for value, cause in cases.items():
            with self.subTest(value), tempfile.TemporaryDirectory() as folder:
                self.root = Path(folder)
                (self.root / "found_adapters.py").write_text(CODE)
                self.install(f"found_wrapper = {value}")
                self.load_wrapper()
                with mock.patch.object(sys, "path", [folder, *sys.path]):
                    for _ in range(2):
                        name, text = error_text(lambda: ModelReader(nn.Linear(2, 3)))
                        self.assertEqual(name, "WrapperError")
                        for word in (
                            f"'found_wrapper' = '{value}'",
                            f"'{registry.ADAPTERS.group}'",
                            "found 1.2",
                            cause,
                        ):
                            self.assertIn(word, text)

    def test_a_broken_one_on_one_rank(self) -> None:
        """All ranks raise the error."""
        errors = run_on_ranks(broken_on_rank, 2, 1)
        check_refused("broken", errors, "WrapperError", "'kit' = 'nowhere:X'", "ModuleNotFoundError", "rank 1")


def broken_on_rank(broken: int) -> tuple[str, str]:
    import torch.distributed as dist

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    where = {"kit": "nowhere:X"} if dist.get_rank() == broken else {}
    with installed(registry.ADAPTERS, **where):
        return error_text(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim))


if __name__ == "__main__":
    unittest.main()
