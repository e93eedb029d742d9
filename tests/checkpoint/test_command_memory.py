"""Every command stays within `--memory`, whatever the size of a value, of the checkpoint or of the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import torch
from kit.commands import CALLS, Places
from kit.forked import LIBRARY, run
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim.cli.app import group

MEMORY = 16  # MiB
MARGIN = 24  # MiB: for what is not elements, on a busy machine
WIDTH = 4096  # a value has 64 MiB
TRIES = 3
SCRIPT = """
import io, shutil, sys, contextlib, torch
from pathlib import Path
from kit.peaks import Peak
from fsdp_optim.cli.app import main

torch.set_num_threads(2)

def called(words, out):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    for path in Path(out).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

called({small!r}, {out!r})  # imports
mib = []
while len(mib) < {tries} and not (mib and min(mib) < {limit}):
    with Peak() as peak:
        called({words!r}, {out!r})
    mib.append(peak.mib)
print(min(mib))
"""


def fill(root: Path, width: int) -> None:
    """A checkpoint of one matrix with its momentum, and an adapter of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0].weight.grad = torch.ones(width, width)
    optim.step()
    options = fsdp_optim.SaveOptions(durable=False, progress=False)
    fsdp_optim.save(root / "run" / "step-1", model, optim, step=1, options=options)
    adapter = root / "adapter"
    adapter.mkdir()
    factors = {"A": torch.randn(2, width), "B": torch.randn(width, 2)}
    named = {f"base_model.model.0.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    fill(root / "small", 8)
    fill(root / "large", WIDTH)
    return root


def words_of(name: str, places: Places) -> list[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = {option for param in command.params for option in param.opts}
    given = {"--memory": ["--memory", f"{MEMORY}MiB"], "--not-durable": ["--not-durable"]}
    return [name, *CALLS[name](places), *(word for option in given if option in options for word in given[option])]


@pytest.mark.parametrize("name", CALLS)
def test_memory(made: Path, tmp_path: Path, name: str) -> None:
    small, large = (
        words_of(name, Places(str(made / size), str(tmp_path), local=str(tmp_path))) for size in ("small", "large")
    )
    done = run(
        SCRIPT.format(small=small, words=large, out=str(tmp_path), tries=TRIES, limit=MEMORY + MARGIN),
        preload=LIBRARY,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < MEMORY + MARGIN
