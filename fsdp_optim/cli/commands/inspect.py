"""`fsdp-optim inspect`: what a checkpoint has, without its elements."""

from __future__ import annotations

from typing import Any

import click

from fsdp_optim.cli.options import json_option, storage_options
from fsdp_optim.cli.output import print_json, print_lines


@click.command("inspect")
@click.argument("path")
@click.option("--all", "shows_all", is_flag=True, help="every tensor on a line of its own, without folding layers")
@json_option
@storage_options
def command(path: str, shows_all: bool, as_json: bool, storage_options: dict[str, Any] | None) -> None:
    """Show the format of the checkpoint PATH, who saved it, the modules with shapes, dtypes and bytes, and the optimizer."""
    from fsdp_optim import api
    from fsdp_optim.cli.tree import shown

    summary = api.inspect(path, storage_options=storage_options)
    if as_json:
        print_json(summary)
    else:
        print_lines(shown(summary, folds=not shows_all))
