"""Every command takes URLs in the place of paths, and does the same there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import fsspec
import pytest
from kit.commands import CALLS, Places, called, fill

import fsdp_optim
from fsdp_optim.cli.app import COMMANDS

WRITES = {"average": "averaged", "convert": "converted", "copy": "copied", "merge-adapter": "merged"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    fill(root)
    return root


@pytest.fixture
def local(made: Path, tmp_path: Path) -> Places:
    shutil.copytree(made, tmp_path / "local")
    (tmp_path / "local-out").mkdir()
    return Places(str(tmp_path / "local"), str(tmp_path / "local-out"), local=str(tmp_path / "local-out"))


@pytest.fixture(params=["memory", "file"])
def there(made: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Places:
    """The same checkpoints under a URL."""
    url = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/there"
    system, _ = fsspec.core.url_to_fs(url)
    system.put(str(made), f"{url}/root", recursive=True)
    return Places(f"{url}/root", f"{url}/out", local=str(tmp_path))


def told(out: str, places: Places) -> str:
    """What a command says, without what differs between places: their names, times, and the word for a place."""
    for url in (places.out, places.root, places.local):
        for name in (url, url.removeprefix("file://")):
            out = out.replace(name, "ROOT")
    return re.sub(r"[\d.]+ (?:m?s|min|.?B/s)", "TIME", out)


@pytest.mark.parametrize("name", CALLS)
def test_as_on_a_path(local: Places, there: Places, name: str) -> None:
    code, out, err = called(name, *CALLS[name](there))
    assert (code, err) == (0, ""), err
    assert told(out, there) == told(called(name, *CALLS[name](local))[1], local)
    if name in WRITES:
        places = (f"{local.out}/{WRITES[name]}", f"{there.out}/{WRITES[name]}")
        assert fsdp_optim.diff(*places).equal
        assert fsdp_optim.verify(places[1], progress=False).has_checksums
    if name == "thin":
        assert not fsdp_optim.inspect(there.checkpoint).has_optim


def test_the_table_is_complete() -> None:
    assert set(CALLS) | {"completion"} == set(COMMANDS)


def test_ls_shows_unfinished_saves(there: Places) -> None:
    name = "step-2/.saving-0123456789abcdef"
    system, path = fsspec.core.url_to_fs(f"{there.run}/{name}/claim")
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe(path, b"{}")
    code, out, err = called("ls", there.run)
    assert (code, err) == (1, "")
    assert f"{name} " in out
    assert "unfinished" in out
    assert fsdp_optim.unfinished_saves(there.run) == [name]


def test_pages_and_files_at_urls(there: Places) -> None:
    """What is written for people is written at a URL too, replaced where it is a page, and refused where it is a file."""
    for words, begin in (
        (["diff", there.checkpoint, there.checkpoint, "--html", f"{there.out}/page.html"], b"<!doctype html>"),
        (["inspect", there.checkpoint, "--html", f"{there.out}/page.html"], b"<!doctype html>"),
        (["extract", there.checkpoint, "0.weight", "-o", f"{there.out}/weight.npy"], b"\x93NUMPY"),
    ):
        code, _, err = called(*words)
        assert (code, err) == (0, ""), (words, err)
        system, path = fsspec.core.url_to_fs(words[-1])
        assert system.cat_file(path).startswith(begin)
        code, _, err = called(*words)
        is_file = words[0] == "extract"
        assert (code, "already exists" in err) == (2 if is_file else 0, is_file), (words, err)
