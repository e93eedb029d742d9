"""The end of a save: the remaining files, the manifest that makes the checkpoint, and the removal of outdated checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_optim.checkpoint.catalog.thinning import thin
from fsdp_optim.checkpoint.common.stores import options_of
from fsdp_optim.checkpoint.save.job import Job, RankReport, decode_written
from fsdp_optim.checkpoint.save.prints import joined_prints
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Stamp, WrittenFiles


def finish(job: Job, written: Sequence[bytes], commits: Callable[[], None] = lambda: None) -> list[RankReport]:
    """Write the remaining files and commit, on the leader. `written`: the reports of all ranks, by `encode_written`.

    `commits`: called just before the manifest is put, which makes the files a checkpoint; raises an error to prevent that.
    Returns the reports, in the order of the ranks.
    """
    if job.leader is None:
        raise CheckpointError("only the rank that began the save in the store can finish it")
    staging, prepared, durable, step = job.leader.staging, job.leader.prepared, job.options.durable, job.options.step
    reports = [decode_written(job.files, data) for data in written]
    staging.seal(
        [file.name for file in job.files],
        [receipt for report in reports for receipt in report.receipts],
        durable=durable,
    )
    extras = {name: info for report in reports for name, info in report.infos.items()}
    rows = {file.name: [report.rows[file.name] for report in reports] for file in job.files}
    stamp = Stamp(
        token=staging.token,
        sequence=job.sequence,
        step=None if step is None else int(step),  # JSON has no numpy integers
        checksums=job.options.checksums,
        folder=staging.inner_folder,
        wrapper=job.wrapper,
        manager=job.managed.record if job.managed is not None else None,
    )
    written_files = WrittenFiles(rows, extras, joined_prints(job, reports) or job.fingerprint)
    for name, data in job.writer.last(prepared, [file.plan for file in job.files], written_files, stamp):
        if name != job.format.probe.manifest:
            staging.put(name, data, durable=durable)
        else:
            commits()  # last: all other files are complete, and from here on the checkpoint counts
            staging.commit(name, data, durable=durable)
    # Only now: the older checkpoints must stay until the new one is complete.
    if job.managed is not None and durable:  # otherwise there was nothing to remove at the beginning
        managed, content, storage_options = job.managed, prepared.content, job.options.storage_options
        managed.remove_outdated(job.store, content, stamp.step or 0, stamp.sequence)
        managed.thin_outdated(
            job.store, content, stamp.sequence, lambda where: thin(where, options_of(where, storage_options))
        )
    return reports
