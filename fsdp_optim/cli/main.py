"""The commands: their arguments, their output, and their exit codes (0: done, 1: an error, 2: wrong arguments)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_optim import api
from fsdp_optim.cli.tree import shown
from fsdp_optim.cli.units import counted, size_of, sized
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.options import ConvertOptions
from fsdp_optim.plugins import FairscaleShards, Format, TorchFiles, Writer
from fsdp_optim.registry import format_names

_OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    with api.launched_ranks() as rank, _logging(quiet=options.quiet or rank > 0):
        try:
            if rank == 0 or options.by_all_ranks:
                options.run(options, rank)
        except FsdpOptimError as error:
            if rank == 0 or not error.on_all_ranks:
                return _failed(f"{error}")
            return 1
        except BrokenPipeError:  # `| head` has read enough
            sys.stderr.close()  # else Python complains of the pipe at its exit
        except KeyboardInterrupt:
            return _failed("interrupted")
    return 0


def _failed(why: str) -> int:
    print(f"fsdp_optim: {' '.join(why.split())}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _logging(*, quiet: bool) -> Iterator[None]:
    """Show the library's log on the standard error while a command runs."""
    log, handler = logging.getLogger("fsdp_optim"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


# ------------------------------------------------------------------------------------------- the commands


def _convert(options: argparse.Namespace, rank: int) -> None:
    names, format = _names_and_format(options)
    begin = time.monotonic()
    done = api.convert(
        options.src,
        options.dst,
        format=format,
        overwrite=options.overwrite,
        options=ConvertOptions(
            bucket_nbytes=options.memory,
            param_names=names,
            durable=not options.not_durable,
            max_file_size=options.max_file_size,
            allow_pickle=options.allow_pickle,
            progress=False if options.quiet else None,
            storage_options=_storage_options(options),
        ),
    )
    if rank == 0:
        seconds = max(time.monotonic() - begin, 1e-9)
        print(
            f"{done.path}: {counted(done.num_tensors, 'tensor')}, {sized(done.nbytes)} in {seconds:.1f} s "
            f"({sized(done.nbytes / seconds)}/s)"
        )


def _verify(options: argparse.Namespace, rank: int) -> None:
    done = api.verify(
        options.path,
        bucket_nbytes=options.memory,
        progress=False if options.quiet else None,
        storage_options=_storage_options(options),
    )
    what = f"{counted(done.num_tensors, 'tensor')} ({sized(done.nbytes)})"
    if done.has_checksums:
        print(f"{done.path}: whole: {what} are as they were saved, by their checksums")
    elif done.format == "fsdp_optim":
        print(
            f"{done.path}: {what} are there and can be read; changed bytes would not show: it was saved without checksums"
        )
    else:
        print(
            f"{done.path}: {what} are there and can be read; changed bytes would not show: the format {done.format} has no "
            "checksums"
        )


def _inspect(options: argparse.Namespace, rank: int) -> None:
    for line in shown(api.inspect(options.path, storage_options=_storage_options(options)), folds=not options.all):
        print(line)


def _names_and_format(options: argparse.Namespace) -> tuple[list[str] | None, str | Format]:
    """Return the names and the format that the files and flags give; `_Unread` where this process cannot read a file."""
    names, units = None, None
    try:
        if options.names is not None:
            with _named_file("names", options.names) as lines:
                names = [line.strip() for line in lines if line.strip()]
        if options.units is not None:
            with _named_file("units", options.units) as file:
                units = json.load(file)
    except CheckpointError as error:
        return None, _Unread(why=error)
    return names, _format(options, units)


def _format(options: argparse.Namespace, units: Any) -> str | Format:
    """Return the format that the flags name. Raises CheckpointError, the same on all processes, for a flag it does not have."""
    name, flattens = options.format, False if options.not_flattened else None
    of_shards = {"--world-size": options.world_size, "--units": units, "--not-flattened": flattens}
    given = [flag for flag, value in of_shards.items() if value is not None]
    if name == FairscaleShards.name:
        if options.world_size is None:
            raise CheckpointError(f"the format {name} has a file for each rank: give --world-size, the number of ranks")
        if options.key_by == "name":
            raise CheckpointError("fairscale's shards call parameters by id: leave --key-by out")
        return FairscaleShards(options.world_size, units, flattens)
    if given:
        raise CheckpointError(f"{', '.join(given)}: the format {name} has no such option; {FairscaleShards.name} has")
    for format in (TorchFiles(), TorchFiles(one_file=True), TorchFiles(for_fairscale=True)):
        if format.name == name and options.key_by is not None:
            return replace(format, key_by=options.key_by)
    if options.key_by == "id" and name in format_names():
        raise CheckpointError(f"--key-by: a checkpoint of the format {name} calls parameters by name: leave it out")
    return str(name)


@dataclass(frozen=True)
class _Unread(TorchFiles):
    """A format that raises why a file could not be read when `convert` asks for its writer, so that all processes raise it.

    If the process ended before the call, the other processes would wait for it.
    """

    why: CheckpointError = CheckpointError("a file cannot be read")  # noqa: RUF009  # a stand-in

    def writer(self) -> Writer:
        raise self.why


@contextlib.contextmanager
def _named_file(content: str, name: str) -> Iterator[Any]:
    try:
        with open(name, encoding="utf-8") as file:
            yield file
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: the file of {content} cannot be read: {error}") from error


def _storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    return dict(options.storage_option) or None


# ------------------------------------------------------------------------------------------- their arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_optim",
        description="Convert, verify and inspect checkpoints of this and other libraries.",
        epilog="Exit codes: 0 done, 1 an error (one line says which), 2 wrong arguments.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_convert(commands)
    verify = commands.add_parser(
        "verify",
        help="read every byte and compare it with its checksum",
        description="Read every byte of a checkpoint. What has a checksum is compared with it.",
    )
    verify.add_argument("path", metavar="PATH", help="a checkpoint of any format that can be read: a path or a URL")
    _add_common(verify)
    _add_memory(verify)
    verify.set_defaults(run=_verify, by_all_ranks=False)
    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint has",
        description="Show the format, who saved it, the modules with shapes, dtypes and bytes, and the optimizer.",
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint of any format that can be read: a path or a URL")
    inspect.add_argument("--all", action="store_true", help="every tensor on a line of its own, without folding layers")
    _add_common(inspect)
    inspect.set_defaults(run=_inspect, by_all_ranks=False)
    return parser


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint again, in another format or in other files",
        description="Write a checkpoint again, bit for bit, in bounded memory. With torchrun, each process copies a share of the "
        "bytes.",
    )
    convert.add_argument("src", metavar="SRC", help="a checkpoint of any format that can be read: a path or a URL")
    convert.add_argument("dst", metavar="DST", help="the new checkpoint: a path or a URL")
    convert.add_argument(
        "--format", default="safetensors", metavar="NAME", help=f"one of {', '.join(format_names())} (safetensors)"
    )
    convert.add_argument(
        "--world-size", type=int, metavar="N", help="the number of ranks, for formats with a part for each"
    )
    convert.add_argument("--key-by", choices=("id", "name"), help="the keys of parameters in the optimizer's dict")
    _add_memory(convert)
    convert.add_argument(
        "--names", metavar="FILE", help="the names of the optimizer's parameters, one a line in order of ids"
    )
    convert.add_argument(
        "--units",
        metavar="FILE",
        help="fairscale_shards: JSON with the names that each FSDP unit flattens, by its path",
    )
    convert.add_argument(
        "--not-flattened", action="store_true", help="fairscale_shards: for FSDP with flatten_parameters=False"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the checkpoint at DST")
    convert.add_argument("--not-durable", action="store_true", help="do not wait until the bytes are on the disk")
    convert.add_argument(
        "--max-file-size", type=size_of, default=4_000_000_000, metavar="SIZE", help="the most bytes of a file (4GB)"
    )
    convert.add_argument(
        "--allow-pickle", action="store_true", help="unpickle values, which can run any code of their author"
    )
    _add_common(convert)
    convert.set_defaults(run=_convert, by_all_ranks=True)


def _add_memory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--memory", type=size_of, default=512 << 20, metavar="SIZE", help="the most memory for elements (512MiB)"
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quiet", action="store_true", help="no progress, only warnings and errors")
    command.add_argument(
        "--storage-option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the store of a URL, such as endpoint_url=...; can be given several times",
    )


def _option(text: str) -> tuple[str, Any]:
    match = _OPTION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    key, value = match.groups()
    words = {"true": True, "false": False}
    return key, int(value) if value.isdecimal() else words.get(value.lower(), value)
