"""Convert: rewrites a checkpoint in one process, without a model and without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from fsdp_optim.checkpoint.contents import RECORDS, SavedValue
from fsdp_optim.checkpoint.file_plan import FilePlan
from fsdp_optim.checkpoint.files import planned_files
from fsdp_optim.checkpoint.formats import open_checkpoint
from fsdp_optim.checkpoint.reading import CheckpointEnd, StoredValue
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.save import (
    Job,
    abandoned_on_failure,
    encode_written,
    finish,
)
from fsdp_optim.checkpoint.stores import Place, store_at
from fsdp_optim.formats.base import CheckpointContents, Format, FormatReader, FormatWriter, Prepared, StoredTensor
from fsdp_optim.formats.ours import OURS
from fsdp_optim.layout import Whole
from fsdp_optim.move import move
from fsdp_optim.options import Options, SaveOptions
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import alone


def convert(
    source: Place,
    target: Place,
    *,
    max_file_size: int,
    overwrite: bool = False,
    durable: bool = True,
    source_format: Format | None = None,
    format: Format = OURS,
) -> Saved:
    """Verify a checkpoint and write it again, in files of at most `max_file_size` bytes each.

    Memory: one bucket of tensors at a time. Raises CheckpointError if the checkpoint is damaged, and then leaves nothing at
    `target`. `source_format` None: the format is recognised.
    """
    here = alone("convert")
    SaveOptions(Options(), max_file_size=max_file_size).validate()
    opened = open_checkpoint(store_at(source, source_format or OURS), verify=True, format=source_format)
    with closing(opened) as checkpoint:
        step, writer = checkpoint.step, format.writer()
        options = SaveOptions(Options(), step=step, max_file_size=max_file_size, overwrite=overwrite, durable=durable)
        prepared, extras = _prepared(checkpoint, writer)
        model, optim = _values(checkpoint.model, is_state=False), _values(checkpoint.optim, is_state=True)
        files = planned_files(writer, "model", _saved(model), prepared.shared, most_nbytes=max_file_size, num_ranks=1)
        if checkpoint.has_optim:
            files += planned_files(
                writer, "optim", _saved(optim), prepared.shared, most_nbytes=max_file_size, num_ranks=1
            )
        store = store_at(target, format)
        staging = store.begin(overwrite=overwrite, durable=durable)
        plan = FilePlan(tuple(files), {file.name: here.rank for file in files}, is_alone=True)
        job = Job(here, options, store, format, staging.address, plan, (), writer, extras, prepared, staging)
        with abandoned_on_failure(job):
            rank_writer, failure = job.rank_writer(), Failure()
            job.start(rank_writer)
            source_end = CheckpointEnd(
                checkpoint, here.rank, here.budget.share(2, "copies of device memory on the host")
            )
            target_end = job.target(lambda parts: rank_writer.write(rank_writer.extents_of(parts)))
            try:
                move([*model, *optim], source_end, target_end, here, here.budget, failure)
                if failure.error is not None:
                    raise failure.error
                rank_writer.finish()
            finally:
                rank_writer.discard()
            checkpoint.check_unchanged()
            finish(job, [encode_written(job, rank_writer)])
    return job.saved(rank_writer.nbytes)


def _prepared(checkpoint: FormatReader, writer: FormatWriter) -> tuple[Prepared, dict[str, bytes]]:
    """What the target will say, and its small files: snapshot_of where the format stays, else decoded and encoded again."""
    snapshot_of = writer.copied(checkpoint)
    if snapshot_of is not None:
        return snapshot_of, dict(snapshot_of.files)
    contents = CheckpointContents(
        world_size=max(checkpoint.world_size, 1),
        params={key: stored.shape for key, stored in checkpoint.model.items()},
        aliases=checkpoint.aliases,
        optim=checkpoint.description(allow_pickle=False, records=RECORDS) if checkpoint.has_optim else None,
    )
    prepared = writer.prepare(contents, allow_pickle=False, records=RECORDS)
    extras = dict(prepared.files)
    for name in sorted(checkpoint.extras):
        value = checkpoint.extra(name, verify=True).decoded(allow_pickle=False)
        extras.update([writer.extra(name, value, allow_pickle=False)])
    return prepared, extras


def _values(stored: Mapping[str, StoredTensor], *, is_state: bool) -> list[StoredValue]:
    """Stored tensors as values on this one process. The key of each tensor stands for an FQN."""
    return [
        StoredValue.of(key, "", tensor, Whole(tensor.shape, (0,)), None, is_state=is_state)
        for key, tensor in stored.items()
    ]


def _saved(values: list[StoredValue]) -> list[SavedValue]:
    """The same values as the target saves them."""
    return [
        SavedValue(value.fqn, value.name, value.dtype, value.placement, value.is_state, value.fqn) for value in values
    ]
