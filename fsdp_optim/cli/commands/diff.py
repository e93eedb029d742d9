"""`fsdp-optim diff`: how two checkpoints differ, value by value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from fsdp_optim.cli.failing import with_flags
from fsdp_optim.cli.options import (
    PATH,
    VIEWS_HELP,
    json_option,
    memory_option,
    names_option,
    progress_of,
    quiet_option,
    storage_options,
    views_in,
)
from fsdp_optim.cli.output import end_broken, plain, print_json, print_lines, print_table
from fsdp_optim.cli.units import counted
from fsdp_optim.errors import shortened

if TYPE_CHECKING:
    from fsdp_optim.api import DiffResult, ValueDiff

_MOST_ROWS = 20
_COLUMNS = ("value", "relative", "max |a - b|", "differing", "of", "dtype", "")


@dataclass(frozen=True)
class _Shown:
    """How the result is printed."""

    as_json: bool
    shows_all: bool


@click.command("diff")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--match", metavar="GLOB", help="compare names that fit a pattern only: 'layers.0.*' or '*:exp_avg'")
@click.option(
    "--tolerance", type=float, metavar="X", help="the largest ||a - b|| / ||a|| of a value that counts as equal"
)
@click.option(
    "--html",
    metavar="FILE",
    type=PATH,
    help="write a page with a strip of colours for each layer, which needs no network",
)
@names_option
@click.option("--views", type=click.File(encoding="utf-8"), metavar="FILE", help=VIEWS_HELP)
@click.option(
    "--all", "shows_all", is_flag=True, help=f"a line for each value that differs, not for {_MOST_ROWS} of them"
)
@click.option("--allow-pickle", is_flag=True, help="unpickle values, which can run any code of their author")
@json_option
@memory_option
@quiet_option
@storage_options
def command(
    a: str,
    b: str,
    names: TextIO | None,
    views: TextIO | None,
    as_json: bool,
    shows_all: bool,
    memory: int,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare the checkpoints A and B, of any formats and numbers of ranks. The exit code is 0 if they are equal, or within the
    tolerance, and 1 if they differ.
    """
    from fsdp_optim import api

    param_names = [line.strip() for line in names if line.strip()] if names is not None else None
    options["views"] = views_in(views or ())
    result = api.diff(a, b, param_names=param_names, bucket_nbytes=memory, progress=progress_of(quiet=quiet), **options)
    _print(result, _Shown(as_json, shows_all))
    if not result.equal_within_tolerance:
        end_broken()


def _print(result: DiffResult, shown: _Shown) -> None:
    if shown.as_json:
        print_json(
            {
                "equal": result.equal,
                "equal_within_tolerance": result.equal_within_tolerance,
                **plain(result),
                "values": [{**plain(value), "relative": plain(value.relative)} for value in result.values],
            }
        )
        return
    print_lines(_verdict(result))
    rows = result.differing if shown.shows_all else result.differing[:_MOST_ROWS]
    if rows:
        right = _COLUMNS[1:5]
        print_table(_COLUMNS, [_row(result, value) for value in rows], right=right)
    if len(rows) < len(result.differing):
        click.echo(f"and {len(result.differing) - len(rows)} more: --all shows them")
    most = None if shown.shows_all else _MOST_ROWS
    print_lines(_others(result, most or len(result.only_in_a) + len(result.only_in_b) + 1))


def _verdict(result: DiffResult) -> Iterator[str]:
    compared = counted(len(result.values), "value")
    if result.equal:
        yield f"equal, bit by bit: {compared}"
    elif not result.differing:
        yield f"differ: {compared} are equal, bit by bit, and other things are not"
    else:
        word = "equal within the tolerance" if result.equal_within_tolerance else "differ"
        within = f", {len(result.within)} of them within {result.tolerance:g}" if result.tolerance is not None else ""
        yield f"{word}: {len(result.differing)} of {compared} differ{within}"
    yield from (f"note: {with_flags(note, command)}" for note in result.notes)


def _row(result: DiffResult, value: ValueDiff) -> tuple[str, ...]:
    dtypes = value.a.dtype if value.a.dtype == value.b.dtype else f"{value.a.dtype}, {value.b.dtype}"
    remarks = ["within"] if value in result.within else []
    for name, counts in (("NaN", value.nans), ("infinite", value.infinities)):
        remarks += [f"{name}: {counts[0]}, {counts[1]}"] if any(counts) else []
    return (
        value.name,
        f"{value.relative:.3g}",
        f"{value.max_abs:.3g}",
        f"{value.num_differing:,}",
        f"{value.numel:,}",
        dtypes,
        "; ".join(remarks),
    )


def _others(result: DiffResult, most: int) -> Iterator[str]:
    if result.steps_differ:
        yield f"step: {result.steps[0]} and {result.steps[1]}"
    for item in result.hyperparameters:
        yield f"{item.name}: {item.a} and {item.b}, for {counted(len(item.params), 'parameter')}"
    for shape in result.shapes:
        yield f"{shape.name}: the shape is {shape.a.shape} and {shape.b.shape}"
    for value in result.objects:
        yield f"{value.name}: {value.a} and {value.b}"
    for side, names in (("A", result.only_in_a), ("B", result.only_in_b)):
        if names:
            yield f"only in {side}: {shortened(names, most)}"
