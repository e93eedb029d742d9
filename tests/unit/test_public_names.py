"""What `import fsdp_optim` shows: the public names, to people, to tab completion, and to type checkers."""

from __future__ import annotations

import ast
import unittest
from pathlib import Path

import fsdp_optim
from fsdp_optim import LoadSummary, Restored


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

    def test_results_describe_themselves(self) -> None:
        restored = Restored({"epoch": 3})
        restored.missing = ("head.bias",)
        restored.summary = LoadSummary(num_tensors=2, nbytes=40, world_size=4, step=7)
        text = repr(restored)
        for part in ("Restored({'epoch': 3}", "missing=('head.bias',)", "num_tensors=2", "step=7"):
            self.assertIn(part, text)
        self.assertNotIn("unexpected", text)


if __name__ == "__main__":
    unittest.main()
