"""The distributions: what is in them, what PyPI shows of them, and what a release refuses."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.errors import pip_install

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # release/ is beside the package, not in it

from release import build as building  # noqa: E402

REPOSITORY = "https://git.example/team/fsdp"


class DistributionsTest(unittest.TestCase):
    folder: tempfile.TemporaryDirectory[str]
    wheel: Path
    sdist: Path
    metadata: Message

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        out = Path(cls.folder.name) / "dist"
        cls.wheel, cls.sdist = building.build(out, REPOSITORY, "v9")
        with zipfile.ZipFile(cls.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            cls.metadata = message_from_bytes(archive.read(name))

    def test_both_have_what_they_should_have_and_pypi_shows_the_readme(self) -> None:
        building.check(self.wheel, self.sdist)

    def test_a_file_that_is_missing_or_too_much_is_found(self) -> None:
        changed = Path(self.folder.name) / self.wheel.name
        for leave, add, said in (
            ("fsdp_optim/py.typed", "", "without .'fsdp_optim/py.typed'"),
            ("", "tests/test_x.py", "with .'tests/test_x.py'"),
        ):
            with zipfile.ZipFile(self.wheel) as source, zipfile.ZipFile(changed, "w") as target:
                for name in source.namelist():
                    if name != leave:
                        target.writestr(name, source.read(name))
                if add:
                    target.writestr(add, "")
            with self.assertRaisesRegex(SystemExit, said):
                building.check(changed, self.sdist)

    def test_metadata(self) -> None:
        self.assertEqual(self.metadata["Name"], "fsdp-optim")
        self.assertEqual(self.metadata["Version"], fsdp_optim.__version__)
        self.assertEqual(self.metadata["License-Expression"], "BSD-3-Clause")
        self.assertEqual(self.metadata["Requires-Python"], ">=3.10")
        urls = dict(url.split(", ") for url in self.metadata.get_all("Project-URL", []))
        self.assertEqual(urls["Source"], REPOSITORY)
        self.assertEqual(urls["Changelog"], f"{REPOSITORY}/blob/v9/CHANGELOG.md")

    def test_who_has_no_fairscale_needs_none(self) -> None:
        needed = [
            requirement for requirement in self.metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement
        ]
        names = {re.split(r"[^\w-]", requirement)[0] for requirement in needed}
        self.assertEqual(names, {"click", "torch", "msgspec", "numpy", "rich", "tqdm", "xxhash"})
        self.assertLessEqual({"fairscale", "fsspec", "s3"}, set(self.metadata.get_all("Provides-Extra", [])))
        of_extra = [
            requirement
            for requirement in self.metadata.get_all("Requires-Dist", [])
            if 'extra == "fairscale"' in requirement
        ]
        self.assertEqual(len(of_extra), 1)
        self.assertTrue(of_extra[0].startswith("fairscale>=0.4.13"), of_extra)

    def test_the_readme_stands_alone_on_pypi(self) -> None:
        text = str(self.metadata.get_payload())
        links = [match["to"] for match in building.LINK.finditer(text)]
        self.assertTrue(links)
        self.assertEqual([link for link in links if not link.startswith(("https://", "#"))], [])
        self.assertNotIn("```python ranks", text)
        self.assertIn(f"({REPOSITORY}/blob/v9/docs/concepts.md)", text)

    def test_pip_installs_the_wheel(self) -> None:
        """As docs/install.md says; from it alone, without a look at an index."""
        target = Path(self.folder.name) / "by-pip"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
        ]
        done = subprocess.run([*command, str(self.wheel)], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((target / "fsdp_optim" / "py.typed").exists())

    @pytest.mark.slow
    def test_pip_installs_a_clone(self) -> None:
        """As README.md says: `pip install .`, here with the build system that is installed."""
        clone, target = Path(self.folder.name) / "clone", Path(self.folder.name) / "from-clone"
        shutil.copytree(ROOT, clone, ignore=building.LEFT_OUT)
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
        command = [sys.executable, "-m", "pip", "install", "."]
        done = subprocess.run([*command, *options], cwd=clone, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((target / "fsdp_optim" / "py.typed").exists())

    @pytest.mark.slow  # ci.yml installs the wheel in an environment of its own
    def test_the_installed_wheel_works_without_the_sources(self) -> None:
        target = Path(self.folder.name) / "installed"
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(target)
        environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
        smoke = ROOT / "release" / "smoke.py"
        for program in ([str(ROOT / "tests" / "kit" / "imports.py"), "fairscale", str(smoke)],):
            done = subprocess.run(
                [sys.executable, *program], cwd=self.folder.name, env=environment, capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"fsdp-optim {fsdp_optim.__version__} works", done.stdout)


class InstallTest(unittest.TestCase):
    """The documented install commands work. The package is not on an index yet."""

    def test_nothing_says_to_install_what_no_index_has(self) -> None:
        files = [
            ROOT / "README.md",
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("examples/*.py"),
            *ROOT.glob("fsdp_optim/**/*.py"),
        ]
        wrong = [file for file in files if re.search(r"""pip install ['"]?fsdp-optim(?! @)""", file.read_text())]
        self.assertEqual(wrong, [])

    def test_the_page_has_every_extra_and_the_version(self) -> None:
        page = (ROOT / "docs" / "install.md").read_text()
        extras = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE))
        settings = configparser.ConfigParser()
        settings.read(ROOT / "setup.cfg")
        asked = dict(settings["options.extras_require"])
        for name in ("demo", "dev", "docs", "test"):  # of developers
            del asked[name]
        self.assertEqual(extras, {name: re.split(r"[^\w]", wanted)[0] for name, wanted in asked.items()})
        readme = (ROOT / "README.md").read_text()
        self.assertEqual({*re.findall(r"\b\d+\.\d+\.\d+\b", page)}, {fsdp_optim.__version__})
        self.assertIn(f"Version {fsdp_optim.__version__} (beta) · Python 3.10 or newer · torch 2.6 or newer", readme)

    @parameterized.expand(
        [
            ("of an extra", "boto3", "pip install 'boto3>=1.36'"),
            ("with a name like another's", "lightning", "pip install 'lightning>=2.6'"),
            ("without a version", "accelerate", "pip install accelerate"),
            ("of no extra", "gcsfs", "pip install gcsfs"),
        ]
    )
    def test_the_command_for_a_package(self, _: str, package: str, command: str) -> None:
        self.assertEqual(pip_install(package), command)

    def test_the_command_where_the_sources_are_on_the_path_alone(self) -> None:
        with mock.patch("importlib.metadata.requires", side_effect=PackageNotFoundError):
            self.assertEqual(pip_install("boto3"), "pip install boto3")


class ReleaseTest(unittest.TestCase):
    def test_a_tag_that_is_not_the_version_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "fsdp_optim").mkdir()
            (root / "fsdp_optim" / "__init__.py").write_text('__version__ = "1.2.3"\n')
            (root / "CHANGELOG.md").write_text("## Unreleased\n\n## 1.2.30\n")
            with self.assertRaisesRegex(SystemExit, "the tag must be v1.2.3"):
                building.check_tag("v1.2.4", root)
            with self.assertRaisesRegex(SystemExit, "no section '## 1.2.3'"):
                building.check_tag("v1.2.3", root)
            (root / "CHANGELOG.md").write_text("## Unreleased\n\n## 1.2.3 (2030-01-01)\n")
            building.check_tag("v1.2.3", root)

    def test_links_of_the_readme_lead_to_files(self) -> None:
        text = "![p](docs/call.svg) [d](docs) [c](docs/concepts.md#x) [w](https://a.example/b) `[n](o)`\n"
        text += "```python run\n[a](b)\n```\n"
        with self.assertRaisesRegex(SystemExit, "the link o leads to no file"):
            building.for_pypi(text, REPOSITORY, "v1", ROOT)
        got = building.for_pypi(text.replace("`[n](o)`", ""), REPOSITORY, "v1", ROOT)
        for part in (
            f"![p]({REPOSITORY}/raw/v1/docs/call.svg)",
            f"[d]({REPOSITORY}/tree/v1/docs)",
            f"[c]({REPOSITORY}/blob/v1/docs/concepts.md#x)",
            "[w](https://a.example/b)",
            "```python\n[a](b)\n```\n",
        ):
            self.assertIn(part, got)

    def test_the_support_table_is_what_is_tested(self) -> None:
        page = (ROOT / "docs" / "support.md").read_text()
        settings = (ROOT / "setup.cfg").read_text()
        workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
        pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)$", settings, re.MULTILINE)
        self.assertIn(f"python: [{', '.join(map(repr, pythons))}]".replace("'", '"'), workflow)
        self.assertIn(f"| Python | {pythons[0]} | {pythons[-1]} |", page)
        self.assertIn(f"python_requires = >={pythons[0]}\n", settings)
        pins = [
            dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / f"requirements-{which}.txt").read_text(), re.MULTILINE))
            for which in ("oldest", "dev")
        ]
        torchs = [".".join(versions["torch"].split(".")[:2]) for versions in pins]
        self.assertIn(f"| torch | {torchs[0]} | {torchs[1]} |", page)
        self.assertIn("run: make test-oldest", workflow)
        for line in re.findall(r"^    (\w+>=\S+)$", settings, re.MULTILINE):
            name, oldest = re.match(r"(\w+)>=([\d.]+)", line).groups()  # type: ignore[union-attr]
            self.assertEqual(f"{pins[0][name]}.0"[: len(oldest) + 2], f"{oldest}.0", name)

    @parameterized.expand(["accelerate", "lightning", "peft", "torchtitan", "verl"])
    def test_the_versions_of_trainers_are_pinned_and_stated(self, plugin: str) -> None:
        """The tests install the version that a plug-in and its page name as tested; each plug-in has an extra."""
        source = (ROOT / "fsdp_optim" / "integrations" / f"{plugin}.py").read_text()
        written = re.search(r"^TESTED = (.+)$", source, re.MULTILINE)
        self.assertIsNotNone(written)
        tested = ast.literal_eval(written[1])  # type: ignore[index]
        pins = "".join((ROOT / f"requirements-dev{which}.txt").read_text() for which in ("", "-nodeps"))
        page = (ROOT / "docs" / "integrations.md").read_text()
        for package, version in (tested if isinstance(tested, dict) else {plugin: tested}).items():
            self.assertRegex(pins, rf"(?m)^{package}=={re.escape(version)}(;|$)")
            self.assertIn(f"{package} {version}", page)
        self.assertRegex((ROOT / "setup.cfg").read_text(), rf"(?m)^{plugin} = {plugin}\b")

    def test_a_release_keeps_no_token(self) -> None:
        workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
        publish = workflow[workflow.index("  publish:") :]
        for part in ("needs: [test, build]", "environment: pypi", "id-token: write", "pypa/gh-action-pypi-publish@"):
            self.assertIn(part, publish)
        self.assertNotIn("secrets.", workflow)

    def test_the_version_has_one_place(self) -> None:
        self.assertRegex((ROOT / "setup.cfg").read_text(), r"(?m)^version = attr: fsdp_optim\.__version__$")
        self.assertNotIn("\nversion =", (ROOT / "pyproject.toml").read_text())
        self.assertRegex(fsdp_optim.__version__, r"^\d+\.\d+\.\d+$")
        self.assertEqual(building.version_of(ROOT), fsdp_optim.__version__)


if __name__ == "__main__":
    unittest.main()
