"""`Reader`: a StorageReader for torch's own `dcp.load`, which reads this library's files."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import name_of, store_at
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, StoredValue
from fsdp_optim.dcp.storage.at_path import AtPath
from fsdp_optim.dcp.storage.model_places import ModelPlaces
from fsdp_optim.dcp.storage.saved_values import bytes_with
from fsdp_optim.dcp.storage.torch_metadata import RawBytes, TorchKeys
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import Reader as OpenCheckpoint
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.layout import Block, Box, Boxes, Placement, Shape, Whole
from fsdp_optim.move import Slice
from fsdp_optim.storage.base import Store
from fsdp_optim.tensors.memory import Budget, dtype_named, in_batches

_OF_TORCH = ".metadata"
_MOST_TOGETHER = (
    4096  # items, and the bytes of the budget: of those that are read before they are handed to the planner
)


class Reader(AtPath, StorageReader):
    """Reads a checkpoint where torch's `load` has `storage_reader=`.

        torch.distributed.checkpoint.load(state_dict, storage_reader=fsdp_optim.dcp.Reader(path))

    Checkpoints of `Writer` are read under the keys of their planner, and those of `fsdp_optim.dcp.save` under the keys of the
    state dict that was saved. Of all others that this library reads, those of `fsdp_optim.save` among them, the weights are
    under `model`, the optimizer under `optim`, as torch's `get_model_state_dict` and `get_optimizer_state_dict` have them, and
    the values of `state=` at the top. Folders that torch's own writers have made
    (with `.metadata`, without a manifest) are handed to torch's FileSystemReader, which trusts their pickles.

    Each rank reads the byte ranges of its items, and verifies them by the checksums, into the planner's tensors: directly where
    these are contiguous and of the saved dtype, else in windows of `bucket_nbytes`. Elements are cast to the dtype of a tensor,
    as torch's reader casts them. Every rank makes a Reader of the same arguments; errors arrive in torch's CheckpointException.

    Args:
        path: the checkpoint; None: `checkpoint_id` of the load has it.
        model, optim: the keys of the model's and the optimizer's dict in the state dict that is loaded; "": they are at the top;
            None: as they were saved, else "model" and "optimizer".
        verify: compare what is read with the checksums.
        allow_pickle: make objects that were saved as pickles, which can run any code of their author.
        bucket_nbytes: the memory of a rank for copies, in bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: str | None = None,
        optim: str | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        bucket_nbytes: int = 64 << 20,
    ) -> None:
        super().__init__()
        self._path = path
        self._names: tuple[str | ModelPlaces | None, str | None] = model, optim
        self._verifies, self._allow_pickle = verify, allow_pickle
        self._budget = Budget(bucket_nbytes, "elements that are copied or cast")
        self.load_id = str(uuid.uuid4())
        self._open: OpenCheckpoint | None = None
        self._keys = TorchKeys()
        self._of_torch: FileSystemReader | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of `checkpoint_id` if that is given."""
        self._close()
        if checkpoint_id:
            self._path = checkpoint_id
        self.load_id = str(uuid.uuid4())

    def read_metadata(self) -> Metadata:
        """Open the checkpoint, and return what it has as torch's metadata: each tensor is one chunk."""
        self._close()
        store = store_at(self._place)
        if _is_of_torch(store):
            self._of_torch = FileSystemReader(store.where)
            metadata = self._of_torch.read_metadata()
            save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
        else:
            keys = retry_if_replaced(lambda: self._opened(store))
            metadata, save_id = keys.metadata(), keys.save_id
        metadata.storage_meta = StorageMeta(self._path, save_id=save_id, load_id=self.load_id)
        return metadata

    def _opened(self, store: Store) -> TorchKeys:
        self._close()
        self._open = open_checkpoint(store, verify=self._verifies)
        model, optim = self._names
        self._keys = TorchKeys.of(self._open.index, model=model, optim=optim, allow_pickle=self._allow_pickle)
        return self._keys

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for a load, on every rank."""
        if self._of_torch is not None:
            self._of_torch.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank has opened."""
        if self._open is None:
            return plan
        return replace(plan, storage_data=json.dumps(self._open.index.identity, sort_keys=True))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint, on the coordinator."""
        other = next((rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data), None)
        if other is not None:
            raise CheckpointError(
                f"{name_of(self._place)}: rank {other} has opened another checkpoint than rank 0: the path must be on a "
                "file system that all ranks share, and no process may save to it during the load"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, and hand it the values that are no tensors."""
        if self._of_torch is not None:
            return self._of_torch.read_data(plan, planner)
        if self._open is None:
            retry_if_replaced(lambda: self._opened(store_at(self._place)))
        checkpoint = self._open
        if checkpoint is None:
            raise CheckpointError(f"{name_of(self._place)}: is not open: call read_metadata before read_data")
        try:
            _Read(checkpoint, self._keys, planner, self._budget).read(plan.items)
            checkpoint.check_unchanged()
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _close(self) -> None:
        opened, self._open, self._of_torch = self._open, None, None
        if opened is not None:
            opened.close()


def reader_for(path: str | os.PathLike[str], models: ModelPlaces, optim: str | None) -> Reader:
    """Return a Reader of a checkpoint for a state dict that has these models, and whose optimizer has this key."""
    reader = Reader(path)
    reader._names = models if models.names else None, optim
    return reader


def _is_of_torch(store: Store) -> bool:
    """Return whether the files are a folder of torch's own writers, or one of `fsdp_optim.save(format="dcp")`."""
    try:
        opened = store.open_any()
    except CheckpointError:  # the place is described when it is opened
        return False
    with opened:
        return store.on_file_system and opened.has(_OF_TORCH) and not opened.has(NAME)


@dataclass(frozen=True)
class _Wanted:
    """One item of a planner's plan: the box of the stored tensor that it asks for, and where the elements belong."""

    item: ReadItem
    stored: StoredTensor
    target: torch.Tensor

    @property
    def box(self) -> Box:
        index = self.item.storage_index
        first = tuple(index.offset) if index.offset is not None else (0,) * len(self.stored.shape)
        offsets = tuple(a + b for a, b in zip(first, self.item.storage_offsets, strict=True))
        return Box(offsets, tuple(self.item.lengths))

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file can be read into the memory of the target."""
        target = self.target
        return (
            type(target) in (torch.Tensor, torch.nn.Parameter)
            and target.is_contiguous()
            and target.dtype is dtype_named(self.stored.dtype)
            and not (target.is_conj() or target.is_neg())
        )


@dataclass(frozen=True)
class _Read:
    """The read of one rank's items."""

    checkpoint: OpenCheckpoint
    keys: TorchKeys
    planner: LoadPlanner
    budget: Budget

    def read(self, items: Sequence[ReadItem]) -> None:
        tensors = [item for item in items if item.type is not LoadItemType.BYTE_IO]
        ordered = sorted((item for item in tensors if item.storage_index.fqn in self.keys.tensors), key=self._order)
        for first in range(0, len(ordered), _MOST_TOGETHER):
            few = ordered[first : first + _MOST_TOGETHER]
            for batch in in_batches(few, self._nbytes, self.budget.nbytes):
                self._fill([self._wanted(item) for item in batch])
        for item in tensors:
            if item.storage_index.fqn not in self.keys.tensors:
                self._copy(item)
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_bytes(item)

    def _order(self, item: ReadItem) -> tuple[str, int, Shape]:
        stored = self.keys.tensors[item.storage_index.fqn]
        return stored.file, stored.start, tuple(item.storage_offsets)

    def _nbytes(self, item: ReadItem) -> int:
        return item.lengths.numel() * self.keys.tensors[item.storage_index.fqn].itemsize

    def _wanted(self, item: ReadItem) -> _Wanted:
        target = self.planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise CheckpointError(
                f"{item.storage_index.fqn}: the planner asks for {list(item.lengths)} elements, and gives a tensor of "
                f"{list(target.shape)} for them"
            )
        return _Wanted(item, self.keys.tensors[item.storage_index.fqn], target)

    def _fill(self, wanted: Sequence[_Wanted]) -> None:
        self._end().fill([_slice(w.stored, w.box, w.target.view(-1)) for w in wanted if w.is_direct and w.box.numel])
        for w in wanted:
            if not w.is_direct:
                self._by_windows(w.stored, w.box, w.target)
            self.planner.commit_tensor(w.item, w.target)

    def _by_windows(self, stored: StoredTensor, box: Box, target: torch.Tensor) -> None:
        """Read a box in parts that fit the budget, and copy them to where they belong, with a cast where the dtypes differ."""
        dtype = dtype_named(stored.dtype)
        for part, into in _windows(box, target, max(self.budget.nbytes // dtype.itemsize, 1)):
            scratch = torch.empty(part.sizes, dtype=dtype, device="cpu")
            self._end().fill([_slice(stored, part, scratch.view(-1))])
            into.copy_(scratch)

    def _end(self) -> CheckpointEnd:
        return CheckpointEnd(self.checkpoint, 0, self.budget, as_needed=True)

    def _copy(self, item: ReadItem) -> None:
        """Hand over a tensor that is among the small values, which are in memory."""
        value = self.keys.values.get(item.storage_index.fqn)
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{self.checkpoint.index.where}: {item.storage_index.fqn}: the checkpoint has no such tensor"
            )
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dim, start, length)
        target = self.planner.resolve_tensor(item).detach()
        target.copy_(value)
        self.planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem) -> None:
        key = item.storage_index.fqn
        if key in self.keys.tensors or key not in self.keys.values:
            raise CheckpointError(f"{self.checkpoint.index.where}: {key}: the checkpoint has no such value")
        value = self.keys.values[key]
        if isinstance(value, Withheld):
            raise CheckpointError(f"{value.why} (Reader(path, allow_pickle=True))")
        if isinstance(value, RawBytes):
            self.planner.load_bytes(item, io.BytesIO(value.data))
        else:
            self.planner.load_bytes(item, bytes_with(value))


def _slice(stored: StoredTensor, box: Box, flat: torch.Tensor) -> Slice:
    """Return a box of a stored tensor as a part of a read: `flat` has its elements, one after the other."""
    cut = _cut_of(stored.shape, box)
    return Slice(StoredValue.of(stored.key, "", stored, cut, flat, is_state=False), cut, flat)


@lru_cache(maxsize=4096)
def _cut_of(shape: Shape, box: Box) -> Placement:
    """Return a box of a tensor on rank 0: one object for equal arguments, by which reads that are alike are found."""
    return Whole(shape, (0,)) if box.sizes == shape else Boxes(shape, ((0, (Block(box, 0),)),))


def _windows(box: Box, target: torch.Tensor, most: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a box in parts of at most `most` elements, each with the part of the target for it."""
    if not box.numel:
        return
    if box.numel <= most or not box.sizes:
        yield box, target
        return
    inner = box.numel // box.sizes[0]
    rows = max(most // inner, 1)
    for first in range(0, box.sizes[0], rows):
        num = min(rows, box.sizes[0] - first)
        part = Box((box.offsets[0] + first, *box.offsets[1:]), (num, *box.sizes[1:]))
        into = target[first : first + num]
        if inner <= most:
            yield part, into
        else:
            for inside, inside_target in _windows(Box(box.offsets[1:], box.sizes[1:]), into[0], most):
                yield Box((part.offsets[0], *inside.offsets), (1, *inside.sizes)), inside_target.unsqueeze(0)
