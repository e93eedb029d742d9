"""A package with a wrapper, a store and a format of its own: its wheel is installed, and found by its entry points."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "plugin_package"
DOORS = {"fsdp_optim", "fsdp_optim.plugins", "fsdp_optim.testing"}


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python from another folder than the repository, so that nothing of it is found but what is installed."""
    every = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=540, cwd=cwd, env=every, check=False
    )


class PluginPackageTest(unittest.TestCase):
    def test_its_wheel_is_installed_and_keeps_the_promises(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            shutil.copytree(
                SOURCE, root / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            )
            offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
            for command in (
                ["wheel", *offline, "--no-build-isolation", "--wheel-dir", str(root / "wheels"), str(root / "source")],
                ["install", *offline, "--target", str(root / "installed"), "--find-links", str(root / "wheels")],
            ):
                if command[0] == "install":
                    command += [str(wheel) for wheel in (root / "wheels").glob("*.whl")]
                done = python("-m", "pip", *command, cwd=root)
                self.assertEqual(done.returncode, 0, done.stderr)
            path = os.pathsep.join([str(root / "installed"), str(ROOT)])
            done = python("-m", "unittest", "-v", "example_plugins.conformance", cwd=root, PYTHONPATH=path)
            self.assertEqual(done.returncode, 0, done.stderr[-4000:])
            for case in ("TestAdapter", "TestBucket", "TestStore", "TestFormat", "TestTogether"):
                self.assertIn(f"{case}.test_", done.stderr)
            self.assertNotIn("skipped", done.stderr)

    def test_it_goes_through_the_doors(self) -> None:
        wrong = []
        for file in sorted(SOURCE.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                wrong += [
                    f"{file.name}: {name}"
                    for name in modules
                    if name.split(".")[0] == "fsdp_optim" and name not in DOORS
                ]
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
