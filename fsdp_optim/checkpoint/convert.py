"""Convert a checkpoint in one process, without a model and without ranks: from what is stored to what is stored."""

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
    encode_note,
    finish,
)
from fsdp_optim.checkpoint.stores import Place, store_at
from fsdp_optim.formats.base import Contents, Format, Prepared, Reader, StoredTensor, Writer
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
    """Write a checkpoint again, verified, in files of at most `max_file_size` bytes each.

    Holds no more than a bucket of its tensors at a time. Raises CheckpointError where the checkpoint is damaged, and leaves
    nothing at `target` then. `source_format` None: it is recognised.
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
            hand, failure = job.hand(), Failure()
            job.start(hand)
            source_end = CheckpointEnd(
                checkpoint, here.rank, here.budget.share(2, "what lies on a device, by way of the host")
            )
            target_end = job.target(lambda parts: hand.write(hand.runs_of(parts)))
            try:
                move([*model, *optim], source_end, target_end, here, here.budget, failure)
                if failure.error is not None:
                    raise failure.error
                hand.finish()
            finally:
                hand.discard()
            checkpoint.check_unchanged()
            finish(job, [encode_note(job, hand)])
    return job.saved(hand.nbytes)


def _prepared(checkpoint: Reader, writer: Writer) -> tuple[Prepared, dict[str, bytes]]:
    """What the target will say, and its small files: copied where the format stays, else decoded and encoded again."""
    copied = writer.copied(checkpoint)
    if copied is not None:
        return copied, dict(copied.files)
    contents = Contents(
        world_size=max(checkpoint.world_size, 1),
        params={key: one.shape for key, one in checkpoint.model.items()},
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
    """Tensors of a checkpoint as values of this one process; each has its name in the files for an FQN."""
    return [
        StoredValue.of(key, "", one, Whole(one.shape, (0,)), None, is_state=is_state) for key, one in stored.items()
    ]


def _saved(values: list[StoredValue]) -> list[SavedValue]:
    """The same, to be written."""
    return [SavedValue(one.fqn, one.name, one.dtype, one.placement, one.is_state, one.fqn) for one in values]
