"""`fsdp-optim thin`: remove the optimizer of a checkpoint, in place."""

from __future__ import annotations

from typing import Any

import click

from fsdp_optim.cli.options import PATH, json_option, quiet_option, storage_options
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import sized


@click.command("thin")
@click.argument("path", type=PATH)
@json_option
@quiet_option
@storage_options
def command(path: str, as_json: bool, quiet: bool, storage_options: dict[str, Any] | None) -> None:
    """Remove the optimizer of the checkpoint PATH, which this library has saved. The weights stay as they are, with
    their checksums, which `fsdp-optim verify` compares.

    A killed call leaves the checkpoint complete, with the optimizer or without it.
    """
    from fsdp_optim import api

    done = api.thin(path, storage_options=storage_options)
    if as_json:
        print_json(done)
    elif not quiet:
        click.echo(
            f"{done.path}: freed {sized(done.freed_nbytes)}" if done.freed_nbytes else f"{done.path}: has no optimizer"
        )
