"""`fsdp-optim average`: one checkpoint with the averages of several."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TextIO

import click

from fsdp_optim.cli.options import (
    PATH,
    convert_options,
    json_option,
    memory_option,
    names_option,
    only_warnings,
    quiet_option,
    storage_options,
    writing_options,
)
from fsdp_optim.cli.output import print_json
from fsdp_optim.cli.units import counted, sized

if TYPE_CHECKING:
    from fsdp_optim.api import AverageResult

_MOST_SHOWN = 10  # names


class WeightList(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Numbers with commas between them, as in 1,1,2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        try:
            return [float(number) for number in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,1,2", param, ctx)


@click.command("average")
@click.argument("sources", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", required=True, metavar="OUT", type=PATH, help="the new checkpoint")
@click.option("--weights", type=WeightList(), metavar="1,1,2", help="a number for each source (all weigh the same)")
@click.option(
    "--moments",
    type=click.Choice(["drop", "average"]),
    default="drop",
    help="leave the optimizer out, or average its state too (drop)",
)
@names_option
@writing_options("OUT")
@memory_option
@json_option
@quiet_option
@storage_options
def command(sources: tuple[str, ...], output: str, names: TextIO | None, **given: Any) -> None:
    """Average the weights of the checkpoints SOURCES, of any formats, into the new checkpoint OUT.

    They are added in float64 in this order and rounded once. Everything else is that of the last one, and what differs is named.
    """
    from fsdp_optim import api

    param_names = [line.strip() for line in names if line.strip()] if names is not None else None
    with api.launched_ranks() as rank:
        if rank > 0:
            only_warnings()
        begin = time.monotonic()
        done = api.average(
            sources,
            output,
            weights=given["weights"],
            moments=given["moments"],
            overwrite=given["overwrite"],
            options=convert_options(given, rank, param_names=param_names),
        )
    if rank == 0:
        _show(done, max(time.monotonic() - begin, 1e-9), as_json=given["as_json"])


def _show(done: AverageResult, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    averaged = f"{done.num_averaged:,} of {counted(done.num_tensors, 'tensor')}"
    click.echo(
        f"{done.path}: {averaged} are averages of {len(done.sources)} checkpoints, {sized(done.nbytes)} in {seconds:.1f} s"
    )
    if done.differing:
        shown, num_more = done.differing[:_MOST_SHOWN], len(done.differing) - _MOST_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        click.echo(f"not the same in all of them, and taken from the last one: {', '.join(shown)}{more}")
