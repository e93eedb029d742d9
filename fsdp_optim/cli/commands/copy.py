"""`fsdp-optim copy`: a checkpoint of this library to another place, byte for byte."""

from __future__ import annotations

import time
from typing import Any

import click

from fsdp_optim.cli.options import PATH, json_option, memory_option, progress_of, quiet_option, storage_options
from fsdp_optim.cli.output import plain, print_json
from fsdp_optim.cli.units import counted, sized


@click.command("copy")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--overwrite", is_flag=True, help="replace the checkpoint at DST")
@click.option("--not-durable", is_flag=True, help="do not wait until the bytes are on the disk")
@json_option
@memory_option
@quiet_option
@storage_options
def command(src: str, dst: str, as_json: bool, memory: int, quiet: bool, **given: Any) -> None:
    """Copy the checkpoint SRC to DST, a folder or a URL, byte for byte, and compare all bytes with their checksums meanwhile.

    The copy is complete or absent. SRC is a checkpoint of this library; `fsdp-optim convert` reads all others.
    """
    from fsdp_optim import api

    begin = time.monotonic()
    done = api.copy(
        src,
        dst,
        overwrite=given["overwrite"],
        durable=not given["not_durable"],
        bucket_nbytes=memory,
        progress=progress_of(quiet=quiet),
        storage_options=given["storage_options"],
    )
    seconds = max(time.monotonic() - begin, 1e-9)
    if as_json:
        print_json({**plain(done), "seconds": seconds})
        return
    verified = "" if done.has_checksums else ", not verified: it was saved without checksums"
    speed = f"{sized(done.nbytes)} in {seconds:.1f} s ({sized(done.nbytes / seconds)}/s)"
    click.echo(f"{done.path}: {counted(done.num_files, 'file')}, {speed}{verified}")
