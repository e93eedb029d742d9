"""`fsdp-optim extract`: values of a checkpoint as a file of numpy, safetensors or torch."""

from __future__ import annotations

from typing import Any

import click

from fsdp_optim.cli.options import PATH, json_option, memory_option, storage_options
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted, sized


@click.command("extract")
@click.argument("path", type=PATH, metavar="CKPT")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "-o",
    "--output",
    "file",
    required=True,
    metavar="FILE",
    type=PATH,
    help="the new file: .npy for one value, .safetensors or .pt",
)
@click.option("--slice", "part", metavar="SLICE", help='some of the elements of each value: "0:3, :5"')
@click.option("--overwrite", is_flag=True, help="replace the file if it is there")
@click.option("--allow-pickle", is_flag=True, help="unpickle values, which can run any code of their author")
@json_option
@memory_option
@storage_options
def command(
    path: str, names: tuple[str, ...], file: str, part: str | None, as_json: bool, memory: int, **options: Any
) -> None:
    """Write values of the checkpoint CKPT into one file, unsharded: layers.0.weight is a weight, layers.0.weight:exp_avg a value
    of the optimizer's state.
    """
    from fsdp_optim import api

    done = api.extract(path, list(names), file, slice=part, bucket_nbytes=memory, **options)
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done.path}: {counted(done.num_tensors, 'value')}, {sized(done.nbytes)}")
