"""A save in the store that torch's coordinator has begun: the files, what each rank must know, and the end with the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_optim.checkpoint.catalog.listing import next_sequence
from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.dcp.storage.box_writing import FilePlace, TensorPlace, WrittenRows, joined_rows
from fsdp_optim.dcp.storage.planned_boxes import ItemName, PlannedBoxes, owned_by
from fsdp_optim.dcp.storage.saved_values import at_path, nested, paths_of, value_in
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra, NewTree
from fsdp_optim.formats.base.protocols import COMMON, PlannedFile, SavedWeights, Stamp, StoredTensor, WrittenFiles
from fsdp_optim.formats.base.records import PLANNED
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.storage.base import Capabilities, Staging, Store
from fsdp_optim.tensors.memory import dtype_name


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """The arguments of a `Writer` besides its path."""

    overwrite: bool = True
    durable: bool = True
    checksums: bool = True
    step: int | None = None
    max_file_size: int = 4_000_000_000
    bucket_nbytes: int = 64 << 20


@dataclass(frozen=True)
class RankOrders:
    """What the coordinator tells a rank, by `storage_data` of its plan.

    Attributes:
        where, address: the place of the checkpoint, and that of the staging.
        places: where the tensors are that this rank writes a box of, by key.
        skipped: the items that another rank writes.
    """

    rank: int
    where: str
    address: str
    durable: bool
    files: tuple[FilePlace, ...]
    places: Mapping[str, TensorPlace]
    skipped: frozenset[ItemName]


@dataclass(frozen=True)
class StagedSave:
    """A save that has begun in the store. `files`: those with tensors, in their full length."""

    store: Store
    staging: Staging
    boxes: PlannedBoxes
    files: Sequence[PlannedFile]
    num_ranks: int
    durable: bool
    settings: WriterSettings

    @classmethod
    def begin(cls, place: Any, settings: WriterSettings, boxes: PlannedBoxes, machines: Sequence[str]) -> StagedSave:
        """Begin the save, and create its files in their full length. `machines`: the machine of each rank."""
        files = OURS.writer().files(
            {"state": [tensor.planned for tensor in boxes.tensors]} if boxes.tensors else {},
            "",
            most_nbytes=settings.max_file_size,
            num_ranks=len(machines),
        )
        store = store_at(place)
        staging = store.begin(overwrite=settings.overwrite, durable=settings.durable)
        try:
            _check_writes_ranges(store, staging.capabilities, machines)
            for file in files:
                staging.create(file.name, file.nbytes, file.head)
        except BaseException:
            staging.abandon()
            raise
        durable = settings.durable or staging.replaces
        return cls(
            store=store,
            staging=staging,
            boxes=boxes,
            files=files,
            num_ranks=len(machines),
            durable=durable,
            settings=settings,
        )

    def orders(self) -> list[RankOrders]:
        """Return what each rank must know."""
        files = tuple(FilePlace(file.name, len(file.head), file.segment_nbytes) for file in self.files)
        kinds = {tensor.key: (tensor.dtype, tensor.shape) for tensor in self.boxes.tensors}
        places = {
            tensor.key: TensorPlace(number, start, *kinds[tensor.key])
            for number, file in enumerate(self.files)
            for tensor, start in zip(file.tensors, file.starts, strict=True)
        }
        keys = owned_by(self.boxes.tensors, self.num_ranks)
        return [
            RankOrders(
                rank=rank,
                where=self.store.where,
                address=self.staging.address,
                durable=self.durable,
                files=files,
                places={key: places[key] for key in (*keys[rank], *(key for key, _ in self.boxes.skipped[rank]))},
                skipped=self.boxes.skipped[rank],
            )
            for rank in range(self.num_ranks)
        ]

    def commit(
        self, reports: Sequence[WrittenRows], values: Mapping[str, bytes], planner_data: Any, save_id: str
    ) -> None:
        """Write the values and the tables of checksums, then the manifest, which makes the checkpoint.

        `values`: those that are no tensors, as the bytes of a planner, by key. `planner_data`: of torch's metadata.
        `save_id`: what torch's metadata tells readers about this save.
        """
        staging, writer = self.staging, OURS.writer()
        staging.seal([file.name for file in self.files], [report.receipt for report in reports], durable=self.durable)
        prepared = writer.prepare(self._index(values, planner_data, save_id), allow_pickle=False, records=RECORDS)
        infos = {}
        for name, data in prepared.files.items():
            staging.put(name, data, durable=self.durable)
            infos[name] = writer.info_of(data)
        rows = {file.name: joined_rows(reports, number) for number, file in enumerate(self.files)}
        stamp = Stamp(
            token=staging.token,
            sequence=next_sequence(self.store, [OURS, *listed_formats()]),
            step=self.settings.step,
            checksums=self.settings.checksums,
            folder=staging.inner_folder,
        )
        for name, data in writer.last(prepared, self.files, WrittenFiles(rows, infos), stamp):
            if name != NAME:
                staging.put(name, data, durable=self.durable)
            else:
                staging.commit(name, data, durable=self.durable)

    def _index(self, values: Mapping[str, bytes], planner_data: Any, save_id: str) -> CheckpointIndex:
        trees = {
            tensor.key: StoredTensor(tensor.key, dtype_name(tensor.dtype), tensor.shape, "", 0)
            for tensor in self.boxes.tensors
        }
        decoded = {key: value_in(data) for key, data in values.items()}
        leaves: dict[str, Any] = {key: InFile(key) for key in trees} | {
            key: value for key, (value, _) in decoded.items()
        }
        paths = paths_of(planner_data, list(leaves))
        tree = nested(leaves, paths)
        if tree is None or any(at_path(tree, path) is not leaves[key] for key, path in paths.items()):
            tree, paths = leaves, {key: (key,) for key in leaves}
        how = {
            "paths": {key: list(path) for key, path in paths.items()},
            "save_id": save_id,
            "raw": sorted(key for key, (_, is_raw) in decoded.items() if is_raw),
        }
        return CheckpointIndex(
            where="the new checkpoint",
            weights={},
            facts=Facts("", self.num_ranks, self.settings.step, SavedWeights("none")),
            extras={COMMON: NewTree(tree), PLANNED: KnownExtra(how)},
            trees=trees,
        )


def _check_writes_ranges(store: Store, can: Capabilities, machines: Sequence[str]) -> None:
    """Raise CheckpointError where the ranks cannot write ranges of one file, as torch's plans ask of them."""
    if can.writes_ranges == "anywhere" or (can.writes_ranges == "on one machine" and len(set(machines)) == 1):
        return
    if can.writes_ranges == "on one machine":
        raise CheckpointError(
            f"{store.where}: ranks on {len(set(machines))} machines cannot write into one file of this file system, and a plan "
            "of torch says which rank writes which bytes: save with fsdp_optim.save, which finds another way"
        )
    raise CheckpointError(
        f"{store.where}: several ranks cannot write ranges of one file there, and a plan of torch says which rank writes which "
        "bytes: give the path of a folder, or save with fsdp_optim.save"
    )
