"""`fsdp-optim doctor`: what a path is, whether it is complete, and the line of Python that loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.failing import WRONG
from fsdp_optim.cli.options import PATH, json_option, storage_options
from fsdp_optim.cli.output import end_broken, print_json, print_lines
from fsdp_optim.cli.roots import name_of
from fsdp_optim.cli.units import counted, sized

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointInfo, Diagnosis

_KINDS = {"root": "a folder of checkpoints", "unfinished": "an unfinished save", "none": "no checkpoint"}


@click.command("doctor")
@click.argument("folder", type=PATH)
@json_option
@storage_options
def command(folder: str, as_json: bool, storage_options: dict[str, Any] | None) -> None:
    """Say what FOLDER is: a checkpoint, a folder of checkpoints, an unfinished save or none; and what is missing there.

    Sizes are compared, bytes are not: `fsdp-optim verify` does that.
    """
    from fsdp_optim import api

    seen = api.diagnose(folder, storage_options=storage_options)
    if as_json:
        print_json(seen)
    else:
        print_lines(_lines(seen))
    if seen.kind == "none":
        raise click.exceptions.Exit(WRONG)
    if not seen.complete:
        end_broken()


def _lines(seen: Diagnosis) -> Iterator[str]:
    kind = _KINDS.get(seen.kind) or f"a checkpoint{f' ({seen.format})' if seen.format else ''}"
    yield f"{seen.path}: {kind}"
    if seen.kind in ("checkpoint", "root"):
        yield f"  complete:   {'yes' if seen.complete else 'no'}"
    if seen.step is not None:
        yield f"  step:       {seen.step}"
    if seen.world_size:
        yield f"  ranks:      {seen.world_size}"
    if seen.has_optim is not None:
        yield f"  optimizer:  {'yes' if seen.has_optim else 'no'}"
    if seen.nbytes:
        yield f"  bytes:      {sized(seen.nbytes)}"
    if seen.load:
        yield f"  to load it: {seen.load}"
    for problem in seen.problems:
        yield f"  problem:    {problem}"
    if seen.checkpoints:
        yield f"  {counted(len(seen.checkpoints), 'checkpoint')}, the newest first:"
        yield from (f"    {_line(info)}" for info in seen.checkpoints)


def _line(info: CheckpointInfo) -> str:
    return f"{name_of(info)}: {'complete' if info.complete else 'damaged'}"
