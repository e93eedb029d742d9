"""Load a shard into the live optimizer, every value in the dtype that it was saved in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_optim.adapters import all_adapters
from fsdp_optim.errors import FsdpOptimError, StateError, counted_noun
from fsdp_optim.memory import is_plain, tensors_in, within
from fsdp_optim.state.classes import innermost, is_of_torch
from fsdp_optim.state.full import RESERVED_KEYS
from fsdp_optim.state.kinds import is_known_moment
from fsdp_optim.state.local import OptimizerLike
from fsdp_optim.state.packed import given_names
from fsdp_optim.state.same import same
from fsdp_optim.state.shard import INCOMPATIBLE
from fsdp_optim.verbs.arguments import check_optimizers, check_shard

log = logging.getLogger("fsdp_optim")


class LoadableOptimizer(OptimizerLike, Protocol):
    """An optimizer that can be loaded into."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Incompatible(NamedTuple):
    """What `strict=False` found out.

    Attributes:
        missing: FQNs that kept the state they had.
        unexpected: FQNs of the full dict that the optimizer does not have, so that they were not loaded.
        unmatched_hyperparameters, unmatched_values: where the optimizers' classes differ, the names that only one of them has:
            the saved ones were left out, the live ones stay as they are.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()


class Before:
    """What optimizers have before something is loaded into them. No tensor is copied.

    torch's own optimizers get back all that they had: they put new tensors in the place of old ones. Another kind is given its
    old dict again, which brings back what its `load_state_dict` can; one that writes into the tensors that it has cannot be
    brought back.
    """

    def __init__(self, optims: Sequence[LoadableOptimizer]) -> None:
        self._optims = [
            (one, _Kept(one) if isinstance(one, torch.optim.Optimizer) else one.state_dict()) for one in optims
        ]

    def put_back(self, number: int | None = None) -> None:
        """Undo what was loaded, into the first `number` of them. Raises nothing: something has gone wrong already."""
        for one, had in self._optims[:number]:
            try:
                if isinstance(had, _Kept):
                    had.put_back()
                else:
                    _Load.of(one, had).run()
            except Exception:
                log.exception("an optimizer (%s) could not be given back what it had", type(one).__name__)


class _Kept:
    """The attributes of a torch optimizer, and what is in its state and its groups."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim, self._attributes = optim, dict(vars(optim))
        self._groups = [(group, dict(group)) for group in optim.param_groups]
        self._state = [(param, values, _copied(values)) for param, values in optim.state.items()]

    def put_back(self) -> None:
        vars(self._optim).clear()
        vars(self._optim).update(self._attributes)
        for group, had in self._groups:
            group.clear()
            group.update(had)
        self._optim.param_groups[:] = [group for group, _ in self._groups]
        self._optim.state.clear()
        for param, values, had in self._state:
            if isinstance(values, dict):
                values.clear()
                values.update(had)
            self._optim.state[param] = values


def _copied(values: Any) -> Any:
    """The values of a parameter, in a dict of its own; something else, under a key that is no parameter, as it is."""
    return dict(values) if isinstance(values, dict) else values


def load(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    keep: Sequence[str] = (),
    *,
    logs: bool = True,
) -> Incompatible:
    """As `optim.load_state_dict(shard)`, but nothing is cast; several optimizers take a list of shards.

    Where one of them fails, those that were loaded get back what they had. `logs`: say which hyperparameters change.
    """
    if shard is None:
        raise StateError(
            "there is no shard to load, but None: give what get_shard_from_optim_state_dict or scatter returned"
        )
    check_optimizers(optim, loadable=True)
    for one_shard in shard if isinstance(shard, (list, tuple)) else [shard]:
        check_shard(one_shard)
    if isinstance(keep, str):
        raise StateError(f"keep has to be a list of names of hyperparameters, as in keep=['lr'], not {keep!r}")
    optims: list[LoadableOptimizer] = list(optim) if isinstance(optim, (list, tuple)) else [optim]  # type: ignore[list-item]
    shards = [shard] if isinstance(shard, Mapping) else list(shard)
    if len(optims) != len(shards):
        raise StateError(f"{counted_noun(len(optims), 'optimizer')} cannot load {counted_noun(len(shards), 'shard')}")
    found = shards[0].get(INCOMPATIBLE, {}) if shards else {}
    shards = [_ordinary({key: value for key, value in its.items() if key != INCOMPATIBLE}) for its in shards]
    for its_optim, its in zip(optims, shards, strict=True):
        _refuse_full(its_optim, its)
    kept = [_keeping(one, its, keep) for one, its in zip(optims, shards, strict=True)]
    loads = [
        _Load.of(one, {**its, "param_groups": groups}) for one, its, groups in zip(optims, shards, kept, strict=True)
    ]
    changes = _changes(optims, kept) if logs else ""
    before = Before(optims)
    begun = 0
    try:
        for one in loads:
            begun += 1
            one.run()
    except BaseException as error:
        before.put_back(begun)
        refused = _refused(error, type(optims[begun - 1]).__name__) if isinstance(error, Exception) else error
        if refused is not error:
            raise refused from error
        raise
    if changes:
        log.info("hyperparameters that this load changed (old -> new): %s", changes)
    return Incompatible(**{name: tuple(names) for name, names in found.items()})


_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # what state that does not fit causes


def _refused(error: Exception, name: str) -> Exception:
    """What an optimizer's own load_state_dict raises for state that it cannot take, as an error of this library."""
    if isinstance(error, FsdpOptimError) or not isinstance(error, _REFUSALS):
        return error
    return StateError(
        f"{name}'s own load_state_dict() refused what was saved, with {type(error).__name__}: {error}; nothing was loaded"
    )


def _ordinary(value: Any) -> Any:
    """A shard that somebody made in inference mode, with copies of its tensors, which the next step can change."""
    if isinstance(value, torch.Tensor):
        return value.clone() if any(part.is_inference() for part in tensors_in(value)) else value
    return within(value, _ordinary)


def _changes(optims: Sequence[LoadableOptimizer], loaded: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The hyperparameters that are about to change, of each group; those of many optimizers that are alike, once."""
    where: dict[str, list[str]] = {}
    for number, (optim, groups) in enumerate(zip(optims, loaded, strict=True)):
        for index, (old, new) in enumerate(zip(optim.param_groups, groups, strict=True)):
            names = [key for key in {**old, **new} if key not in ("params", "param_names")]
            told = ", ".join(
                f"{key} {old.get(key, 'absent')!s} -> {new.get(key, 'absent')!s}"
                for key in names
                if key not in old or key not in new or not same(old[key], new[key])
            )
            if told:
                where.setdefault(told, []).append(
                    f"group {index}" + (f" of optimizer {number}" if len(optims) > 1 else "")
                )
    return "; ".join(
        f"{', '.join(places[:4])}{f' and {len(places) - 4} more' if len(places) > 4 else ''}: {told}"
        for told, places in where.items()
    )


_FULL_KEYS = RESERVED_KEYS - {"state", "param_groups"}


def _refuse_full(optim: LoadableOptimizer, shard: Mapping[str, Any]) -> None:
    """A full dict has keys that no shard has. Where the parts of a parameter are in its optimizer, it would go in unnoticed."""
    keys = sorted(_FULL_KEYS & set(shard))
    names = _names_in(shard)
    if keys or (
        names and not _names_in(optim.state_dict())
    ):  # some optimizers call their parameters by names themselves
        why = f"it has {keys[0]!r}" if keys else f"its groups list names such as {names[0]!r}"
        there, here = (
            sum(len(group["params"]) for group in one) for one in (shard["param_groups"], optim.param_groups)
        )
        raise StateError(
            f"this is a full dict of {counted_noun(there, 'parameter')} ({why}), not this rank's part of "
            f"one for an optimizer with {here}: "
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
    """Somebody else's full dict: whole values for parameters of which this rank has a part.

    Other optimizers than torch's may keep values of another shape under the same names.
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
    """The shard's groups with the live optimizer's values of some hyperparameters."""
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
    """An optimizer and a dict for it, of which torch never sees the values that it would change: they are put in afterwards."""

    optim: LoadableOptimizer
    shard: Mapping[str, Any]
    params: Mapping[Any, torch.Tensor]
    cast: Mapping[tuple[Any, str], Any]

    @classmethod
    def of(cls, optim: LoadableOptimizer, shard: Mapping[str, Any]) -> _Load:
        """Raises StateError where it cannot be loaded. Nothing is changed yet."""
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
                f"{params[local_id].dtype}: load_state_dict() would change it, and {type(optim).__name__} has no `state` to put "
                "it into as it is"
            )
        return cls(optim, shard, params, cast)

    def run(self) -> None:
        """Load it, in the saved order of values.

        An optimizer that has a load_state_dict of its own may want to see all of them: it gets them, and torch casts copies.
        """
        own = type(innermost(self.optim)).load_state_dict is not torch.optim.Optimizer.load_state_dict
        withheld = {} if own else {key for key in self.cast if key[1] != "step"}  # which torch's __setstate__ looks for
        uncast = {
            local_id: {name: value for name, value in values.items() if (local_id, name) not in withheld}
            if local_id in self.params
            else values  # of no parameter
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
            f"{type(optim).__name__} does not tell which parameter it calls {unknown[0]!r}, so that its dtype cannot be kept: "
            "load the shard with the optimizer's own load_state_dict"
        )
    return {
        local_id: by_name[local_id] if isinstance(local_id, str) else param
        for group, live_group in zip(groups, live, strict=True)
        for local_id, param in zip(group["params"], live_group["params"], strict=True)
    }


def _would_change(param: torch.Tensor, name: object, value: object) -> bool:
    """torch casts tensors to a floating parameter's dtype, `step` excepted, and rebuilds what can be iterated over, a str too."""
    if isinstance(value, torch.Tensor):
        return name != "step" and param.is_floating_point() and value.dtype != param.dtype
    return isinstance(value, Iterable)


def _moved(value: Any, device: torch.device) -> Any:
    """The value on a device, tensors inside containers too, in their own dtypes."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
