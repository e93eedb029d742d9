"""A call of every command on a folder of checkpoints, for tables of cases: `fsdp-optim COMMAND ...` in this process.

places = Places(root)            # root/run has checkpoints; root may be a URL
for name, words in CALLS.items():
    called(name, *words(places))
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim.cli.app import main


def called(*arguments: object) -> tuple[int, str, str]:
    """The exit code, the standard output and the standard error of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


@dataclass(frozen=True)
class Places:
    """Where a call reads and writes. `root`: a folder or a URL; `out`: a folder or a URL that is not there yet."""

    root: str
    out: str
    step: str = "step-1"
    local: str = ""

    @property
    def run(self) -> str:
        return f"{self.root}/run"

    @property
    def checkpoint(self) -> str:
        return f"{self.run}/{self.step}"

    @property
    def adapter(self) -> str:
        return f"{self.root}/adapter"


def model_of(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))


def fill(root: Path, *, width: int = 6) -> None:
    """Make run/step-1, with an optimizer, and a LoRA adapter of its first layer."""
    model = model_of(width)
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(3, width)).sum().backward()
    optim.step()
    options = fsdp_optim.SaveOptions(durable=False, progress=False)
    fsdp_optim.save(root / "run" / "step-1", model, optim, step=1, options=options)
    adapter = root / "adapter"
    adapter.mkdir()
    factors = {"A": torch.randn(2, width), "B": torch.randn(4, 2)}
    named = {f"base_model.model.0.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))


Words = Callable[[Places], list[str]]

CALLS: dict[str, Words] = {
    "average": lambda at: [at.checkpoint, at.checkpoint, "-o", f"{at.out}/averaged", "--quiet"],
    "convert": lambda at: [at.checkpoint, f"{at.out}/converted", "--quiet"],
    "copy": lambda at: [at.checkpoint, f"{at.out}/copied", "--quiet"],
    "diff": lambda at: [at.checkpoint, at.checkpoint],
    "doctor": lambda at: [at.checkpoint],
    "extract": lambda at: [at.checkpoint, "0.weight", "-o", f"{at.local}/weight.npy"],
    "inspect": lambda at: [at.checkpoint],
    "latest": lambda at: [at.run],
    "ls": lambda at: [at.run],
    "merge-adapter": lambda at: [at.checkpoint, at.adapter, "-o", f"{at.out}/merged", "--quiet"],
    "prune": lambda at: [at.run, "--keep-last", "1"],
    "show": lambda at: [at.checkpoint, "0.weight"],
    "verify": lambda at: [at.checkpoint, "--quiet"],
    "thin": lambda at: [at.checkpoint],
}
"""By command, the words of a call that ends well. `thin` is the last one, because it changes the checkpoint."""
