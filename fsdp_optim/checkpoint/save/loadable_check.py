"""Prove that a load would accept a save: run the checks of a load on the save, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.checkpoint.load.targets import check_filled
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.description import OptimDescription
from fsdp_optim.formats.base.index import StoredOptim
from fsdp_optim.formats.base.saved_optim import saved_optim
from fsdp_optim.state.live.fitting import LiveOptimizer
from fsdp_optim.state.live.local_dict import summarize
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.values.summary import Summary


def prove_loadable(
    state: SavedHalf, optim: StoredOptim, description: OptimDescription, given: Mapping[str, str]
) -> None:
    """Fit the saved optimizer, as a reader of the new checkpoint will decode it, to the live optimizer.

    `optim`: the optimizer of the index to write. `description`: its encoded form, as a reader decodes it. `given`: by the names
    in the checkpoint, the model's names of parameters that are saved under other names.

    Raises CheckpointError that names the value which could not be loaded.
    """
    where = "the new checkpoint"
    try:
        live = state.local.live_optimizer(state.global_state)
        if not given and _lists_alike(description, live):
            description, live = _of_each_kind(state.global_state, description, live)
        live = replace(live, names=replace(live.names, given={**live.names.given, **given}))
        saved = saved_optim(where, description, optim.tensors)
        loaded = StoredState.resolved(where, saved, live.names, live.shapes, optim.read_small, live.off_mesh)
        full, _ = live.fit(loaded.full, strict=True)
        check_filled(full, summarize(full, live.shapes))
    except FsdpOptimError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _lists_alike(description: OptimDescription, live: LiveOptimizer) -> bool:
    """Return whether the saved optimizer has the parameters of the live one, by the same names, in the same groups and order."""
    return tuple(group.params for group in description.groups) == live.names.groups


def _of_each_kind(
    global_state: GlobalState, description: OptimDescription, live: LiveOptimizer
) -> tuple[OptimDescription, LiveOptimizer]:
    """Return both sides with one live parameter of each kind: the same shapes, groups, and summaries of the state.

    Whether a load accepts a value depends on these alone, but for opaque values: parameters that have some stay all.
    """
    params, kept = global_state.params, set[str]()
    known: set[tuple[object, ...]] = set()
    summaries: dict[Summary | None, int] = {}
    numbers = {id(param.summary): summaries.setdefault(param.summary, len(summaries)) for param in params.values()}
    for fqns in live.names.units:
        held = [params[fqn] for fqn in fqns if fqn in params]
        kind = tuple(
            [
                (param.placement.shape, param.group_index, numbers[id(param.summary)], param.fqn in live.on_mesh)
                for param in held
            ]
        )
        if kind not in known or any(param.summary is not None and param.summary.opaque for param in held):
            known.add(kind)
            kept.update(fqns)

    def of(fqns: Iterable[str]) -> tuple[str, ...]:
        return tuple([fqn for fqn in fqns if fqn in kept])

    names = replace(
        live.names,
        groups=tuple(map(of, live.names.groups)),
        units=tuple([fqns for fqns in live.names.units if not kept.isdisjoint(fqns)]),
        model_order=of(live.names.model_order),
    )
    groups = tuple([replace(group, params=of(group.params)) for group in description.groups])
    return (
        replace(description, groups=groups, params={fqn: description.params[fqn] for fqn in of(description.params)}),
        replace(
            live,
            names=names,
            shapes={fqn: live.shapes[fqn] for fqn in of(live.shapes)},
            with_state=live.with_state & kept,
            on_mesh=live.on_mesh & kept,
        ),
    )
