"""The end of a save: the remaining files, the manifest that makes the checkpoint, and the removal of outdated checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_optim.checkpoint.save.job import Job, decode_written
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Stamp, WrittenFiles


def finish(job: Job, written: Sequence[bytes], commits: Callable[[], None] = lambda: None) -> None:
    """Write the remaining files and commit, on the leader. `written`: the results of `encode_written` of all ranks.

    `commits`: called just before the manifest is put, which makes the files a checkpoint; raises an error to prevent that.
    """
    if job.staging is None or job.prepared is None:
        raise CheckpointError("only the rank that began the save in the store can finish it")
    staging, durable, step = job.staging, job.options.durable, job.options.step
    decoded = [decode_written(job.files, data) for data in written]
    staging.seal(
        [file.name for file in job.files],
        [receipt for receipts, _, _ in decoded for receipt in receipts],
        durable=durable,
    )
    extras = {name: info for _, infos, _ in decoded for name, info in infos.items()}
    rows = {file.name: [table[file.name] for _, _, table in decoded] for file in job.files}
    stamp = Stamp(
        token=staging.token,
        sequence=job.sequence,
        step=None if step is None else int(step),  # JSON has no numpy integers
        checksums=job.options.checksums,
        folder=staging.inner_folder,
        manager=job.managed.record if job.managed is not None else None,
    )
    for name, data in job.writer.last(
        job.prepared, [file.plan for file in job.files], WrittenFiles(rows, extras), stamp
    ):
        # The manifest comes last: a reader that sees it may rely on every other file.
        if name != job.format.probe.manifest:
            staging.put(name, data, durable=durable)
        else:
            commits()
            staging.commit(name, data, durable=durable)
    # Only now: the older checkpoints must stay until the new one is complete.
    if job.managed is not None and durable:  # otherwise there was nothing to remove at the beginning
        job.managed.remove_outdated(job.store, job.prepared.content, stamp.step or 0, stamp.sequence)
