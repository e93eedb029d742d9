"""Build the wheel and the sdist from a copy of the tree, and check their content.

    python -m release.build --out dist [--repository https://... --ref v1.2.3] [--tag v1.2.3]

On PyPI the README stands alone, and the metadata names the repository. The tree names none, so that a fork releases itself: with
--repository the copy gets project_urls, and the README's relative links lead to the files there, at --ref. --tag must be
`v` and the version in fsdp_optim/__init__.py, which CHANGELOG.md must have a section for.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *(".*", "build", "dist", "*.egg-info", "__pycache__"),  # .git, .venv, caches
)
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")


def version_of(root: Path) -> str:
    """The version, from its one place."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "fsdp_optim" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "fsdp_optim/__init__.py has no __version__"
    return found[1]


def check_tag(tag: str, root: Path) -> None:
    """Refuse a tag that is not the version's, or whose changes nobody has written down."""
    version = version_of(root)
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and fsdp_optim.__version__ is {version}: the tag must be v{version}")
    if not re.search(rf"^## {re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md has no section '## {version}': rename 'Unreleased', and begin a new one")


def for_pypi(text: str, repository: str, ref: str, root: Path) -> str:
    """The README with absolute links. Raises for one that leads to no file."""

    def absolute(match: re.Match[str]) -> str:
        path, hash_, anchor = match["to"].partition("#")
        if re.match(r"[a-z]+:", path) or not path:
            return match[0]
        if not (root / path).exists():
            raise SystemExit(f"README.md: the link {match['to']} leads to no file")
        kind = "raw" if match["mark"] else "tree" if (root / path).is_dir() else "blob"
        return f"{match['mark']}[{match['text']}]({repository}/{kind}/{ref}/{path}{hash_}{anchor})"

    parts = re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(absolute, part) for part in parts[::2]]
    parts[1::2] = [re.sub(r"\A```(\w+)[^\n]*", r"```\1", part) for part in parts[1::2]]  # what it says to the tests
    return "".join(parts)


def urls_of(repository: str, ref: str) -> str:
    """The lines of project_urls in the section [metadata] of setup.cfg."""
    places = {
        "Documentation": f"{repository}/tree/{ref}/docs",
        "Source": repository,
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/security/policy",
    }
    return "project_urls =\n" + "".join(f"    {name} = {url}\n" for name, url in places.items())


def build(out: Path, repository: str | None = None, ref: str = "main", root: Path = ROOT) -> list[Path]:
    """Build into the folder `out`; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fsdp_optim"
        shutil.copytree(root, copy, ignore=LEFT_OUT)
        if repository is not None:
            readme, settings = copy / "README.md", copy / "setup.cfg"
            readme.write_text(for_pypi(readme.read_text(), repository, ref, root))
            metadata = "[metadata]\n"
            settings.write_text(settings.read_text().replace(metadata, metadata + urls_of(repository, ref)))
        # The sdist first, and the wheel from it: what is missing in the sdist is missing in the wheel, and is found.
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    version = version_of(root)
    return [out / f"fsdp_optim-{version}-py3-none-any.whl", out / f"fsdp_optim-{version}.tar.gz"]


def check(wheel: Path, sdist: Path, root: Path = ROOT) -> None:
    """Raise unless both have the content that they should have, and PyPI can show the README."""
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], check=True)
    modules = {file.relative_to(root).as_posix() for file in (root / "fsdp_optim").rglob("*.py")}
    wanted = modules | {"fsdp_optim/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    if inside != wanted:
        raise SystemExit(f"{wheel.name}: without {sorted(wanted - inside)}, and with {sorted(inside - wanted)}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        raise SystemExit(f"{wheel.name}: has no LICENSE")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = wanted | {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "requirements-dev.txt"}
    needed |= {
        "tests/conftest.py",
        "tests/kit/forked.py",
        "docs/concepts.md",
        "docs/layouts.svg",
        "tests/data/golden",
    }
    needed |= {file.relative_to(root).as_posix() for file in (root / "examples").glob("*.py")}
    if needed - names:
        raise SystemExit(f"{sdist.name}: without {sorted(needed - names)}")
    strange = [name for name in names if name.endswith((".pyc", ".so")) or name.startswith((".git", ".venv", "build/"))]
    if strange:
        raise SystemExit(f"{sdist.name}: with {strange}")


def main(arguments: list[str] | None = None) -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the wheel and the sdist")
    parser.add_argument("--repository", help="the repository's address, for the metadata and the README's links")
    parser.add_argument(
        "--ref", default="main", help="the branch or the tag that the links lead to (default: %(default)s)"
    )
    parser.add_argument("--tag", help="the tag that is released")
    asked = parser.parse_args(arguments)
    if asked.tag is not None:
        check_tag(asked.tag, ROOT)
    files = build(asked.out, asked.repository, asked.ref)
    check(*files)
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
