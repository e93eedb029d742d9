"""`fsdp-optim prune`: remove the checkpoints of a folder that no rule keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fsdp_optim.cli.options import PATH, json_option, quiet_option, storage_options
from fsdp_optim.cli.output import end_broken, print_json
from fsdp_optim.cli.units import counted, sized


@click.command("prune")
@click.argument("root", type=PATH)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="keep the newest N")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="keep each whose step is a multiple of N")
@click.option("--keep-best", type=click.IntRange(min=1), metavar="N", help="keep the N with the best metric")
@click.option("--best", type=click.Choice(["min", "max"]), default="min", help="which metric is the best (min)")
@click.option("--dry-run", is_flag=True, help="remove nothing, and print what would be removed")
@json_option
@quiet_option
@storage_options
def command(root: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Remove the checkpoints in the folder ROOT that no rule keeps. The newest always stays, and damaged ones are not touched.

    The rules are those of a CheckpointManager; at least one is needed.
    """
    from fsdp_optim import api

    if given["keep_last"] is None and given["keep_every"] is None and given["keep_best"] is None:
        raise click.UsageError("no rule says what stays: give --keep-last, --keep-every or --keep-best")
    done = api.prune(root, **given)
    if as_json:
        print_json(done)
    else:
        verb = "would be removed" if done.dry_run else "removed"
        for path in done.removed if not quiet and done.dry_run else ():  # else the log has each
            click.echo(f"{verb}: {_name(path)}")
        passed_over = (
            f"; damaged, and not touched: {', '.join(map(_name, done.passed_over))}" if done.passed_over else ""
        )
        what = counted(len(done.removed), "checkpoint")
        click.echo(f"{done.root}: {what} ({sized(done.nbytes)}) {verb}, {len(done.kept)} kept{passed_over}")
    if done.not_removed:
        end_broken()


def _name(path: Path | str) -> str:
    return str(path).rpartition("/")[2]
