"""`fsdp-optim verify`: read every byte of a checkpoint, or of all checkpoints in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import PATH, json_option, memory_option, progress_of, quiet_option, storage_options
from fsdp_optim.cli.output import end_broken, plain, print_json
from fsdp_optim.cli.roots import checkpoints_in, reason_of
from fsdp_optim.cli.units import counted, sized
from fsdp_optim.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointInfo, VerifyResult


@click.command("verify")
@click.argument("path", type=PATH)
@json_option
@memory_option
@quiet_option
@storage_options
def command(path: str, as_json: bool, memory: int, quiet: bool, storage_options: dict[str, Any] | None) -> None:
    """Read every byte of the checkpoint PATH, and compare it with the checksums and the fingerprints that it has.

    If PATH is a folder of checkpoints, each of them is verified, the newest first.
    """
    from fsdp_optim import api

    given = {"bucket_nbytes": memory, "progress": progress_of(quiet=quiet), "storage_options": storage_options}
    try:
        done = api.verify(path, **given)  # type: ignore[arg-type]  # by name
    except CheckpointError:
        infos = checkpoints_in(path, storage_options)
        if not infos:
            raise
        _verify_all(path, infos, given, as_json=as_json)
        return
    if as_json:
        print_json(done)
    else:
        click.echo(_line(done))


def _verify_all(root: str, infos: Sequence[CheckpointInfo], given: dict[str, Any], *, as_json: bool) -> None:
    """Verify each checkpoint of a folder, and end with exit code 1 if any is damaged."""
    from fsdp_optim import api

    results, num_damaged = [], 0
    for info in infos:
        try:
            done = api.verify(info.path, **given)
        except CheckpointError as error:
            num_damaged += 1
            why = one_line(error)
            results.append({"path": str(info.path), "step": info.step, "damaged": why})
            text = f"{info.path}: damaged: {reason_of(info, why)}"
        else:
            results.append({**plain(done), "step": info.step, "damaged": None})
            text = _line(done)
        if not as_json:
            click.echo(text)
    if as_json:
        print_json({"path": root, "checkpoints": results, "num_damaged": num_damaged})
    else:
        what = f"{num_damaged} damaged" if num_damaged else "none is damaged"
        click.echo(f"{root}: {counted(len(infos), 'checkpoint')}, {what}")
    if num_damaged:
        end_broken()


def _line(done: VerifyResult) -> str:
    what = f"{counted(done.num_tensors, 'tensor')} ({sized(done.nbytes)})"
    proven = f"; the fingerprints of {done.num_proven:,} are those of the live values that were saved"
    proven = proven if done.num_proven else ""
    if done.has_checksums:
        return f"{done.path}: complete: {what} are as they were saved, by their checksums{proven}"
    if done.num_proven == done.num_tensors:
        return f"{done.path}: complete: {what} are as they were saved, by their fingerprints"
    is_own = done.format == "fsdp_optim"
    why = "it was saved without checksums" if is_own else f"the format {done.format} has no checksums"
    return f"{done.path}: {what} are there and can be read; changed bytes would not show: {why}{proven}"
