"""Every command that writes is killed before its file operations: what it writes is complete or absent, and the next call works.

`thin` is killed before each of its operations in test_thin_kill.py; conversions, at each write, in test_convert_killed.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy
import pytest
import torch
from kit.commands import CALLS, Places, called, fill
from kit.compare import check_same
from kit.counted_kill import killed_before
from kit.forked import LIBRARY, run

import fsdp_optim

KILLS = 9  # of each command, spread over its operations
OPERATIONS = ("pwritev", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "open")
SCRIPT = """
import torch
torch.set_num_threads(1)
from fsdp_optim.cli.app import main
assert main({words!r}) == 0
print("left", left[0])
"""
ENOUGH = 1 << 30
TARGETS = {"average": "averaged", "convert": "converted", "copy": "copied", "merge-adapter": "merged"}


def killed(words: list[str], number: int) -> int | None:
    """Run a command in a process that is killed before its operation `number`; how many it made, if it was not killed."""
    code = killed_before(number, OPERATIONS, SCRIPT.format(words=words))
    done = run(code, preload=LIBRARY)
    if done.returncode == -9:
        return None
    assert done.returncode == 0, done.stderr
    return number - int(done.stdout.split()[-1])


def moments(words: list[str]) -> list[int]:
    """Numbers of operations of a command, which is run once to count them."""
    num = killed(words, ENOUGH)
    assert num is not None
    return sorted({round(at) for at in numpy.linspace(0, num - 1, KILLS)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    fill(root, width=3000)
    return root


def places_in(made: Path, folder: Path) -> Places:
    (folder / "out").mkdir(parents=True)
    return Places(str(made), str(folder / "out"), local=str(folder / "out"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_checkpoint(made: Path, tmp_path: Path, name: str) -> None:
    wanted = places_in(made, tmp_path / "wanted")
    numbers = moments([name, *CALLS[name](wanted)])
    outcomes = []
    for number in numbers:
        places = places_in(made, tmp_path / str(number))
        words, target = [name, *CALLS[name](places)], Path(places.out, TARGETS[name])
        assert killed(words, number) is None
        outcomes.append(target.exists())
        if target.exists():
            fsdp_optim.verify(target, progress=False)
            words.append("--overwrite")
        else:
            assert fsdp_optim.latest(places.out) is None
        assert called(*words)[0] == 0
        assert fsdp_optim.diff(target, Path(wanted.out, TARGETS[name])).equal
        check_same("left", [path.name for path in Path(places.out).iterdir()], [target.name])
    assert outcomes[0] is False
    assert outcomes == sorted(outcomes)


@pytest.mark.parametrize("name", TARGETS)
def test_over_a_checkpoint(made: Path, tmp_path: Path, name: str) -> None:
    """The earlier checkpoint is complete until the new one is."""
    counted = places_in(made, tmp_path / "counted")
    wanted = Path(counted.out, TARGETS[name])
    earlier = tmp_path / "earlier"
    fsdp_optim.save(earlier, torch.nn.Linear(7, 3), options=fsdp_optim.SaveOptions(durable=False, progress=False))
    shutil.copytree(earlier, wanted)
    for number in moments([name, *CALLS[name](counted), "--overwrite"])[1::2]:
        places = places_in(made, tmp_path / str(number))
        words, target = [name, *CALLS[name](places), "--overwrite"], Path(places.out, TARGETS[name])
        shutil.copytree(earlier, target)
        assert killed(words, number) is None
        newest = fsdp_optim.latest(places.out)  # between two renames the earlier one has another name
        assert newest is not None
        fsdp_optim.verify(newest, progress=False)
        assert fsdp_optim.diff(newest, earlier).equal or fsdp_optim.diff(newest, wanted).equal
        assert called(*words)[0] == 0
        assert fsdp_optim.diff(target, wanted).equal
        check_same("left", [path.name for path in Path(places.out).iterdir()], [target.name])


def test_extract(made: Path, tmp_path: Path) -> None:
    wanted = places_in(made, tmp_path / "wanted")
    for number in moments(["extract", *CALLS["extract"](wanted)]):
        places = places_in(made, tmp_path / str(number))
        words, file = ["extract", *CALLS["extract"](places)], Path(places.local, "weight.npy")
        assert killed(words, number) is None
        if file.exists():
            words.append("--overwrite")
            check_same("file", file.read_bytes(), Path(wanted.local, file.name).read_bytes())
        assert called(*words)[0] == 0
        check_same("file", file.read_bytes(), Path(wanted.local, file.name).read_bytes())


def test_prune(made: Path, tmp_path: Path) -> None:
    """What is left is complete, and the newest is among it; the next call removes the rest."""
    model = torch.nn.Linear(5, 3)
    for step in range(1, 5):
        options = fsdp_optim.SaveOptions(durable=False, progress=False)
        fsdp_optim.save(tmp_path / "run" / f"step-{step}", model, step=step, options=options)
    shutil.copytree(tmp_path / "run", tmp_path / "counted")
    for number in moments(["prune", str(tmp_path / "counted"), "--keep-last", "2"]):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", root)
        words = ["prune", str(root), "--keep-last", "2"]
        assert killed(words, number) is None
        infos = fsdp_optim.checkpoints(root)
        assert all(info.complete for info in infos)
        assert [info.step for info in infos[:2]] == [4, 3]
        for info in infos:
            fsdp_optim.verify(info.path, progress=False)
        assert called(*words)[0] == 0
        check_same("left", sorted(path.name for path in root.iterdir()), ["step-3", "step-4"])
