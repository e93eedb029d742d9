"""The protocols of a storage that keeps checkpoints, one screen each.

A `Store` is one place for one checkpoint, which consists of named files: `model.safetensors`, `extra/common.safetensors`.

Reading, on any process:

    with store.open() as opened:                 # the checkpoint that is there now, even if another replaces it meanwhile
        opened.size_of(name)
        opened.read_into(name, pieces, offset)   # as often as needed, into the caller's memory

Writing. One process leads. It sends `staging.address`, a string, to the other processes:

    staging = store.begin(overwrite=..., durable=...)           # the leader
    staging.create(name, nbytes, head)                          # files that several processes write, if `Capabilities` allow that
    writer = store.join(staging.address, ...)                   # every process, including the leader
    writer.create(name, nbytes, head)                           # files that only this process writes
    writer.write(name, pieces, offset)                          # as often as needed
    writer.put(name, data)                                      # small complete files, each by one process
    receipt = writer.finish()                                   # or writer.discard(), after a failure
    staging.seal(names, receipts)                               # the leader, when all have finished: completes the files `names`
    staging.put(name, data)                                     # files that depend on the others: checksums, an index
    staging.commit(name, manifest)                              # makes the files a checkpoint, atomically; or staging.abandon()

`open` sees none of these files before `commit` returns, and the previous checkpoint stays complete until then. Every failure is a
CheckpointError that names the place.
"""

from fsdp_optim.storage.base.directory import (
    CheckpointDirectory,
    CheckpointEntry,
    CheckpointProbe,
    CheckpointStatus,
    SummaryLike,
    SummaryT,
)
from fsdp_optim.storage.base.names import (
    MOST_DEPTH,
    MOST_FILES,
    NOT_THERE,
    Undecided,
    check_inside,
    check_name,
    check_not_reserved,
    is_reserved,
    is_sure_that_not,
    names_checkpoint,
)
from fsdp_optim.storage.base.opened import (
    Opened,
)
from fsdp_optim.storage.base.single_file import (
    FileSink,
    WritesFiles,
)
from fsdp_optim.storage.base.staging import (
    Capabilities,
    Staging,
    StoreWriter,
)
from fsdp_optim.storage.base.store import (
    VISIBLE_WITHIN,
    Store,
)

__all__ = [
    "MOST_DEPTH",
    "MOST_FILES",
    "NOT_THERE",
    "VISIBLE_WITHIN",
    "Capabilities",
    "CheckpointDirectory",
    "CheckpointEntry",
    "CheckpointProbe",
    "CheckpointStatus",
    "FileSink",
    "Opened",
    "Staging",
    "Store",
    "StoreWriter",
    "SummaryLike",
    "SummaryT",
    "Undecided",
    "WritesFiles",
    "check_inside",
    "check_name",
    "check_not_reserved",
    "is_reserved",
    "is_sure_that_not",
    "names_checkpoint",
]
