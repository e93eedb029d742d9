"""`fsdp-optim inspect`: what a checkpoint has, without its elements."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import json_option, storage_options
from fsdp_optim.cli.output import plain, print_json, print_lines
from fsdp_optim.errors import wrong_use
from fsdp_optim.registry import INSPECT_PAGE, named

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointSummary


@click.command("inspect")
@click.argument("path")
@click.option("--all", "shows_all", is_flag=True, help="every tensor on a line of its own, without folding layers")
@click.option("--match", metavar="GLOB", help="only the parameters whose name this matches, as in 'layers.0.*'")
@click.option("--html", metavar="FILE", help="write a page with an area for the bytes of each layer and kind of value")
@json_option
@storage_options
def command(
    path: str,
    shows_all: bool,
    match: str | None,
    html: str | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Show the format of the checkpoint PATH, who saved it, the modules with shapes, dtypes and bytes, and the optimizer."""
    from fsdp_optim import api
    from fsdp_optim.cli.tree import shown

    summary = api.inspect(path, storage_options=storage_options)
    if match is not None:
        summary = _matching(summary, match)
    if html is not None:
        named(INSPECT_PAGE)(summary, html)
    if as_json:
        print_json({**plain(summary), "nbytes": summary.nbytes})
    else:
        print_lines(shown(summary, folds=not shows_all))


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
