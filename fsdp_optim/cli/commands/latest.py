"""`fsdp-optim latest`: the newest complete checkpoint in a folder, or under a URL."""

from __future__ import annotations

from typing import Any

import click

from fsdp_optim.cli.options import PATH, json_option, storage_options
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted
from fsdp_optim.errors import CheckpointError, wrong_use


@click.command("latest")
@click.argument("root", type=PATH)
@json_option
@storage_options
def command(root: str, as_json: bool, storage_options: dict[str, Any] | None) -> None:
    """Print the path of the newest complete checkpoint in the folder ROOT: the one that a resume loads."""
    from fsdp_optim import api

    newest = api.latest(root, storage_options=storage_options)
    if newest is None:
        if num := len(api.checkpoints(root, storage_options=storage_options)):
            raise CheckpointError(
                f"{root}: has no complete checkpoint, and {counted(num, 'checkpoint')} that cannot be loaded"
            )
        raise wrong_use(f"{root}: has no complete checkpoint")
    if as_json:
        print_json({"path": newest})
    else:
        click.echo(str(newest))
