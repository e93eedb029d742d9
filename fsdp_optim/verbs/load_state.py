"""Load a shard into a live optimizer. Every value keeps its saved dtype."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_optim.adapters import all_adapters
from fsdp_optim.errors import FsdpOptimError, StateError, counted_noun, shortened
from fsdp_optim.memory import is_plain, tensors_in, within
from fsdp_optim.state.classes import innermost, is_of_torch
from fsdp_optim.state.full import RESERVED_KEYS
from fsdp_optim.state.kinds import is_known_moment
from fsdp_optim.state.local import OptimizerLike
from fsdp_optim.state.local_dict import INCOMPATIBLE
from fsdp_optim.state.packed import given_names
from fsdp_optim.state.same import same
from fsdp_optim.verbs.arguments import check_optimizers, check_shard

log = logging.getLogger("fsdp_optim")


class LoadableOptimizer(OptimizerLike, Protocol):
    """An optimizer with `load_state_dict()`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Incompatible(NamedTuple):
    """The differences that `strict=False` has passed over.

    Attributes:
        missing: FQNs that the full dict does not have, and that keep their live state.
        unexpected: FQNs that the optimizer does not have, and that were not loaded.
        unmatched_hyperparameters, unmatched_values: names that only one of two optimizers of different classes has. The saved
            ones were left out, the live ones stay.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()


class Before:
    """The state of optimizers before a load, so that a failed load can be undone. No tensor is copied.

    torch's own optimizers get back their whole state, because their `load_state_dict` makes new tensors. Other optimizers load
    their previous dict again; one whose `load_state_dict` writes into its own tensors cannot be restored.
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
                    _Load.of(optim, previous).run()
            except Exception:
                log.exception("the previous state of an optimizer (%s) could not be restored", type(optim).__name__)


class _Kept:
    """The attributes of a torch optimizer, and the content of its state and its groups."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim, self._attributes = optim, dict(vars(optim))
        self._groups = [(group, dict(group)) for group in optim.param_groups]
        self._state = [(param, values, _copied(values)) for param, values in optim.state.items()]

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


def _copied(values: Any) -> Any:
    """A copy of the dict of a parameter's values. An entry of another type, under a key that is no parameter, is not copied."""
    return dict(values) if isinstance(values, dict) else values


def load_shard(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    keep: Sequence[str] = (),
    *,
    logs: bool = True,
) -> Incompatible:
    """As `optim.load_state_dict(shard)`, but without casts. Several optimizers take a list of shards.

    If one optimizer fails, all that were loaded get back their previous state. `logs`: log the hyperparameters that change.
    """
    if shard is None:
        raise StateError(
            "shard is None: give what get_shard_from_optim_state_dict or scatter_full_optim_state_dict returned"
        )
    check_optimizers(optim, loadable=True)
    for listed in shard if isinstance(shard, (list, tuple)) else [shard]:
        check_shard(listed)
    if isinstance(keep, str):
        raise StateError(f"keep has to be a list of names of hyperparameters, as in keep=['lr'], not {keep!r}")
    optims: list[LoadableOptimizer] = list(optim) if isinstance(optim, (list, tuple)) else [optim]  # type: ignore[list-item]
    shards = [shard] if isinstance(shard, Mapping) else list(shard)
    if len(optims) != len(shards):
        raise StateError(f"{counted_noun(len(optims), 'optimizer')} cannot load {counted_noun(len(shards), 'shard')}")
    incompatible = shards[0].get(INCOMPATIBLE, {}) if shards else {}
    shards = [_ordinary({key: value for key, value in listed.items() if key != INCOMPATIBLE}) for listed in shards]
    for live, own in zip(optims, shards, strict=True):
        _refuse_full(live, own)
    all_groups = [_keeping(live, own, keep) for live, own in zip(optims, shards, strict=True)]
    loads = [
        _Load.of(live, {**own, "param_groups": groups})
        for live, own, groups in zip(optims, shards, all_groups, strict=True)
    ]
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
    """The error of an optimizer's own load_state_dict as an error of this library, if state does not fit."""
    if isinstance(error, FsdpOptimError) or not isinstance(error, _REFUSALS):
        return error
    return StateError(
        f"{name}'s own load_state_dict() refused the saved state, with {type(error).__name__}: {error}; nothing was loaded"
    )


def _ordinary(value: Any) -> Any:
    """A shard with copies of tensors that were made in inference mode, because a step could not change these in place."""
    if isinstance(value, torch.Tensor):
        return value.clone() if any(part.is_inference() for part in tensors_in(value)) else value
    return within(value, _ordinary)


def _changes(optims: Sequence[LoadableOptimizer], loaded: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The hyperparameters that a load changes, in words. Changes that several groups share are listed once."""
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
    names = _names_in(shard)
    if keys or (names and not _names_in(optim.state_dict())):  # some optimizers themselves use names
        why = f"it has {keys[0]!r}" if keys else f"its groups list names such as {names[0]!r}"
        num_full, num_live = (
            sum(len(group["params"]) for group in groups) for groups in (shard["param_groups"], optim.param_groups)
        )
        raise StateError(
            f"this is a full dict of {counted_noun(num_full, 'parameter')} ({why}), not this rank's part of "
            f"one for an optimizer with {num_live}: "
            f"{_WAYS_OUT}"
        )


def _names_in(own: Mapping[str, Any]) -> list[str]:
    return [param for group in own["param_groups"] for param in group["params"] if isinstance(param, str)]


_WAYS_OUT = (
    "cut it with get_shard_from_optim_state_dict(model, optim, full), or where only one rank has it with "
    "scatter_full_optim_state_dict(model, optim, full, source_rank), and load what that returns"
)


_IF_FULL = f"If this is a full dict: {_WAYS_OUT}"


def _refuse_whole_values(optim: object, shard: Mapping[str, Any], params: Mapping[Any, torch.Tensor]) -> None:
    """Raise StateError for whole values of parameters that are cut, as full dicts of other libraries have them.

    Optimizers of other packages may keep values of another shape under the same names.
    """
    of_torch = is_of_torch(optim)
    for local_id, values in shard["state"].items():
        param = params.get(local_id)
        for name, value in values.items() if param is not None else ():
            if param is None or not is_plain(value) or not value.dim() or not is_known_moment(name):
                continue
            held = param.to_local() if hasattr(param, "to_local") else param
            unlike = value.shape != held.shape
            if (of_torch and (unlike or held is not param)) or (unlike and value.shape == param.shape):
                whole = held.dim() > 1 and any(adapter.has_cut(param) for adapter in all_adapters())
                why = "Leave summon_full_params() first, which shows whole parameters" if whole else _IF_FULL
                raise StateError(
                    f"{name} of local parameter {local_id} has shape {list(value.shape)}, this rank's part of the parameter has "
                    f"{list(held.shape)}. {why}"
                )


def _keeping(optim: LoadableOptimizer, shard: Mapping[str, Any], keep: Sequence[str]) -> list[dict[str, Any]]:
    """The groups of the shard, with the live values of the hyperparameters `keep`."""
    if len(shard["param_groups"]) != len(optim.param_groups):
        raise StateError(
            f"this shard has {counted_noun(len(shard['param_groups']), 'group')}, the optimizer {len(optim.param_groups)}"
        )
    groups = []
    for saved, live in zip(shard["param_groups"], optim.param_groups, strict=True):
        unknown = [key for key in keep if key not in live]
        if unknown:
            raise StateError(
                f"keep={unknown[0]!r}: the optimizer's groups have no such hyperparameter, but {sorted(live)}"
            )
        groups.append({**saved, **{key: live[key] for key in keep}})
    return groups


@dataclass(frozen=True)
class _Load:
    """A load of a dict into an optimizer. Values that torch would change are put in after torch's own load."""

    optim: LoadableOptimizer
    shard: Mapping[str, Any]
    params: Mapping[Any, torch.Tensor]
    cast: Mapping[tuple[Any, str], Any]

    @classmethod
    def of(cls, optim: LoadableOptimizer, shard: Mapping[str, Any]) -> _Load:
        """Prepare a load. Raises StateError if the dict cannot be loaded. Changes nothing."""
        params = _params_by_id(optim, shard)
        _refuse_whole_values(optim, shard, params)
        cast = {
            (local_id, name): value
            for local_id, values in shard["state"].items()
            if local_id in params
            for name, value in values.items()
            if _would_change(params[local_id], name, value)
        }
        if cast and not isinstance(getattr(optim, "state", None), Mapping):
            (local_id, name), value = next(iter(cast.items()))
            raise StateError(
                f"{name} of local parameter {local_id} is a {getattr(value, 'dtype', type(value).__name__)}, its parameter "
                f"{params[local_id].dtype}: load_state_dict() would change it, and {type(optim).__name__} has no `state` "
                "into which it could be put unchanged"
            )
        return cls(optim, shard, params, cast)

    def run(self) -> None:
        """Load the dict, and keep the saved order of values.

        An optimizer with its own load_state_dict gets all values, of which torch casts copies.
        """
        own = type(innermost(self.optim)).load_state_dict is not torch.optim.Optimizer.load_state_dict
        withheld = {} if own else {key for key in self.cast if key[1] != "step"}  # torch's __setstate__ needs "step"
        uncast = {
            local_id: {name: value for name, value in values.items() if (local_id, name) not in withheld}
            if local_id in self.params
            else values  # not of a parameter
            for local_id, values in self.shard["state"].items()
        }
        self.optim.load_state_dict({**self.shard, "state": uncast})
        for local_id in dict.fromkeys(local_id for local_id, _ in self.cast):
            param = self.params[local_id]
            live: dict[str, Any] = self.optim.state[param]  # type: ignore[attr-defined]
            loaded = dict(live)
            live.clear()
            for name in self.shard["state"][local_id]:
                if (local_id, name) in self.cast:
                    live[name] = _moved(self.cast[local_id, name], param.device)
                else:
                    live[name] = loaded[name]


def _params_by_id(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    groups, live = shard["param_groups"], optim.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in live]:
        raise StateError(
            f"this shard has {[len(g['params']) for g in groups]} parameters in its groups, the optimizer has "
            f"{[len(g['params']) for g in live]}: a full dict has to go through get_shard_from_optim_state_dict first"
        )
    by_name = given_names(optim)
    unknown = [name for name in _names_in(shard) if name not in by_name]
    if unknown:
        raise StateError(
            f"{type(optim).__name__} does not tell the parameter that it calls {unknown[0]!r}, so its dtype cannot be kept: "
            "load the shard with the optimizer's own load_state_dict"
        )
    return {
        local_id: by_name[local_id] if isinstance(local_id, str) else param
        for group, live_group in zip(groups, live, strict=True)
        for local_id, param in zip(group["params"], live_group["params"], strict=True)
    }


def _would_change(param: torch.Tensor, name: object, value: object) -> bool:
    """Whether torch's load would change a value: it casts floating tensors except `step`, and rebuilds iterables, even a str."""
    if isinstance(value, torch.Tensor):
        return name != "step" and param.is_floating_point() and value.dtype != param.dtype
    return isinstance(value, Iterable)


def _moved(value: Any, device: torch.device) -> Any:
    """The value with its tensors, also those in containers, on a device. Dtypes stay."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
