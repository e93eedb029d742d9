"""`fsdp-optim convert`: write a checkpoint again, in another format or in other files."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import (
    PATH,
    VIEWS_HELP,
    FormatName,
    convert_options,
    json_option,
    memory_option,
    only_warnings,
    quiet_option,
    storage_options,
    views_in,
    writing_options,
)
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted, sized
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.registry import format_names

if TYPE_CHECKING:
    from fsdp_optim.plugins import Format

_SHARDS, _UNIVERSAL = "fairscale_shards", "deepspeed_universal"


@click.command("convert")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--format", type=FormatName(), default="safetensors", metavar="NAME", help="the new format (safetensors)")
@click.option("--world-size", type=int, metavar="N", help="the number of ranks, for formats with a part for each")
@click.option("--key-by", type=click.Choice(["id", "name"]), help="the keys of parameters in the optimizer's dict")
@memory_option
@click.option(
    "--names",
    metavar="FILE",
    type=PATH,
    help="the names of the optimizer's parameters, a line for each, in order of ids",
)
@click.option("--views", metavar="FILE", type=PATH, help=VIEWS_HELP)
@click.option(
    "--units",
    metavar="FILE",
    type=PATH,
    help="fairscale_shards: JSON with the names that each FSDP unit flattens, by its path",
)
@click.option("--not-flattened", is_flag=True, help="fairscale_shards: for FSDP with flatten_parameters=False")
@click.option("--masters", metavar="NAME", help="deepspeed_universal: the value of the state with the fp32 weights")
@click.option("--fill-missing", is_flag=True, help="deepspeed_universal: write zeros for parameters without state")
@writing_options("DST")
@json_option
@quiet_option
@storage_options
def command(src: str, dst: str, **given: Any) -> None:
    """Write the checkpoint SRC again as DST, bit for bit, in bounded memory.

    SRC is a checkpoint of any format that can be read. With torchrun, each process copies a share of the bytes.
    """
    from fsdp_optim import api

    with api.launched_ranks() as rank:
        if rank > 0:
            only_warnings()
        begin = time.monotonic()
        names, views, format = _files_and_format(given)
        done = api.convert(
            src,
            dst,
            format=format,
            overwrite=given["overwrite"],
            options=convert_options(given, rank, param_names=names, views=views),
        )
    seconds = max(time.monotonic() - begin, 1e-9)
    if rank > 0:
        return
    if given["as_json"]:
        print_json({"path": done.path, "num_tensors": done.num_tensors, "nbytes": done.nbytes, "seconds": seconds})
        return
    speed = sized(done.nbytes / seconds)
    click.echo(
        f"{done.path}: {counted(done.num_tensors, 'tensor')}, {sized(done.nbytes)} in {seconds:.1f} s ({speed}/s)"
    )


def _files_and_format(given: dict[str, Any]) -> tuple[list[str] | None, Sequence[Any], str | Format]:
    """Return the names, the Views and the format that files and flags give.

    Where this process cannot read a file, the format raises that on all processes: if the process ended before the call, the
    others would wait for it.
    """
    names, units, views = None, None, list[Any]()
    try:
        if given["names"] is not None:
            with _named_file("names", given["names"]) as lines:
                names = [line.strip() for line in lines if line.strip()]
        if given["views"] is not None:
            with _named_file("views", given["views"]) as lines:
                views = views_in(lines)
        if given["units"] is not None:
            with _named_file("units", given["units"]) as file:
                units = json.load(file)
    except CheckpointError as error:
        return None, (), _unread(error)
    return names, views, _format(given, units)


def _format(given: dict[str, Any], units: Any) -> str | Format:
    """Return the format that the flags name. Raises CheckpointError, the same everywhere, for a flag that it does not have."""
    from fsdp_optim.plugins import DeepSpeedUniversal, FairscaleShards, TorchFiles

    name, key_by, flattens = given["format"], given["key_by"], False if given["not_flattened"] else None
    of_shards = {"--world-size": given["world_size"], "--units": units, "--not-flattened": flattens}
    _check_flags(name, _SHARDS, [flag for flag, value in of_shards.items() if value is not None])
    of_universal = {"--masters": given["masters"] is not None, "--fill-missing": given["fill_missing"]}
    _check_flags(name, _UNIVERSAL, [flag for flag, is_given in of_universal.items() if is_given])
    if name == _SHARDS:
        if given["world_size"] is None:
            raise wrong_use(f"the format {name} has a file for each rank: give --world-size, the number of ranks")
        if key_by == "name":
            raise wrong_use("fairscale's shards call parameters by id: leave --key-by out")
        return FairscaleShards(given["world_size"], units, flattens)
    if name == _UNIVERSAL and key_by != "id":
        return DeepSpeedUniversal(given["masters"], given["fill_missing"])
    for format in (TorchFiles(), TorchFiles(one_file=True), TorchFiles(for_fairscale=True)):
        if format.name == name and key_by is not None:
            return replace(format, key_by=key_by)
    if key_by == "id" and name in format_names():
        raise wrong_use(f"--key-by: a checkpoint of the format {name} calls parameters by name: leave it out")
    return str(name)


def _check_flags(name: str, format: str, flags: Sequence[str]) -> None:
    """Refuse flags of another format than that of the name."""
    if flags and name != format:
        raise wrong_use(f"{', '.join(flags)}: the format {name} has no such option; {format} has")


def _unread(error: CheckpointError) -> Format:
    """Return a format that raises why a file could not be read when `convert` asks for its writer."""
    from fsdp_optim.plugins import TorchFiles, Writer

    @dataclass(frozen=True)
    class Refusing(TorchFiles):
        def writer(self) -> Writer:
            raise error

    return Refusing()


@contextlib.contextmanager
def _named_file(content: str, name: str) -> Iterator[Any]:
    try:
        with open(name, encoding="utf-8") as file:
            yield file
    except (OSError, ValueError) as error:
        raise wrong_use(f"{name}: the file of {content} cannot be read: {error}") from error
