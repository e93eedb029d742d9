"""The state of a trainer's objects for one save: an object that fails on one rank fails the save on all of them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdp_optim.checkpoint.run.trainer_state import TrainerState
from fsdp_optim.options import SaveOptions
from fsdp_optim.transport.agree import agree
from fsdp_optim.verbs.call import collective_call


def with_objects(model: nn.Module, options: SaveOptions, objects: TrainerState) -> SaveOptions:
    """The options of a save with the state of these objects as its extras. Called by all ranks of the model."""
    with collective_call("save", [model], options, options.call, all_of_plain=True) as (_, group):
        objects.validate()
        extra, own = objects.extra(), objects.per_rank_extra(group.position)
        agree(group, "objects")
    return replace(options, extra=extra, per_rank_extra=own)
