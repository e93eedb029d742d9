"""Convert: writes a checkpoint again, in another format or in other files, without a model and in bounded memory.

All processes that make the call read the description of the source, plan the same files and units, and copy a share of the units
each, in several threads. The new files are written aside and committed like a save; what a killed conversion has left is removed
like the leftovers of a save.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

from fsdp_optim.checkpoint.common.formats import format_of_option
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import Place, options_of, store_at
from fsdp_optim.checkpoint.load.opening import open_on_all
from fsdp_optim.checkpoint.views import SeenReader, check_used, reader_inside, seen
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.protocols import Format, Reader
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.convert_file import named, place_of
from fsdp_optim.offline.conversion.new_files import NewFiles
from fsdp_optim.offline.conversion.source_contents import SourceNaming, describe_source
from fsdp_optim.offline.conversion.unit_sources import CheckpointSource
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.transport.agree import all_equal, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.world import world_here

log = logging.getLogger("fsdp_optim")


def convert(
    source: Place,
    target: Place,
    options: ConvertArguments,
    model: Model | None = None,
    *,
    source_format: Format | None = None,
    target_format: Format | None = None,
) -> SaveResult:
    """Verify a checkpoint and write it again. Called by all ranks of the process group.

    `source_format` None: the format is recognised. `target_format` None: the format that the options name.
    """
    group = ranks_of_call(options.call)
    with in_turn(group), all_hear(group):
        options.validate()
        format = format_of_option(target_format if target_format is not None else options.format)
        with closing(seen(opened_on_all(group, source, options, source_format), options.views)) as checkpoint:
            naming, writer = SourceNaming(options.param_names, model), format.writer()
            contents = describe_source(checkpoint, writer, naming, allow_pickle=options.allow_pickle)
            check_used(checkpoint)
            work = NewFiles.of(
                group,
                checkpoint,
                contents,
                format,
                options,
                writer=writer,
                source=CheckpointSource(checkpoint, contents.stored),
            )
            if not all_equal(group, "read", work.compared.encode()):
                raise StateError(
                    f"{checkpoint.index.where}: the processes that convert it see different checkpoints, or have other options: "
                    "give all of them the same path and options"
                )
            fingerprint, why_not = _fingerprint_of(checkpoint, work)
            for why in (*contents.left_out, *why_not) if work.leads else ():
                log.warning("left out of the new checkpoint: %s", why)
            if work.leads:
                target, options = place_of(target, format, options)
            saved = replace(work, options=options, fingerprint=fingerprint).run(target)
            return named(group, saved, durable=options.durable)


def _fingerprint_of(checkpoint: Reader, work: NewFiles) -> tuple[bytes, tuple[str, ...]]:
    """Return the fingerprint of a checkpoint for the new one, whose values are the same, and why it gets none."""
    saved = reader_inside(checkpoint).index.fingerprint
    if saved is None:
        return b"", ()
    if isinstance(checkpoint, SeenReader) and checkpoint.changes:
        return b"", ("the fingerprint, which is of the values that Views have cut or joined",)
    if not work.writer.keeps_fingerprint:
        return b"", (f"the fingerprint, for which the format {work.format.name} has no place",)
    kept = saved if work.contents.has_optim else replace(saved, optim={})
    return kept.to_json().encode(), ()


def ranks_of_call(options: CallArguments) -> RankGroup:
    """The ranks that make the call: those of the process group, or all ranks of the job."""
    world, group = world_here(), options.process_group
    ranks = world.ranks_of(group) if group is not None else range(world.size)
    return world.group("convert", ranks, group, options.seconds, options.bucket_nbytes)


def opened_on_all(group: RankGroup, source: Place, options: ConvertArguments, format: Format | None = None) -> Reader:
    """Return the open source of a conversion. Called by all ranks. `format` None: the format is recognised.

    Only the open is retried: files that are written already would mix two checkpoints, so a later replacement raises.
    """
    store = store_at(source, format or OURS, options_of(source, options.storage_options))
    return retry_if_replaced(lambda: open_on_all(group, store, "", verify=True, format=format))
