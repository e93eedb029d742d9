"""The fingerprint of a live model, its optimizer and other state, the same on all ranks. No bytes of values move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_optim.arguments import Arguments, check_at_least
from fsdp_optim.checkpoint.common.contents import HalvesEnd, read_state, read_weights
from fsdp_optim.checkpoint.common.printing import (
    Place,
    PrintEnd,
    fingerprint_from,
    merged,
    objects_of,
    print_of,
    scalars_of,
)
from fsdp_optim.checkpoint.common.run_state import RunState, refuse_sharded
from fsdp_optim.checkpoint.common.trees import read_trees, shown
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.tree_values import InFile, leaves_of
from fsdp_optim.move import move
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.results.fingerprints import Fingerprint, ValueFingerprint
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.ends import LiveEnd

_MOST_PROJECTIONS = 256


@dataclass(frozen=True)
class FingerprintArguments(Arguments):
    """The arguments of `fingerprint`."""

    call: CallArguments
    state: RunState
    projections: int

    def validate(self) -> None:
        super().validate()
        check_at_least("projections", self.projections, 0)
        if self.projections > _MOST_PROJECTIONS:
            raise StateError(f"projections must be at most {_MOST_PROJECTIONS}, not {self.projections}")


def fingerprint(model: Model, optim: Optimizers | None, options: FingerprintArguments) -> Fingerprint:
    """Return the fingerprint. Called by all ranks of the model."""
    with collective_call("fingerprint", [model], options, options.call, all_of_plain=True) as ((reader,), group):
        about = f"{'an' if optim is not None else 'no'} optimizer"
        weights = read_weights(reader, group, options, options.call, about)
        state = read_state(reader, optim, group, options, options.call, about) if optim is not None else None
        values, own = options.state.saved()  # on every rank: a state_dict() may be a collective call
        common: Mapping[str, Any] = values or {}
        trees = None
        if options.state.is_given:
            common, trees, _ = read_trees(group, common, options, options.call.on_replica_mismatch)
        tensors = [value for half in (weights, state, trees) if half is not None for value in half.tensors]
        budget = group.budget.share(2, "windows of values that are not contiguous, and rows of them")
        end, failure = PrintEnd(tensors, group.rank, budget, group.world.plans, options.projections), Failure()
        live = HalvesEnd(LiveEnd(weights.local), *(LiveEnd(half.local) if half else None for half in (state, trees)))
        move(tensors, live, end, group, budget, failure)
        others: dict[Place, ValueFingerprint] = {}
        with failure:
            others = _own_prints(group, own or {}, options.projections)
            if group.rank == group.ranks[0]:
                others |= objects_of(weights, state, options.projections)
                others |= _leaf_prints(common, options.projections)
            if state is not None:
                others |= scalars_of(state)
        return fingerprint_from(merged(group, end, others, failure), weights.global_state.params)


def _leaf_prints(common: Mapping[str, Any], num_projections: int) -> dict[Place, ValueFingerprint]:
    """Return the fingerprints of the values of `state=` that are no tensors in files, as the lowest rank has them."""
    prints: dict[Place, ValueFingerprint] = {}
    for path, leaf in leaves_of(dict(common)):
        if not isinstance(leaf, InFile):
            refuse_sharded(shown(path), leaf)
            prints["state", ".".join(map(str, path)), ""] = print_of(shown(path), leaf, num_projections)
    return prints


def _own_prints(group: RankGroup, own: Mapping[str, Any], num_projections: int) -> dict[Place, ValueFingerprint]:
    """Return the fingerprints of the values of `per_rank(...)` on this rank."""
    return {
        ("state", f"{'.'.join(map(str, path))}[rank {group.position}]", ""): print_of(
            shown(path), leaf, num_projections
        )
        for path, leaf in leaves_of(dict(own))
    }
