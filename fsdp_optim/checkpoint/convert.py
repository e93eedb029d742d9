"""Convert a checkpoint in one process, without a model and without ranks: from whole, in files, to whole, in other files."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.checkpoint.contents import SavedValue
from fsdp_optim.checkpoint.files import cut_into_files
from fsdp_optim.checkpoint.reading import CheckpointEnd, StoredValue
from fsdp_optim.checkpoint.results import Saved
from fsdp_optim.checkpoint.save import (
    Job,
    abandoned_on_failure,
    encode_note,
    finish,
    make_files,
    write_extras,
)
from fsdp_optim.checkpoint.stores import Place, store_at
from fsdp_optim.formats.checkpoint import Checkpoint, Stored
from fsdp_optim.layout import Whole
from fsdp_optim.move import move
from fsdp_optim.options import Options, SaveOptions
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import alone

_MADE_ANEW = ("created_ns", "token", "files", "format", "version", "brief")  # what the new marker says for itself


def convert(
    source: Place,
    target: Place,
    *,
    max_file_size: int,
    overwrite: bool = False,
    durable: bool = True,
) -> Saved:
    """Write a checkpoint again, verified, in files of at most `max_file_size` bytes each.

    Holds no more than a bucket of its tensors at a time. Raises CheckpointError where the checkpoint is damaged, and leaves
    nothing at `target` then.
    """
    here = alone("convert")
    SaveOptions(Options(), max_file_size=max_file_size).validate()
    with Checkpoint.open(store_at(source), verify=True) as checkpoint:
        step = checkpoint.marker.brief.step
        options = SaveOptions(Options(), step=step, max_file_size=max_file_size, overwrite=overwrite, durable=durable)
        halves = {"model": checkpoint.model, "optim": checkpoint.optim}
        files = [
            file
            for stem, stored in halves.items()
            if stored or stem == "model" or checkpoint.marker.said["has_optim"]
            for file in cut_into_files(
                stem, _saved_values(stored, is_state=stem == "optim"), max_file_size, _metadata(stored), 1
            )
        ]
        extras = {name: checkpoint.extra_bytes(name) for name in checkpoint.marker.files if name.startswith("extra/")}
        said = {key: value for key, value in checkpoint.marker.said.items() if key not in _MADE_ANEW}
        store = store_at(target)
        staging = store.begin(overwrite=overwrite, durable=durable)
        job = Job(here, options, store, staging.address, tuple(files), (), extras, said, staging)
        with abandoned_on_failure(job):
            writer, failure = job.writer(), Failure()
            make_files(writer.hand, files)
            write_extras(job, writer.hand)
            values = [
                *_stored_values(checkpoint.model, is_state=False),
                *_stored_values(checkpoint.optim, is_state=True),
            ]
            source_end = CheckpointEnd(
                checkpoint, here.rank, here.budget.share(2, "what lies on a device, by way of the host")
            )
            target_end = job.target(lambda parts: writer.write(writer.runs_of(parts)))
            try:
                move(values, source_end, target_end, here, here.budget, failure)
                if failure.error is not None:
                    raise failure.error
                writer.finish()
            finally:
                writer.discard()
            checkpoint.check_unchanged()
            finish(job, [encode_note(job, writer)])
    return job.saved(writer.nbytes)


def _stored_values(stored: Mapping[str, Stored], *, is_state: bool) -> list[StoredValue]:
    """Tensors of a checkpoint as values of this one process; each has its name in the files for an FQN."""
    return [
        StoredValue.of(key, "", one, Whole(one.entry.shape, (0,)), None, is_state=is_state)
        for key, one in stored.items()
    ]


def _saved_values(stored: Mapping[str, Stored], *, is_state: bool) -> list[SavedValue]:
    """The same, to be written."""
    found = _stored_values(stored, is_state=is_state)
    return [SavedValue(one.fqn, one.name, one.dtype, one.placement, is_state, one.fqn) for one in found]


def _metadata(stored: Mapping[str, Stored]) -> Mapping[str, str]:
    """What the first file of a half says besides its tensors."""
    files = sorted({one.file.name: one.file for one in stored.values()}.items())
    return files[0][1].header.metadata if files else {"format": "pt"}
