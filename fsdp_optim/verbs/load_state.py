"""Load a shard into a live optimizer, on this rank or on all of them. Every value keeps its saved dtype."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fsdp_optim.arguments import check_names
from fsdp_optim.errors import FsdpOptimError, StateError, counted_noun, shortened
from fsdp_optim.results.calls import Incompatible
from fsdp_optim.state.dicts.full import RESERVED_KEYS
from fsdp_optim.state.live.class_fit import lacking_values
from fsdp_optim.state.live.local import OptimizerLike
from fsdp_optim.state.live.local_dict import INCOMPATIBLE, Shard
from fsdp_optim.state.values.classes import OptimizerClass, has_own_form
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.dtensors import is_dtensor
from fsdp_optim.tensors.elements import check_elements
from fsdp_optim.tensors.memory import is_plain, tensors_in
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.arguments import check_optimizers, check_shard
from fsdp_optim.verbs.own_load import FIXES, OwnLoad, copied_values, names_in
from fsdp_optim.verbs.widening import in_words, widened

log = logging.getLogger("fsdp_optim")


class LoadableOptimizer(OptimizerLike, Protocol):
    """An optimizer with `load_state_dict()`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


LoadableOptimizers = LoadableOptimizer | Sequence[LoadableOptimizer]
"""One optimizer, or several over one model."""


class Before:
    """The state of optimizers before a load, so that a failed load can be undone. No tensor is copied.

    torch's own optimizers get back all of their state, because their `load_state_dict` makes new tensors. Other optimizers load
    their previous dict again; an optimizer whose `load_state_dict` writes into its own tensors cannot be restored.
    """

    def __init__(self, optims: Sequence[LoadableOptimizer]) -> None:
        self._optims = [
            (optim, _Kept(optim) if isinstance(optim, torch.optim.Optimizer) else optim.state_dict())
            for optim in optims
        ]

    def put_back(self, number: int | None = None) -> None:
        """Restore the first `number` optimizers, or all. Raises nothing, because an error is on its way."""
        for optim, previous in self._optims[:number]:
            try:
                if isinstance(previous, _Kept):
                    previous.put_back()
                else:
                    OwnLoad.of(optim, previous).run()
            except Exception:
                log.exception("the previous state of an optimizer (%s) could not be restored", type(optim).__name__)


class _Kept:
    """The attributes of a torch optimizer, and the content of its state and its groups."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim, self._attributes = optim, dict(vars(optim))
        self._groups = [(group, dict(group)) for group in optim.param_groups]
        self._state = [(param, values, copied_values(values)) for param, values in optim.state.items()]

    def put_back(self) -> None:
        vars(self._optim).clear()
        vars(self._optim).update(self._attributes)
        for group, previous in self._groups:
            group.clear()
            group.update(previous)
        self._optim.param_groups[:] = [group for group, _ in self._groups]
        self._optim.state.clear()
        for param, values, previous in self._state:
            if isinstance(values, dict):
                values.clear()
                values.update(previous)
            self._optim.state[param] = values


def load_shard(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    keep: Sequence[str] = (),
    *,
    logs: bool = True,
    is_given: bool = True,
) -> Incompatible:
    """Load a shard as `optim.load_state_dict(shard)`, but without casts. Several optimizers take a list of shards.

    If one optimizer fails, all that were loaded get back their previous state. `logs`: log the hyperparameters that change.
    `is_given`: a user has given the shard, so it may have values without elements, or tensors that were made in inference mode.
    """
    if shard is None:
        raise StateError(
            "shard is None: give what get_shard_from_optim_state_dict or scatter_full_optim_state_dict returned"
        )
    check_optimizers(optim, loadable=True)
    for listed in shard if isinstance(shard, (list, tuple)) else [shard]:
        check_shard(listed)
        if is_given:
            check_elements("the shard", listed)
    check_names("keep_hyperparameters", keep, "keep_hyperparameters=['lr']")
    optims: list[LoadableOptimizer] = list(optim) if isinstance(optim, (list, tuple)) else [optim]  # type: ignore[list-item]
    shards = [shard] if isinstance(shard, Mapping) else list(shard)
    if len(optims) != len(shards):
        raise StateError(f"{counted_noun(len(optims), 'optimizer')} cannot load {counted_noun(len(shards), 'shard')}")
    incompatible = shards[0].get(INCOMPATIBLE, {}) if shards else {}
    shards = [{key: value for key, value in listed.items() if key != INCOMPATIBLE} for listed in shards]
    if is_given or torch.is_inference_mode_enabled():
        shards = [ordinary(listed) for listed in shards]
    for live, own in zip(optims, shards, strict=True):
        _refuse_full(live, own)
    all_groups = [_keeping(live, own, keep) for live, own in zip(optims, shards, strict=True)]
    loads: list[OwnLoad] = []
    notes: dict[str, None] = {}
    for live, own, groups in zip(optims, shards, all_groups, strict=True):
        load = OwnLoad.of(live, {**own, "param_groups": groups})
        wide, widening = widened(live, load.shard, load.params)
        check_needed_values(live, wide)
        loads.append(replace(load, shard=wide))
        notes.update(widening)
    changes = _changes(optims, all_groups) if logs else ""
    before = Before(optims)
    begun = 0
    try:
        for load in loads:
            begun += 1
            load.run()
    except BaseException as error:
        before.put_back(begun)
        refused = _refused(error, type(optims[begun - 1]).__name__) if isinstance(error, Exception) else error
        if refused is not error:
            raise refused from error
        raise
    if notes and logs:
        log.info("state that was narrower than its parameters now has their dtype (exact): %s", in_words(notes))
    if changes:
        log.info("hyperparameters that this load changed (old -> new): %s", changes)
    return Incompatible(**{name: tuple(names) for name, names in incompatible.items()})


_REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)  # the errors that unfitting state causes


def _refused(error: Exception, name: str) -> Exception:
    """Return the error of an optimizer's own load_state_dict as an error of this library, if state does not fit."""
    if isinstance(error, FsdpOptimError) or not isinstance(error, _REFUSALS):
        return error
    return StateError(
        f"{name}'s own load_state_dict() refused the saved state, with {type(error).__name__}: {error}; nothing was loaded"
    )


def ordinary(value: Any) -> Any:
    """Copy the tensors of a value that were made in inference mode, because a step could not change these in place.

    Containers without such tensors stay the same objects.
    """
    if isinstance(value, torch.Tensor):
        return value.clone() if _is_inference(value) else value
    if type(value) is dict:
        changed = {
            key: new
            for key, item in value.items()
            if type(item) in _CONTAINERS or isinstance(item, torch.Tensor)
            if (new := ordinary(item)) is not item
        }
        return {**value, **changed} if changed else value
    if type(value) in (list, tuple):
        items = [ordinary(item) for item in value]
        is_same = all(new is item for new, item in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value


_CONTAINERS = (dict, list, tuple)


def _is_inference(value: torch.Tensor) -> bool:
    if is_plain(value) or is_dtensor(value):
        return value.is_inference()
    return any(part.is_inference() for part in tensors_in(value))


def _changes(optims: Sequence[LoadableOptimizer], loaded: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return the hyperparameters that a load changes, in words. Changes that several groups share are listed once."""
    where: dict[str, list[str]] = {}
    for number, (optim, groups) in enumerate(zip(optims, loaded, strict=True)):
        for index, (old, new) in enumerate(zip(optim.param_groups, groups, strict=True)):
            names = [key for key in {**old, **new} if key not in ("params", "param_names")]
            change = ", ".join(
                f"{key} {old.get(key, 'absent')!s} -> {new.get(key, 'absent')!s}"
                for key in names
                if key not in old or key not in new or not same(old[key], new[key])
            )
            if change:
                where.setdefault(change, []).append(
                    f"group {index}" + (f" of optimizer {number}" if len(optims) > 1 else "")
                )
    return "; ".join(f"{shortened(places, 4)}: {change}" for change, places in where.items())


_FULL_KEYS = RESERVED_KEYS - {"state", "param_groups"}


def _refuse_full(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> None:
    """Raise StateError for a full dict, which has keys that no shard has. Some optimizers would load it without an error."""
    keys = sorted(_FULL_KEYS & set(shard))
    names = names_in(shard)
    if keys or (names and not names_in(optim.state_dict())):  # some optimizers themselves use names
        why = f"it has {keys[0]!r}" if keys else f"its groups list names such as {names[0]!r}"
        num_full, num_live = (
            sum(len(group["params"]) for group in groups) for groups in (shard["param_groups"], optim.param_groups)
        )
        raise StateError(
            f"this is a full dict of {counted_noun(num_full, 'parameter')} ({why}), not this rank's part of "
            f"one for an optimizer with {num_live}: "
            f"{FIXES}"
        )


def check_needed_values(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> None:
    """Raise StateError for state without the values that the optimizer's next step needs, with the groups of the shard."""
    if not has_own_form(optim):
        return  # a wrapper with other names for its values does not have the values of the optimizer inside
    of = OptimizerClass.of(optim)
    for group in shard["param_groups"]:
        hyperparameters = {key: value for key, value in group.items() if key != "params"}
        enough: set[tuple[object, ...]] = set()  # the names of the values of most parameters are the same
        for local_id in group["params"]:
            values = shard["state"].get(local_id)
            # None and dict are the usual ones, and Mapping answers slowly.
            if values is None or not isinstance(values, (dict, Mapping)) or (names := tuple(values)) in enough:
                continue
            if why := lacking_values(of, hyperparameters, [str(name) for name in names]):
                raise StateError(f"local parameter {local_id}: {why}")
            enough.add(names)


def _keeping(optim: LoadableOptimizer, shard: Mapping[str, Any], keep: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups of the shard, with the live values of the hyperparameters `keep`."""
    if len(shard["param_groups"]) != len(optim.param_groups):
        raise StateError(
            f"this shard has {counted_noun(len(shard['param_groups']), 'group')}, the optimizer {len(optim.param_groups)}"
        )
    groups = []
    for saved, live in zip(shard["param_groups"], optim.param_groups, strict=True):
        unknown = [key for key in keep if key not in live]
        if unknown:
            raise StateError(
                f"keep_hyperparameters={unknown[0]!r}: the optimizer's groups have no such hyperparameter, but {sorted(live)}"
            )
        groups.append({**saved, **{key: live[key] for key in keep}})
    return groups


def load_on_all(
    group: RankGroup,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Shard | list[Shard],
    keep: Sequence[str] = (),
    before: Before | None = None,
) -> Incompatible:
    """Load the optimizer on all ranks. If one fails, the optimizers of all ranks get back their previous state.

    `before`: that of the caller, who can put the state back later too.
    """
    before = before or Before([*optim] if isinstance(optim, (list, tuple)) else [optim])  # type: ignore[list-item]
    failure, incompatible = Failure(), Incompatible()
    with failure:  # on an error, load_shard itself restores the optimizer of this rank
        incompatible = load_shard(optim, shard, keep, logs=group.rank == group.ranks[0], is_given=False)
    try:
        agree(group, "optimizer loaded", failure.error)
    except BaseException:
        if failure.error is None:
            before.put_back()
        raise
    return incompatible
