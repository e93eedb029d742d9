"""The exit code of every command: 0 fine; 1 differs, damaged or unfinished; 2 wrong use, or nothing is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit.commands import CALLS, Places, called, fill

import fsdp_optim
from fsdp_optim.cli.app import COMMANDS

NO_CHECKPOINT = {"completion"}
REMOVES_ONLY = {"prune"}  # passes damaged checkpoints over, and says so


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    fill(root)
    return root


@pytest.fixture
def places(made: Path, tmp_path: Path) -> Places:
    root = tmp_path / "root"
    shutil.copytree(made, root)
    return Places(str(root), str(tmp_path / "out"), local=str(tmp_path))


def one_line(err: str) -> bool:
    return err.startswith("fsdp-optim: ") and err.count("\n") == 1


def test_every_command_is_in_the_table() -> None:
    assert set(CALLS) | NO_CHECKPOINT == set(COMMANDS)


@pytest.mark.parametrize("name", CALLS)
def test_fine(places: Places, name: str) -> None:
    assert called(name, *CALLS[name](places))[0] == 0


@pytest.mark.parametrize("name", CALLS)
def test_damaged(places: Places, name: str) -> None:
    """A file is shorter than the manifest says."""
    file = Path(places.checkpoint) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = called(name, *CALLS[name](places))
    assert code == (0 if name in REMOVES_ONLY else 1), (out, err)
    assert "step-1" in out + err


@pytest.mark.parametrize("name", CALLS)
def test_not_there(places: Places, name: str) -> None:
    shutil.rmtree(places.run)
    code, _, err = called(name, *CALLS[name](places))
    assert code == 2, err
    assert one_line(err) or name == "doctor", err


@pytest.mark.parametrize("name", CALLS)
def test_unfinished(places: Places, name: str) -> None:
    """Only what a killed save has left is there: `ls` names it, and it is no checkpoint for the others."""
    checkpoint = Path(places.checkpoint)
    unfinished = checkpoint.with_name(f"{checkpoint.name}.saving-0123456789abcdef")
    checkpoint.rename(unfinished)
    (unfinished / "fsdp_optim.json").unlink()
    code, out, err = called(name, *CALLS[name](places))
    assert code == (1 if name == "ls" else 2), (out, err)
    if name == "ls":
        assert unfinished.name in out
        assert "unfinished" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_use(places: Places, name: str) -> None:
    words = CALLS[name](places) if name in CALLS else []
    for wrong in ([*words, "--no-such-option"], []):
        code, out, err = called(name, *wrong)
        assert (code, out) == (2, ""), wrong
        assert one_line(err), err


def test_different(places: Places) -> None:
    other = f"{places.out}/thin"
    shutil.copytree(places.checkpoint, other)
    fsdp_optim.thin(other)
    assert called("diff", places.checkpoint, other)[0] == 1


def test_one_of_two_is_damaged(places: Places) -> None:
    """`ls` and `verify` of a folder are 1 where one checkpoint is damaged; `latest` gives the other one."""
    newer = Path(places.run) / "step-2"
    shutil.copytree(places.checkpoint, newer)
    (newer / "model.safetensors").write_bytes(b"")
    assert called("ls", places.run)[0] == 1
    assert called("verify", places.run, "--quiet")[0] == 1
    code, out, _ = called("latest", places.run)
    assert (code, out) == (0, f"{places.checkpoint}\n")
