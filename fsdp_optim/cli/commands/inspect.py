"""`fsdp-optim inspect`: what a checkpoint has, without its elements."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import PATH, json_option, storage_options
from fsdp_optim.cli.output import plain, print_json, print_lines
from fsdp_optim.errors import wrong_use
from fsdp_optim.registry import INSPECT_PAGE, PLACEMENT, named

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointSummary, PlacementResult


_MOST_RANKS = 1 << 20
_DEFAULT_WRAPPER, _WITH_UNITS = "fsdp2", ("fsdp1", "fairscale")


@click.command("inspect")
@click.argument("path", type=PATH)
@click.option("--all", "shows_all", is_flag=True, help="every tensor on a line of its own, without folding layers")
@click.option("--match", metavar="GLOB", help="only the parameters whose name this matches, as in 'layers.0.*'")
@click.option(
    "--html", metavar="FILE", type=PATH, help="write a page with an area for the bytes of each layer and kind of value"
)
@click.option(
    "--ranks", type=click.IntRange(1, _MOST_RANKS), metavar="N", help="also which of N ranks would hold how many bytes"
)
@click.option(
    "--wrapper",
    metavar="NAME",
    help="with --ranks: fsdp2, fsdp1, hsdp:SHARDxREPLICAS, fairscale or ddp (fsdp2)",
)
@click.option(
    "--units",
    multiple=True,
    metavar="GLOB",
    help="with --ranks, fsdp1 and fairscale: the modules that are wrapped, as in 'layers.*'; can be given several times",
)
@click.option(
    "--replicated",
    multiple=True,
    metavar="GLOB",
    help="with --ranks: buffers and other weights that every rank holds complete; can be given several times",
)
@json_option
@storage_options
def command(
    path: str,
    shows_all: bool,
    match: str | None,
    html: str | None,
    ranks: int | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    **wrapping: Any,
) -> None:
    """Show the format of the checkpoint PATH, who saved it, the modules with shapes, dtypes and bytes, and the optimizer.

    With --ranks, a table of the bytes that each rank would hold; with --html too, a map of them.
    """
    from fsdp_optim import api
    from fsdp_optim.cli.rank_table import print_placement
    from fsdp_optim.cli.tree import shown

    of_page = html is not None and "://" in html and "://" not in path
    summary = api.inspect(path, storage_options=None if of_page else storage_options)
    placement = _placement(summary, ranks, **wrapping)
    if match is not None:
        summary = _matching(summary, match)
    if html is not None:
        named(INSPECT_PAGE)(summary, html, placement, storage_options)
    if as_json:
        of_ranks = {"placement": _in_json(placement)} if placement is not None else {}
        print_json({**plain(summary), "nbytes": summary.nbytes, **of_ranks})
        return
    print_lines(shown(summary, folds=not shows_all))
    if placement is not None:
        print_placement(placement, shows_all=shows_all)


def _placement(
    summary: CheckpointSummary,
    ranks: int | None,
    *,
    wrapper: str | None,
    units: tuple[str, ...],
    replicated: tuple[str, ...],
) -> PlacementResult | None:
    """Return what each rank would hold, of all parameters, because the cut of a flat parameter depends on all of them."""
    if ranks is None:
        given = {"--wrapper": wrapper, "--units": units, "--replicated": replicated}
        for flag in (flag for flag, value in given.items() if value):
            raise click.UsageError(f"{flag} says how ranks hold the checkpoint: give --ranks, the number of ranks, too")
        return None
    wrapper = wrapper or _DEFAULT_WRAPPER
    if units and wrapper not in _WITH_UNITS:
        raise click.UsageError(
            f"--units is for flat parameters, which {' and '.join(_WITH_UNITS)} have, and the wrapper is {wrapper}: leave it out"
        )
    for pattern in replicated:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in summary.model):
            raise wrong_use(f"{summary.path}: --replicated {pattern!r} fits the name of no weight")
    placed: PlacementResult = named(PLACEMENT)(
        summary, ranks=ranks, wrapper=wrapper, units=units or None, replicated=replicated
    )
    return placed


def _in_json(placement: PlacementResult) -> dict[str, Any]:
    names = ("nbytes", "mean", "largest", "smallest", "imbalance")
    return {**plain(placement), **{name: getattr(placement, name) for name in names}}


def _matching(summary: CheckpointSummary, pattern: str) -> CheckpointSummary:
    """Return the part of a checkpoint whose names match. Raises CheckpointError where none does."""

    def matches(name: object) -> bool:
        return fnmatch.fnmatchcase(str(name), pattern)

    model = {fqn: tensor for fqn, tensor in summary.model.items() if matches(fqn)}
    state = {key: values for key, values in summary.state.items() if matches(key)}
    if not model and not state:
        raise wrong_use(f"{summary.path}: no parameter has a name that {pattern!r} matches")
    groups = tuple(replace(group, params=tuple(filter(matches, group.params))) for group in summary.groups)
    aliases = {alias: fqn for alias, fqn in summary.aliases.items() if fqn in model}
    return replace(summary, model=model, state=state, aliases=aliases, groups=groups)
