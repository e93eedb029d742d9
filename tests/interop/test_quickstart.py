"""docs/quickstart.md does what it prints: its programs are saved, its commands run in turn, and their output is what it shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from kit.folders import at

from fsdp_optim.testing import RanksFailed, run_on_ranks

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SAVE_AS = re.compile(r"Save (?:it|this) as `([\w.]+)`")


def steps() -> list[tuple[str, str]]:
    """The steps of a reader of the page: ("train.py", its text), ("sh", a command), ("text", its output), ..."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    listed, at = [], 0
    for fence in FENCE.finditer(page):
        kind = fence["kind"]
        if kind == "python":
            kind = SAVE_AS.findall(page[at : fence.start()])[-1]
        listed.append((kind, fence["text"]))
        at = fence.end()
    return listed


def as_torchrun_does(folder: str, file: str) -> str:
    """Run a program on this rank, whose process group is there already."""
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        at(folder),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def on_live_ranks(command: str, folder: Path) -> str:
    """The same without the start of processes that import torch, which takes most of the time."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node", command
        return "".join(run_on_ranks(as_torchrun_does, int(words[2]), str(folder), words[3]))
    if words[0] == "fsdp-optim":  # its console script
        words[:1] = ["python", "-m", "fsdp_optim"]
    assert words[0] == "python", command
    printed = io.StringIO()
    arguments = words[3:] if words[1] == "-m" else words[2:]
    with at(str(folder)), contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", [words[0], *arguments]):
        if words[1] == "-m":
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(words[2], run_name="__main__")
            assert not ended.value.code, printed.getvalue()
        else:
            runpy.run_path(words[1], run_name="__main__")
    return printed.getvalue()


def by_shell(command: str, folder: Path) -> str:
    """Run a command as it is printed, with the Python of this process."""
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": bin_first,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "runs", [on_live_ranks, pytest.param(by_shell, marks=pytest.mark.slow)], ids=["on live ranks", "as printed"]
)
def test_the_page_does_what_it_says(runs: Callable[[str, Path], str], tmp_path: Path) -> None:
    output, commands, shown = "", 0, 0
    for kind, text in steps():
        if kind.endswith(".py"):
            (tmp_path / kind).write_text(text)
        elif kind == "sh":
            (command,) = text.splitlines()
            output, commands = runs(command, tmp_path), commands + 1
        else:
            assert kind == "text", kind
            for line in text.splitlines():
                assert line in output, f"the page shows {line!r}, but the command says {output!r}"
                shown += 1
    assert (commands, shown) == (4, 5)
    check_that_faults_are_named(tmp_path)


def check_that_faults_are_named(folder: Path) -> None:
    """The page says: all ranks name the parameter of another size, and the file that is gone."""
    program = (folder / "train.py").read_text()
    (folder / "smaller.py").write_text(program.replace("64", "32"))
    newest = folder / "run" / "step-00000040"
    for file, breaks, named in (
        ("smaller.py", lambda: None, "0.weight"),
        ("train.py", (newest / "model.safetensors").unlink, "model.safetensors"),
    ):
        breaks()
        with pytest.raises(RanksFailed) as failed:
            run_on_ranks(as_torchrun_does, 2, str(folder), file)
        assert len(failed.value.errors) == 2
        (message,) = {str(error) for error in failed.value.errors.values()}
        assert named in message, message
        assert newest.exists()
