"""`fsdp-optim verify`: read every byte of a checkpoint, or of all checkpoints in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import json_option, memory_option, progress_of, quiet_option, storage_options
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted, sized

if TYPE_CHECKING:
    from fsdp_optim.api import VerifyResult


@click.command("verify")
@click.argument("path")
@json_option
@memory_option
@quiet_option
@storage_options
def command(path: str, as_json: bool, memory: int, quiet: bool, storage_options: dict[str, Any] | None) -> None:
    """Read every byte of the checkpoint PATH, and compare what has a checksum with it."""
    from fsdp_optim import api

    done = api.verify(path, bucket_nbytes=memory, progress=progress_of(quiet=quiet), storage_options=storage_options)
    if as_json:
        print_json(done)
    else:
        click.echo(_line(done))


def _line(done: VerifyResult) -> str:
    what = f"{counted(done.num_tensors, 'tensor')} ({sized(done.nbytes)})"
    if done.has_checksums:
        return f"{done.path}: complete: {what} are as they were saved, by their checksums"
    why = (
        "it was saved without checksums"
        if done.format == "fsdp_optim"
        else f"the format {done.format} has no checksums"
    )
    return f"{done.path}: {what} are there and can be read; changed bytes would not show: {why}"
