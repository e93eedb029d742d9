"""Thin where a folder is special: read-only, linked, of another format, thin already, damaged. An error, or the right result."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.checkpoint_format import all_bytes, check_folder
from kit.compare import check_same, refused
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, SaveOptions
from fsdp_optim.storage.posix import OpenFolder

QUICK = SaveOptions(durable=False, progress=False)
CONVERT = fsdp_optim.ConvertOptions(durable=False, progress=False)


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()
    return model, optim


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fsdp_optim.save(tmp_path / "step", *made(), step=7, options=QUICK)
    return tmp_path / "step"


def check_full(path: Path) -> None:
    """It loads with its optimizer, verified."""
    fsdp_optim.verify(path, progress=False)
    model, optim = made(1)
    fsdp_optim.load(path, model, optim)
    wanted_model, wanted_optim = made()
    check_same("weights", dict(model.state_dict()), dict(wanted_model.state_dict()))
    check_same("state", optim.state_dict()["state"], wanted_optim.state_dict()["state"])


def check_thin(path: Path) -> None:
    """It loads without an optimizer, verified."""
    fsdp_optim.verify(path, progress=False)
    assert not fsdp_optim.inspect(path).has_optim
    model, _ = made(1)
    fsdp_optim.load(path, model)
    check_same("weights", dict(model.state_dict()), dict(made()[0].state_dict()))


# ------------------------------------------------------------------------------------------ folders that cannot be written


def failing(name: str, number: int, code: int) -> Any:
    """Let a function of os fail from its call `number` on; an `open` counts where it makes a file."""
    real, left = getattr(os, name), [number]

    def call(*args: Any, **options: Any) -> Any:
        if name != "open" or args[1] & os.O_CREAT:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return mock.patch.object(os, name, call)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "rename"])
def test_a_folder_that_cannot_be_written(path: Path, name: str, code: int) -> None:
    before = all_bytes(path)
    with failing(name, 0, code):
        refused(lambda: fsdp_optim.thin(path), CheckpointError, str(path), "cannot be", os.strerror(code))
    check_same("files", all_bytes(path), before)
    check_full(path)


def test_files_that_cannot_be_removed(path: Path) -> None:
    """The checkpoint is thin, and the error says that files are left; the next call removes them."""
    with failing("unlink", 0, errno.EPERM):
        refused(lambda: fsdp_optim.thin(path), CheckpointError, str(path), "Operation not permitted")
    check_thin(path)
    assert (path / "optim.safetensors").exists()
    assert fsdp_optim.thin(path).freed_nbytes > 0
    assert not (path / "optim.safetensors").exists()
    check_folder(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="a superuser may write anywhere")
def test_a_read_only_folder(path: Path) -> None:
    before = all_bytes(path)
    path.chmod(0o555)
    try:
        refused(lambda: fsdp_optim.thin(path), CheckpointError, str(path), "Permission denied")
    finally:
        path.chmod(0o755)
    check_same("files", all_bytes(path), before)


# ------------------------------------------------------------------------------------------ links


def test_a_snapshot_of_hard_links_stays(path: Path, tmp_path: Path) -> None:
    """`cp -al` of a checkpoint has the same files: thin takes names from one folder, and changes no file."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(path, snapshot, copy_function=os.link)
    before = all_bytes(snapshot)
    fsdp_optim.thin(path)
    check_thin(path)
    check_same("snapshot", all_bytes(snapshot), before)
    check_full(snapshot)


def test_a_link_to_a_checkpoint(path: Path, tmp_path: Path) -> None:
    """The checkpoint behind the link is thin, and the link stays."""
    link = tmp_path / "newest"
    link.symlink_to(path, target_is_directory=True)
    assert fsdp_optim.thin(link).freed_nbytes > 0
    assert link.is_symlink()
    check_thin(path)
    check_thin(link)
    assert fsdp_optim.thin(path).freed_nbytes == 0


@pytest.mark.parametrize("name", ["optim.safetensors", "model.safetensors", "fsdp_optim.json"])
def test_a_file_that_is_a_link(path: Path, tmp_path: Path, name: str) -> None:
    """A checkpoint has no links, so it is refused; what the link leads to stays."""
    elsewhere = tmp_path / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    refused(lambda: fsdp_optim.thin(path), CheckpointError, str(path))
    assert (path / name).is_symlink()
    assert elsewhere.read_bytes() == before


# ------------------------------------------------------------------------------------------ what is no checkpoint of this library


def hugging_face(source: Path, folder: Path) -> Path:
    folder.mkdir()
    save_file(dict(made()[0].state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def converted(format: str) -> Callable[[Path, Path], Path]:
    def convert(source: Path, folder: Path) -> Path:
        return Path(fsdp_optim.convert(source, folder, format=format, options=CONVERT).path)

    return convert


FOREIGN: dict[str, Callable[[Path, Path], Path]] = {
    "dcp": converted("dcp"),
    "torch": converted("torch"),
    "torch_file": converted("torch_file"),
    "hugging face": hugging_face,
}


@pytest.mark.parametrize("format", FOREIGN)
def test_other_formats_are_refused(path: Path, tmp_path: Path, format: str) -> None:
    folder = FOREIGN[format](path, tmp_path / "foreign")
    before = all_bytes(folder)
    refused(lambda: fsdp_optim.thin(folder), CheckpointError, str(folder), "of this library alone", "convert")
    check_same("files", all_bytes(folder), before)


# ------------------------------------------------------------------------------------------ again, and while it is read


def test_again_changes_nothing(path: Path) -> None:
    fsdp_optim.thin(path)
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.rglob("*")}
    assert fsdp_optim.thin(path).freed_nbytes == 0
    assert {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.rglob("*")} == before


def reads() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    yield "verify", lambda path: fsdp_optim.verify(path, progress=False)
    yield "convert", lambda path: fsdp_optim.convert(path, path.parent / "to", options=CONVERT)
    yield "copy", lambda path: fsdp_optim.copy(path, path.parent / "to", durable=False)
    yield "diff", lambda path: fsdp_optim.diff(path, path)
    yield "average", lambda path: fsdp_optim.average([path, path], path.parent / "to", options=CONVERT)


@pytest.mark.parametrize("at", [1, 2, 4, 6, 8])
@pytest.mark.parametrize(("name", "read"), list(reads()), ids=lambda value: value if isinstance(value, str) else "")
def test_while_it_is_read(path: Path, name: str, read: Callable[[Path], Any], at: int) -> None:
    """Thinned before read `at` of a file: who reads it gets it as it was, or without optimizer, or raises and writes nothing."""
    real, left = OpenFolder.read_into, [at]

    def thin_first(opened: OpenFolder, *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            fsdp_optim.thin(path)
        return real(opened, *args, **options)

    with mock.patch.object(OpenFolder, "read_into", thin_first), contextlib.suppress(CheckpointError):
        read(path)
    assert left[0] <= 0
    check_thin(path)
    target = path.parent / "to"
    if target.exists():
        fsdp_optim.verify(target, progress=False)
        model, _ = made(2)
        fsdp_optim.load(target, model)
        check_same("weights", dict(model.state_dict()), dict(made()[0].state_dict()))
        if fsdp_optim.inspect(target).has_optim:
            check_full(target)
