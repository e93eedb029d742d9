"""Thin: takes the optimizer from a checkpoint of this library, in place. The weights, and all other files, stay as they are."""

from __future__ import annotations

from contextlib import closing

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, path_of, store_at
from fsdp_optim.errors import wrong_use
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.formats.base.some_models import SomeModels
from fsdp_optim.formats.own.format import OURS, thinned
from fsdp_optim.formats.own.reader import Checkpoint
from fsdp_optim.results.calls import ThinResult
from fsdp_optim.storage.base import Store


def thin(place: Place, storage_options: StorageOptions = None) -> ThinResult:
    """Remove the optimizer of a checkpoint, and what a killed call has left. No communication."""
    store = store_at(place, OURS, storage_options)
    return retry_if_replaced(lambda: _thin(store))


def _thin(store: Store) -> ThinResult:
    with closing(open_checkpoint(store, verify=True)) as checkpoint:
        own = _own(checkpoint)
        data, names = thinned(own)
        own.check_unchanged()
        freed = store.shrink(own.opened, OURS.probe.manifest, data, names) if data is not None or names else 0
        return ThinResult(path_of(store), freed)


def _own(checkpoint: Reader) -> Checkpoint:
    """Return the reader. Raises CheckpointError for a checkpoint that cannot be thin."""
    where = checkpoint.index.where
    if isinstance(checkpoint, SomeModels):
        raise wrong_use(
            f"{where}: is one of the models of a checkpoint, which thin takes as a whole: give the checkpoint's path"
        )
    if not isinstance(checkpoint, Checkpoint):
        raise wrong_use(
            f"{where}: is a checkpoint of the format {checkpoint.index.facts.format_name}, and thin changes those of this "
            f"library alone: convert writes it as a checkpoint that thin can change"
        )
    if not checkpoint.model and checkpoint.manifest.has_optim:
        raise wrong_use(
            f"{where}: has no weights, so that nothing would be left without its optimizer: remove it instead"
        )
    return checkpoint
