"""Which halves of a checkpoint a load asks for, the weights and the optimizer, and whether the checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.errors import StateError, shortened
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import COMMON
from fsdp_optim.options import WhichWeights

_FEW = 3  # names in an error that concerns all names


def check_halves(index: CheckpointIndex, optim: object, which: WhichWeights, *, has_state: bool) -> None:
    """Raise StateError if a checkpoint cannot fill the model and the optimizers that a caller has given.

    `which`: the weights that the caller wants. `has_state`: the caller wants values of the trainer.
    """
    if which == "none" and optim is None and not has_state:
        raise StateError(
            'weights="none" without an optimizer leaves nothing to load: give optim= or state= too, or other weights='
        )
    if which != "none" and index.facts.weights.which == "none":
        raise StateError(
            f'{index.where}: was saved with weights="none", so it has an optimizer and no weights: give weights="none" and '
            "optim= to load the optimizer, and load the weights from where they are"
        )
    if which != "none" and index.has_optim_only:
        raise StateError(
            f"{index.where}: has an optimizer and no weights{_beside(index)}: give "
            'weights="none" and optim= to load the optimizer, and load the weights from where they are'
        )
    if optim is None:
        return
    num = index.optim.num_joined if index.optim is not None else 1
    given = len(optim) if isinstance(optim, (list, tuple)) else 1
    if num > 1 and given != num:
        raise StateError(
            f"{index.where}: has {num} optimizers, and {given} {'was' if given == 1 else 'were'} given: give optim= a list "
            "of the optimizers in the order of the checkpoint"
        )


def _beside(index: CheckpointIndex) -> str:
    """Name the other values of a file of an optimizer, because the user may have mistaken one of them for the weights."""
    others = index.extras[COMMON].decoded_each(allow_pickle=False) if COMMON in index.extras else None
    if not others or not isinstance(others, Mapping):
        return ""
    return f" (its other values, {shortened(others, _FEW)}, are no dicts of tensors by name)"
