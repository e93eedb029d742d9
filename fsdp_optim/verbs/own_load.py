"""An optimizer's own load of its own dict, in which every value keeps its dtype, and every hook sees every value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from fsdp_optim.adapters import all_adapters
from fsdp_optim.errors import StateError
from fsdp_optim.state.dicts.packed import given_names
from fsdp_optim.state.live.local import is_on_cpu, says_on_cpu
from fsdp_optim.state.values.classes import READ_BY_LOADS, is_of_torch, is_on, layers
from fsdp_optim.state.values.kinds import is_known_moment
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import is_plain

FIXES = (
    "cut it with get_shard_from_optim_state_dict(model, optim, full), or where only one rank has it with "
    "scatter_full_optim_state_dict(model, optim, full, source_rank), and load what that returns"
)


@dataclass(frozen=True)
class OwnLoad:
    """A load of a shard into an optimizer by its own load_state_dict().

    torch's load casts state to the dtype of its parameter. What it would change is put right between torch's load and the
    load hooks of the user, so that these see all values, and what they change stays changed.
    """

    optim: Any
    shard: Mapping[str, Any]
    params: Mapping[Any, torch.Tensor]

    @classmethod
    def of(cls, optim: Any, shard: Mapping[str, Any]) -> OwnLoad:
        """Prepare a load. Raises StateError if the dict cannot be loaded. Changes nothing."""
        params = params_by_id(optim, shard)
        _refuse_unsharded_values(optim, shard, params)
        load = cls(optim, shard, params)
        if not load._hooked and not isinstance(getattr(optim, "state", None), Mapping):
            for param, local_id, name, value in load._changing():
                raise StateError(
                    f"{name} of local parameter {local_id} is a {getattr(value, 'dtype', type(value).__name__)}, its "
                    f"parameter {param.dtype}: load_state_dict() would change it, and {type(optim).__name__} has no `state` "
                    "into which it could be put unchanged"
                )
        return load

    def run(self) -> None:
        """Load the shard. The shard stays as it is."""
        given = {**self.shard, "state": {key: copied_values(values) for key, values in self.shard["state"].items()}}
        with ExitStack() as stack:
            for optim in self._hooked:
                stack.enter_context(_values_put_right(optim))
            self.optim.load_state_dict(given)
        if not self._hooked:
            for param, _, name, value in self._changing():
                _put_right(self.optim.state.get(param), param, name, value)

    @property
    def _hooked(self) -> list[torch.optim.Optimizer]:
        """The optimizers of torch, outermost first, whose load has hooks."""
        return [
            optim for optim in layers(self.optim) if isinstance(optim, torch.optim.Optimizer) and _takes_hooks(optim)
        ]

    def _changing(self) -> Iterator[tuple[torch.Tensor, Any, Any, Any]]:
        """Yield the values that torch's load would change: (parameter, local id, name, value)."""
        for local_id, values in self.shard["state"].items():
            for name in changing_names(self.params[local_id], values) if local_id in self.params else ():
                yield self.params[local_id], local_id, name, values[name]


@contextmanager
def _values_put_right(optim: torch.optim.Optimizer) -> Iterator[None]:
    """Undo what torch's load casts, before the user's post-hooks run. Where it matters to nobody, it casts no copy at all."""
    values = _PutRight(optim)
    handles = [
        optim.register_load_state_dict_pre_hook(values.before),  # after the user's
        optim.register_load_state_dict_post_hook(values.after, prepend=True),  # before the user's
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _PutRight:
    """The two hooks of `_values_put_right`, of one optimizer: what torch's load does not see, and what it casts.

    It does not see the values of a parameter that it would hand on as they are: to ask that of each takes long.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._own_setstate = not _of_torch(getattr(type(optim), "__setstate__", None))
        self._given: dict[str, Any] = {}
        self._handed_on: list[Any] = []  # the keys of these parameters
        self._changing_of: dict[Any, Iterable[Any]] = {}
        self._kept_of: dict[Any, Collection[Any]] = {}  # by key, the names of the values that stay on the CPU

    def before(self, optim: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the dict that torch's load gets."""
        self._given = dict(state_dict)
        self._handed_on, self._changing_of, self._kept_of = [], {}, {}
        params = _params_in_order(optim, state_dict)
        keeps_on_cpu = cache(lambda: _keeps_on_cpu(optim))
        state, live = dict(state_dict["state"]), optim.state
        # Some of torch's optimizers ask the first one, on behalf of all, whether steps are tensors.
        first = next((key for key, values in state.items() if not isinstance(values, dict) or values), None)
        moves_steps = any(is_on(group, key) for group in state_dict["param_groups"] for key in READ_BY_LOADS)
        for key, values in state_dict["state"].items():
            if key not in params or not isinstance(values, dict):
                continue  # not of a parameter
            param = params[key]
            device = param.device
            offloaded = _offloaded_names(live.get(param) or {}, values, keeps_on_cpu) if device.type != "cpu" else _NONE
            may_hand_on = key is not first and not offloaded and not self._own_setstate
            if may_hand_on and _stays(param, device, values, moves_steps=moves_steps):
                self._handed_on.append(key)
                del state[key]
            elif changing := dict.fromkeys([*changing_names(param, values), *offloaded]):
                self._changing_of[key] = changing
                self._kept_of[key] = offloaded
                withheld = {name for name in changing if _is_withheld(name, values[name], self._own_setstate)}
                if withheld:
                    state[key] = {name: value for name, value in values.items() if name not in withheld}
        groups = [{**group, "params": _Ids(group["params"])} for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def after(self, optim: torch.optim.Optimizer) -> None:
        """Put every value in its place that torch's load has not seen, or has cast."""
        given, params = self._given["state"], _params_in_order(optim, self._given)
        for key in self._changing_of:
            live = optim.state.get(params[key])
            if isinstance(live, dict):
                self._put_back(key, live, given[key], params[key])
        for key in self._handed_on:
            optim.state[params[key]] = dict(given[key])
        if self._handed_on and len(self._handed_on) < len(given) - 1:  # else all but the first one, and so in order
            for key in given:  # in this order
                owner = params.get(key, key)
                if owner in optim.state:
                    optim.state[owner] = optim.state.pop(owner)
        self._given = {}

    def _put_back(self, key: Any, live: dict[Any, Any], values: Mapping[Any, Any], param: torch.Tensor) -> None:
        for name in self._changing_of[key]:
            value = values[name]
            if name in self._kept_of[key]:
                live[name] = value
            elif _is_withheld(name, value, self._own_setstate):
                live[name] = _moved(value, param.device)
            else:
                _put_right(live, param, name, value)
        in_order = {name: live[name] for name in chain(values, live) if name in live}
        live.clear()
        live.update(in_order)


class _Ids(list[Any]):
    """The ids of a group, in which torch's load looks for the id of each value: in a list, a load grows with the square."""

    def __init__(self, ids: Iterable[Any]) -> None:
        super().__init__(ids)
        self._set = frozenset(self)

    def __contains__(self, key: object) -> bool:
        return key in self._set

    def __deepcopy__(self, memo: object) -> list[Any]:
        return list(self)


def _takes_hooks(optim: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer was made by torch's constructor, without which a wrapper has no hooks."""
    try:
        optim.register_load_state_dict_post_hook(lambda _: None).remove()
    except AttributeError:
        return False
    return True


def _of_torch(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.optim")


def _params_in_order(optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the parameter of each id, by which torch's own load finds it: by the order in the groups.

    Empty where torch will refuse.
    """
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optim.param_groups for param in group["params"]]
    return dict(zip(ids, params, strict=True)) if len(ids) == len(params) else {}


def _is_withheld(name: object, value: object, own_setstate: bool) -> bool:
    """Return whether torch's load need not see a value that it would change, or cannot: it makes iterables from a generator.

    torch's own __setstate__ needs numbers only (step, mu_product, eta); the __setstate__ of another class gets everything.
    """
    if name == "step" or (isinstance(value, torch.Tensor) and not value.dim()):
        return False
    return not own_setstate or not isinstance(value, (torch.Tensor, dict, list, tuple, set))


def _stays(param: torch.Tensor, device: torch.device, values: Mapping[Any, Any], *, moves_steps: bool) -> bool:
    """Return whether torch's load leaves all values of a parameter as they are. It casts those that `changing_names` gives.

    `moves_steps`: it makes each `step` a float32 on the parameter's device, as fused and capturable optimizers need it.
    torch's own __setstate__ makes tensors of numbers.
    """
    dtype = param.dtype  # asked once: a DTensor answers slowly
    is_float = dtype.is_floating_point
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            return False
        if name != "step":
            if (is_float and value.dtype != dtype) or value.device != device:
                return False
        elif moves_steps and (value.dtype != torch.float32 or value.device != device):
            return False
    return True


def _put_right(live: Any, param: torch.Tensor, name: Any, value: Any) -> None:
    """Put a value in the place of torch's cast of it. A live value that is no such cast is the optimizer's own, and stays."""
    if not isinstance(live, dict) or name not in live:
        return
    if isinstance(value, torch.Tensor):
        cast = live[name]
        if type(cast) is not type(value) or cast.shape != value.shape or cast.dtype != param.dtype:
            return
        if not same(cast, value.to(device=cast.device, dtype=cast.dtype)):  # compares the parts of DTensors too
            return
    live[name] = _moved(value, live[name].device if isinstance(live[name], torch.Tensor) else param.device)


def changing_names(param: torch.Tensor, values: Mapping[Any, Any]) -> list[Any]:
    """Return the names of the values that torch's load would change: floats that it casts, but no `step`, and iterables.

    It makes these anew, even a str.
    """
    dtype = param.dtype  # asked once: a DTensor answers slowly
    is_float = dtype.is_floating_point
    return [
        name
        for name, value in values.items()
        if (
            is_float and name != "step" and value.dtype != dtype
            if isinstance(value, torch.Tensor)
            else isinstance(value, Iterable)
        )
    ]


_NONE = frozenset[Any]()


def _offloaded_names(
    live: Mapping[Any, Any], values: Mapping[Any, Any], keeps_on_cpu: Callable[[], bool]
) -> frozenset[Any]:
    """Return the names of the values on the CPU that stay there, of a parameter elsewhere whose state was on the CPU.

    torch's load would copy them to the device of the parameter, which may not have the memory for them. Where a parameter has no
    state yet, the state of the others says where the optimizer keeps it (`keeps_on_cpu`).
    """
    names = (name for name, value in values.items() if is_on_cpu(value))
    return frozenset(name for name in names if (is_on_cpu(live[name]) if name in live else keeps_on_cpu()))


def _keeps_on_cpu(optim: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has state on the CPU of a parameter that is elsewhere, or says that it keeps it there."""
    if says_on_cpu(optim):
        return True
    states = [(param, values) for param, values in optim.state.items() if isinstance(param, torch.Tensor)]
    return any(param.device.type != "cpu" and any(map(is_on_cpu, values.values())) for param, values in states)


def copied_values(values: Any) -> Any:
    """Return a copy of the dict of a parameter's values.

    An entry of another type, under a key that is no parameter, is not copied.
    """
    return dict(values) if isinstance(values, dict) else values


def _moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors, also those in containers, on a device. Dtypes stay."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def params_by_id(optim: Any, shard: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the live parameter of each local id.

    Raises StateError where the groups of the shard differ from the optimizer's.
    """
    groups, live = shard["param_groups"], optim.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in live]:
        raise StateError(
            f"this shard has {[len(g['params']) for g in groups]} parameters in its groups, the optimizer has "
            f"{[len(g['params']) for g in live]}: a full dict must go through get_shard_from_optim_state_dict first"
        )
    by_name = given_names(optim)
    unknown = [name for name in names_in(shard) if name not in by_name]
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


def names_in(own: Mapping[str, Any]) -> list[str]:
    """Return the names among the ids of an optimizer's own dict."""
    return [param for group in own["param_groups"] for param in group["params"] if isinstance(param, str)]


_IF_FULL = f"If this is a full dict: {FIXES}"


def _refuse_unsharded_values(optim: object, shard: Mapping[str, Any], params: Mapping[Any, torch.Tensor]) -> None:
    """Raise StateError for unsharded values of sharded parameters, as full dicts of other libraries have them.

    Optimizers of other packages may keep values of another shape under the same names.
    """
    of_torch = is_of_torch(optim)
    for local_id, values in shard["state"].items():
        param = params.get(local_id)
        for name, value in values.items() if param is not None else ():
            if param is None or not is_plain(value) or not value.dim() or not is_known_moment(name):
                continue
            held = param.to_local() if hasattr(param, "to_local") else param
            differs = value.shape != held.shape
            if (of_torch and (differs or held is not param)) or (differs and value.shape == param.shape):
                is_unsharded = held.dim() > 1 and any(adapter.has_cut(param) for adapter in all_adapters())
                why = "Leave summon_full_params() first, which shows unsharded parameters" if is_unsharded else _IF_FULL
                raise StateError(
                    f"{name} of local parameter {local_id} has shape {list(value.shape)}, this rank's part of the parameter has "
                    f"{list(held.shape)}. {why}"
                )
