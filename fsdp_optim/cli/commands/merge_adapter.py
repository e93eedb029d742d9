"""`fsdp-optim merge-adapter`: a checkpoint with a LoRA adapter in its weights."""

from __future__ import annotations

import time
from typing import Any

import click

from fsdp_optim.cli.options import (
    PATH,
    convert_options,
    json_option,
    memory_option,
    only_warnings,
    quiet_option,
    storage_options,
    writing_options,
)
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted, sized


@click.command("merge-adapter")
@click.argument("base", type=PATH)
@click.argument("adapter", type=PATH)
@click.option("-o", "--output", required=True, metavar="OUT", type=PATH, help="the new checkpoint")
@writing_options("OUT")
@memory_option
@json_option
@quiet_option
@storage_options
def command(base: str, adapter: str, output: str, **given: Any) -> None:
    """Merge the LoRA adapter ADAPTER, a folder of PEFT, into the weights of the checkpoint BASE: the new checkpoint OUT.

    BASE may have any format. OUT has no optimizer. What cannot be merged exactly, such as DoRA, is an error, and nothing is
    written.
    """
    from fsdp_optim import api

    with api.launched_ranks() as rank:
        if rank > 0:
            only_warnings()
        begin = time.monotonic()
        done = api.merge_adapter(
            base,
            adapter,
            output,
            overwrite=given["overwrite"],
            options=convert_options(given, rank),
        )
    if rank > 0:
        return
    if given["as_json"]:
        print_json(done)
        return
    seconds = max(time.monotonic() - begin, 1e-9)
    replaced = f", {done.num_replaced} are the adapter's own" if done.num_replaced else ""
    click.echo(
        f"{done.path}: {done.num_merged:,} of {counted(done.num_tensors, 'tensor')} merged{replaced}, {sized(done.nbytes)} "
        f"in {seconds:.1f} s"
    )
