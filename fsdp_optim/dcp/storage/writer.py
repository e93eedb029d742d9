"""`Writer`: a StorageWriter for torch's own `dcp.save`, which writes this library's files."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdp_optim.arguments import check_at_least
from fsdp_optim.checkpoint.common.stores import store_at, store_of_leader
from fsdp_optim.dcp.storage.at_path import AtPath
from fsdp_optim.dcp.storage.box_writing import BoxWriter, WrittenRows
from fsdp_optim.dcp.storage.planned_boxes import PlannedBoxes
from fsdp_optim.dcp.storage.staged_save import RankOrders, StagedSave, WriterSettings
from fsdp_optim.errors import CheckpointError
from fsdp_optim.tensors.memory import Budget


class Writer(AtPath, StorageWriter):
    """Writes a checkpoint of this library where torch's `save` and `async_save` have `storage_writer=`.

        torch.distributed.checkpoint.save(state_dict, storage_writer=fsdp_optim.dcp.Writer(path))

    The planner is torch's, or any other: each rank writes the boxes that its plan gives to it, into one full copy of each tensor
    in `state.safetensors`, under the planner's keys, with checksums. Values that are no tensors are kept as plain values, in the
    dict that was saved; an object of another class is kept as torch's bytes, which a `Reader` gives to torch, and of which other
    loads make the object with allow_pickle=True. The coordinator puts the manifest last: before that, and after a failure or a
    kill, the checkpoint that was there stays. `Reader` reads the checkpoint, and so do `fsdp_optim.load(path, state=...)`,
    `verify`, and safetensors.

    Every rank makes a Writer of the same arguments. Errors arrive in torch's CheckpointException, as CheckpointError with the
    name of the tensor or the file. Memory beyond the state dict: `bucket_nbytes` for copies of boxes that are on a device or
    have strides; on the coordinator, the values that are no tensors, of all ranks.

    Args:
        path: the folder of the checkpoint; None: `checkpoint_id` of the save has it. A `checkpoint_id` takes the place of a path.
        overwrite: replace the checkpoint of this library that is there, all or nothing. False: that is an error.
        durable: return only when the bytes are on the disk. A save that replaces a checkpoint does so in any case.
        checksums: write a table of checksums for each file.
        step: the step of the trainer, which is recorded.
        max_file_size: the most bytes of a file; more tensors are split into several files with an index.
        bucket_nbytes: the memory of a rank for copies, in bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        durable: bool = True,
        checksums: bool = True,
        step: int | None = None,
        max_file_size: int = 4_000_000_000,
        bucket_nbytes: int = 64 << 20,
    ) -> None:
        super().__init__()
        check_at_least("max_file_size", max_file_size, 1, " byte", CheckpointError)
        check_at_least("bucket_nbytes", bucket_nbytes, 1, " byte", CheckpointError)
        if step is not None:
            check_at_least("step", step, 0, error=CheckpointError)
        self._path = path
        self._settings = WriterSettings(
            overwrite=overwrite,
            durable=durable,
            checksums=checksums,
            step=step,
            max_file_size=max_file_size,
            bucket_nbytes=bucket_nbytes,
        )
        self.save_id = str(uuid.uuid4())
        self._staged: StagedSave | None = None
        self._undo: weakref.finalize[[], Writer] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to `checkpoint_id` if that is given. Files of a save that has failed are removed."""
        self._abandon()
        if checkpoint_id:
            self._path = checkpoint_id
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the path of the checkpoint, and the id of this save."""
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for a save, on every rank. Raises CheckpointError for a save in which ranks do not plan together."""
        self._abandon()
        if kwargs.get("use_collectives", True) is False:
            raise CheckpointError(
                f"{self._place}: use_collectives=False lets each rank save by itself, and the ranks write one copy of "
                "each tensor together: leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator on which machine this rank is."""
        return replace(plan, storage_data=store_at(self._place).machine_id())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save in the store, on the coordinator, and tell each rank the places of its boxes."""
        boxes = PlannedBoxes.of(plans)
        machines = [str(plan.storage_data) for plan in plans]
        staged = self._staged = StagedSave.begin(self._place, self._settings, boxes, machines)
        # Torch says nothing to the coordinator when another rank fails: then the next save, or the end of this object, cleans up.
        self._undo = weakref.finalize(self, staged.staging.abandon, late=len(plans) > 1)
        return [replace(plan, storage_data=orders) for plan, orders in zip(plans, staged.orders(), strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of this rank. The last result is the report of this rank about its writes."""
        orders = plan.storage_data
        if not isinstance(orders, RankOrders):
            raise CheckpointError(
                "the planner has changed storage_data of the plan, which says where this rank writes: leave it as it is"
            )
        path, settings = self._place, self._settings
        store = store_of_leader(path, store_at(path), orders.where)
        store_writer = store.join(orders.address, durable=orders.durable, who=f"rank {orders.rank}")
        try:
            budget = Budget(settings.bucket_nbytes, "copies of boxes on the host")
            writer = BoxWriter(store_writer, orders.files, orders.places, checksums=settings.checksums, budget=budget)
            results = writer.write(plan, planner, orders.skipped)
            results.append(WriteResult(MetadataIndex(""), 0, writer.report()))
        except BaseException:
            store_writer.discard()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what depends on all ranks, and the manifest, on the coordinator: then the checkpoint is there."""
        if self._staged is None:
            raise CheckpointError("only the coordinator that began the save can finish it")
        try:
            self._staged.commit(*_reports_in(results), metadata.planner_data, self.save_id)
        except BaseException:
            self._abandon()
            raise
        metadata.storage_meta = self.storage_meta()
        self._end()

    def _abandon(self) -> None:
        """Remove the files of a save that has not ended. Raises nothing."""
        undo = self._undo
        if undo is not None:
            undo()  # once, also where this is called twice
        self._end()

    def _end(self) -> None:
        if self._undo is not None:
            self._undo.detach()
        self._staged, self._undo = None, None


def _reports_in(results: Sequence[Sequence[WriteResult]]) -> tuple[list[WrittenRows], dict[str, bytes]]:
    """Return the report of each rank, and the bytes of all values by key."""
    reports = list[WrittenRows]()
    values: dict[str, bytes] = {}
    for of_rank in results:
        for result in of_rank:
            if isinstance(result.storage_data, WrittenRows):
                reports.append(result.storage_data)
            elif isinstance(result.storage_data, bytes):
                values.setdefault(result.index.fqn, result.storage_data)
    return reports, values
