"""A user's mypy, in strict mode, accepts what README.md and the docs print: the package has a py.typed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kit.examples import BLOCKS

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".mypy_cache" / "examples"
LENIENT = ("--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs", "--check-untyped-defs")
"""Functions in examples have no annotations; what is in them is checked all the same."""

PROGRAMS = [
    (where, how, code)
    for where, how, code in BLOCKS
    if how in ("run", "ranks=2") or ("import fsdp_optim\n" in code and "given=" not in how)
]
"""The examples that are complete programs."""

WRONG = """
import torch
import fsdp_optim

model = torch.nn.Linear(1, 1)
with fsdp_optim.CheckpointManager("run", model, every=1) as manager:
    reveal_type(manager.resume())
    reveal_type(manager.restored)
    reveal_type(manager.should_stop)
    reveal_type(fsdp_optim.gather_full_model_state_dict(model))
    reveal_type(fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None))
    manager.restored = "another"
    manager.no_such_attribute
fsdp_optim.no_such_function
fsdp_optim.save("run/1", optimizer=model)
"""
REVEALED = ["int", "fsdp_optim.results.calls.LoadResult | None", "bool", "dict[str, Any] | None", "dict[str, Any]"]


@functools.cache
def printed() -> list[tuple[str, str]]:
    """By example, each line that mypy prints about it, with the settings of no project; the examples, and WRONG."""
    with tempfile.TemporaryDirectory() as folder:
        names = {}
        for number, (where, _, code) in enumerate([*PROGRAMS, ("wrong", "", WRONG)]):
            names[f"example_{number}.py"] = where
            Path(folder, f"example_{number}.py").write_text(code)
        command = [sys.executable, "-m", "mypy", "--strict", *LENIENT, "--config-file=", "--ignore-missing-imports"]
        done = subprocess.run(
            [*command, "--follow-imports=silent", "--no-error-summary", f"--cache-dir={CACHE}", *sorted(names)],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    lines = [line.partition(":") for line in done.stdout.splitlines()]
    return [(names[file], said) for file, _, said in lines]


def test_the_examples_have_no_errors() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/manager.md"} <= {where.partition(":")[0] for where, *_ in PROGRAMS}
    assert [(where, said) for where, said in printed() if where != "wrong"] == []


def test_types_are_seen_and_mistakes_are_found() -> None:
    lines = [said for where, said in printed() if where == "wrong"]
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert [each.replace("builtins.", "") for each in revealed] == REVEALED
    errors = [line.rpartition("[")[2].rstrip("]") for line in lines if " error:" in line]
    assert errors == ["misc", "assignment", "attr-defined", "attr-defined", "call-arg"], lines
