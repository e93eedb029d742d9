"""A look at a value that was just saved, by the reader that every load has: what a save writes, a load must accept."""

from __future__ import annotations

from functools import partial

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.part_in_memory import InMemory
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, read_archive
from fsdp_optim.foreign.archive.torch_globals import Storage
from fsdp_optim.foreign.archive.tree import mapped
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import Unread, unread_in

ALLOW = "give allow_pickle=True"
"""What makes a load read an object of any class."""

_PLAIN = "save plain values (numbers, str, tuples, dicts, tensors, arrays of numbers in this machine's byte order)"
_QUANTISED = "torch._utils._rebuild_qtensor"


def check_read_back(where: str, what: str, data: bytes, *, allow_pickle: bool, instead: str = ALLOW) -> None:
    """Raise CheckpointError for a value that no load would read again. Nothing of the archive is executed.

    `what`: a noun for the value. `data`: its archive. `allow_pickle`: whether a load may read objects of all classes. `instead`:
    what else the user can do for those.
    """
    try:
        archive = read_archive(InMemory(where, data), "")
        mapped(archive.value, (StoredTensor, Unread), partial(_check_item, archive))
    except CheckpointError as error:
        raise CheckpointError(
            f"{where}: a {what} would be saved in a form that no load reads ({error.__cause__ or error}): {_PLAIN}"
        ) from error
    unread = None if allow_pickle else unread_in(archive.value)
    if unread is not None:
        raise CheckpointError(f"{where}: a {unread.what} can only be pickled: {instead}, or {_PLAIN}")


def _check_item(archive: TorchArchive, item: StoredTensor | Unread) -> None:
    """Refuse what is not read even by those who trust a file, and bools of other bytes: a load looks at these bytes alone."""
    if isinstance(item, StoredTensor):
        if item.dtype == "bool":
            archive.materialised(item)
    elif isinstance(item, Storage) or item.what == _QUANTISED:
        raise CheckpointError("it has a storage by itself, or a quantised tensor")
