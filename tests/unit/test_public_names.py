"""`import fsdp_optim` shows the public names, to people, to tab completion, and to type checkers."""

from __future__ import annotations

import ast
import tempfile
import unittest
from pathlib import Path
from typing import get_args, get_type_hints

import torch
from torch import nn

import fsdp_optim
from fsdp_optim import api, dcp, plugins


class PublicNamesTest(unittest.TestCase):
    def test_completion_shows_the_public_names_only(self) -> None:
        self.assertEqual(dir(fsdp_optim), sorted(set(fsdp_optim.__all__)))
        self.assertEqual(len(fsdp_optim.__all__), len(set(fsdp_optim.__all__)))
        for name in fsdp_optim.__all__:
            self.assertTrue(getattr(fsdp_optim, name).__doc__, name)

    def test_type_checkers_do_not_see_getattr(self) -> None:
        """A module with `__getattr__` has every name for a type checker, misspelt ones too."""
        tree = ast.parse(Path(fsdp_optim.__file__).read_text())
        seen = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.assertEqual(seen, ["__dir__"])
        with self.assertRaisesRegex(AttributeError, "laod"):
            fsdp_optim.laod  # noqa: B018

    def test_modules_that_import_names_when_asked_have_no_others(self) -> None:
        for module in (api, dcp, plugins):
            self.assertEqual(dir(module), list(module.__all__))
            self.assertFalse(hasattr(module, "__path_of_nothing__"))
            with self.assertRaisesRegex(AttributeError, f"module '{module.__name__}' has no attribute 'laod'"):
                module.laod  # noqa: B018

    def test_the_types_of_results_are_public(self) -> None:
        """The classes that public functions are annotated to return, and those of their attributes."""
        for name in fsdp_optim.__all__:
            public = getattr(fsdp_optim, name)
            if not isinstance(public, type) and callable(public):
                returned = get_type_hints(public)["return"]
                for result_type in get_args(returned) or (returned,):
                    if getattr(result_type, "__module__", "").startswith("fsdp_optim"):
                        self.assertIs(getattr(fsdp_optim, result_type.__name__, None), result_type, name)
        for name in ("GroupInfo", "TensorInfo"):
            self.assertIn(name, fsdp_optim.__all__)

    def test_an_inspected_checkpoint_describes_itself(self) -> None:
        model = nn.Linear(3, 2)
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(
                f"{folder}/a",
                model,
                torch.optim.SGD(model.parameters()),
                step=3,
                options=fsdp_optim.SaveOptions(durable=False),
            )
            summary = fsdp_optim.inspect(f"{folder}/a")
            self.assertEqual(
                repr(summary),
                f"CheckpointSummary(path='{folder}/a', format='fsdp_optim', world_size=1, step=3, weights='all', "
                "model=<2 tensors>, state=<0 values of 0 parameters>, nbytes=32, extras=())",
            )

    def test_results_describe_themselves(self) -> None:
        result = fsdp_optim.LoadResult({"epoch": 3}, 7, 4, missing_keys=("head.bias",), num_tensors=2, nbytes=40)
        text = repr(result)
        for part in ("LoadResult(state=<'epoch'>", "missing_keys=<head.bias>", "num_tensors=2", "step=7"):
            self.assertIn(part, text)
        self.assertNotIn("unexpected", text)


if __name__ == "__main__":
    unittest.main()
