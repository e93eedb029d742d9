"""The dict of a model: read as it is, sharded, and loaded. The model's own hooks run, as in its `state_dict()`."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.known import is_sharded_value, read_sharded_values
from fsdp_optim.adapters.unwrapping import clean_name
from fsdp_optim.dcp.dicts.flat import check_has_form, chunked_weights, flat_names, is_flat, prepare_flat
from fsdp_optim.dcp.dicts.options import SOURCE_RANK, Given
from fsdp_optim.dcp.dicts.values import check_names, delivered, of_all_ranks
from fsdp_optim.errors import RankError, StateError
from fsdp_optim.layout import Placement, Shape, whole_on
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import CallArguments
from fsdp_optim.tensors.dtensors import is_dtensor
from fsdp_optim.tensors.memory import dtype_name, dtype_named, flatten
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.arguments import check_model
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.ends import DictEnd
from fsdp_optim.view import Handle

GET, SET = "get_model_state_dict", "set_model_state_dict"


def get(model: nn.Module, submodules: Collection[nn.Module] | None, given: Given) -> dict[str, Any]:
    """Return the model's dict by clean name, with the values as they are in the model."""
    check_model(model)
    reader = ModelReader(model, world_here().rank)
    if is_flat(reader):
        state = chunked_weights(model)
    else:
        state = {clean_name(model, key): value for key, value in model.state_dict().items()}
    if submodules:
        state = _of_submodules(model, submodules, state, given)
    if given.ignore_frozen:
        for name in _frozen(reader):
            state.pop(name, None)
    return delivered(GET, reader, model, state, given)


def _of_submodules(
    model: nn.Module, submodules: Collection[nn.Module], state: Mapping[str, Any], given: Given
) -> dict[str, Any]:
    prefixes = {f"{clean_name(model, name)}." for name, module in model.named_modules() if module in submodules}
    cut = {name: prefix for name in state for prefix in prefixes if name.startswith(prefix)}
    return {name if given.keep_prefixes else name.removeprefix(prefix): state[name] for name, prefix in cut.items()}


def _frozen(reader: ModelReader) -> set[str]:
    """Return the names of the parameters that need no gradients, also those of tied ones."""
    view = reader.read()
    frozen = {fqn for named in view.handles if not named.handle.param.requires_grad for fqn in named.fqns}
    return frozen | {alias for alias, fqn in view.aliases.items() if fqn in frozen}


@dataclass(frozen=True)
class _Live:
    """An entry of the live model's dict. `handle`: where its elements are; None for a value that is no tensor of the model."""

    key: str
    value: Any = field(repr=False)
    handle: Handle | None


def prepare(model: nn.Module, given: Mapping[Any, Any], options: Given) -> Callable[[], Any]:
    """Bring a dict into the form of the live model. Returns the function that loads it, on this rank, and gives torch's result.

    Called by all ranks of the model where values must move: `options.broadcast`, or a dict with other cuts than the model.
    """
    check_model(model)
    reader = ModelReader(model, world_here().rank)
    check_has_form(reader, SET)
    given = by_name(model, given)
    if is_flat(reader):
        return _prepared_flat(model, reader, given, options)
    if options.broadcast:
        return _prepared_by_broadcast(model, given, options)
    live = _live_of(model, reader)
    names = _names(live, given, options)
    _check_alike(live, {name: _described(given[source]) for name, source in names.loaded.items()})
    values, moved = dict[str, Any](), dict[str, torch.Tensor]()
    for name, source in names.loaded.items():
        value, handle = given[source], live[name].handle
        if handle is None or _is_in_place(value, handle):
            values[name] = value
        else:
            moved[name] = value
    if any(is_sharded_value(value) for value in moved.values()):
        call = CallArguments()
        with collective_call(SET, [model], call, call) as (_, group):
            values |= _moved(group, live, dict.fromkeys(moved), _sources(moved, group.ranks))
    elif moved:
        rank = world_here().rank
        group = world_here().group(SET, (rank,))
        values |= _moved(group, live, dict.fromkeys(moved), _sources(moved, (rank,)))
    return _loading(model, live, values, names, options)


def _is_in_place(value: torch.Tensor, handle: Handle) -> bool:
    """Return whether a value is cut as the live tensor. A full tensor may have the shape of this rank's part of a DTensor."""
    return is_dtensor(value) == handle.marks and handle.is_held(value)


def by_name(model: nn.Module, given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a dict by name; torch also takes dicts by submodule, which are deprecated."""
    if not isinstance(given, Mapping):
        raise StateError(f"the model's dict to load must be a dict by name, not {type(given).__name__}")
    if not any(isinstance(key, nn.Module) for key in given):
        return dict(given)
    warnings.warn(
        "Passing model_state_dict as a dict by submodule is deprecated in torch: give names, such as {'layer.weight': ...}",
        FutureWarning,
        stacklevel=4,
    )
    paths = {module: clean_name(model, name) for name, module in model.named_modules()}
    return {
        f"{paths[module]}.{name}" if paths[module] else name: value
        for module, values in given.items()
        for name, value in values.items()
    }


def _live_of(model: nn.Module, reader: ModelReader, ranks: tuple[int, ...] | None = None) -> dict[str, _Live]:
    """Return the entries of the live model by clean name. Tensors are known by identity, whatever name a hook gives them.

    `ranks`: those that make the call, for a model that does not show them.
    """
    state = model.state_dict(keep_vars=True)
    view = reader.read(ranks)
    handles = {id(named.handle.param): named.handle for named in (*view.handles, *reader.buffers(view).handles)}
    return {clean_name(model, key): _Live(key, value, handles.get(id(value))) for key, value in state.items()}


@dataclass(frozen=True)
class _Names:
    """Which entries are loaded. `loaded`: name in the model -> name in the dict, which differ for tied entries."""

    loaded: Mapping[str, str]
    missing: list[str]
    unexpected: list[str]


def _names(live: Mapping[str, _Live], given: Collection[str], options: Given) -> _Names:
    """Compare names. An entry that is tied to one in the dict is not missing.

    Raises StateKeysError, if `options.strict`, before anything is changed.
    """
    twin_of = {id(live[name].value): name for name in given if name in live}
    loaded = {
        name: source
        for name, entry in live.items()
        if (source := name if name in given else twin_of.get(id(entry.value)) if entry.handle is not None else None)
        is not None
    }
    names = _Names(loaded, [name for name in live if name not in loaded], [name for name in given if name not in live])
    if options.strict:
        check_names(names.missing, names.unexpected)
    return names


_Described = tuple[str, Shape] | None
"""The dtype and the unsharded shape of a tensor; None for other values."""


def _described(value: Any) -> _Described:
    return (dtype_name(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _check_alike(live: Mapping[str, _Live], given: Mapping[str, _Described]) -> None:
    """Raise StateError for tensors of another shape or dtype than the model's: nothing is cast."""
    for name, described in given.items():
        entry = live[name]
        if entry.handle is None:
            continue
        wanted = _described(entry.value)
        if described is None or wanted is None:
            raise StateError(f"{name}: the dict has a value without elements, the model has a tensor: give a tensor")
        if described[1] != wanted[1]:
            raise StateError(
                f"{name}: size mismatch: shape {list(described[1])} in the dict, {list(wanted[1])} in the model: give the "
                "dict of this model"
            )
        if described[0] != wanted[0]:
            raise StateError(
                f"{name}: {described[0]} in the dict, {wanted[0]} in the model, and fsdp_optim.dcp casts nothing: cast the "
                f"tensor yourself, with .to(torch.{wanted[0]})"
            )


def _sources(moved: Mapping[str, torch.Tensor], ranks: tuple[int, ...]) -> dict[str, tuple[Placement, torch.Tensor]]:
    """Return the placement of each value, and this rank's elements. `ranks`: those that have a full value."""
    cut = read_sharded_values((name, name, value) for name, value in moved.items())
    return {
        name: cut.get(name) or (whole_on(tuple(value.shape), ranks), flatten(value.detach()))
        for name, value in moved.items()
    }


def _moved(
    group: RankGroup,
    live: Mapping[str, _Live],
    names: Collection[str],
    sources: Mapping[str, tuple[Placement, torch.Tensor | None]],
) -> dict[str, torch.Tensor]:
    """Return values in the form of the live tensors, from other cuts. Called by all ranks of `group`."""
    handles = {name: handle for name in names if (handle := live[name].handle) is not None}
    device, failure = _real_device(live), Failure()
    flats: dict[str, torch.Tensor] = {}
    with failure:
        for name, handle in handles.items():
            where = device if handle.is_meta else handle.device
            flats[name] = torch.empty(handle.local_numel, dtype=handle.param.dtype, device=where)
    agree(group, "memory", failure.error)
    described = [(name, dtype_name(each.param.dtype), each.originals[0].placement) for name, each in handles.items()]
    targets = of_all_ranks(group, tuple(described))
    dtypes = {name: dtype for name, dtype, _ in targets}
    given = of_all_ranks(group, tuple((name, dtypes[name], place) for name, (place, _) in sources.items()))
    values = [StateValue(name, "", dtype_named(dtype), placement) for name, dtype, placement in targets]
    places, held = (
        {name: placement for name, _, placement in given},
        {name: flat for name, (_, flat) in sources.items()},
    )
    source = DictEnd(lambda value: places[value.fqn], lambda name, _: held[name])
    target = DictEnd(lambda value: value.placement, lambda name, _: flats.get(name))
    move(values, source, target, group, group.budget, failure)
    agree(group, "moved", failure.error, fatal=failure.fatal)
    return {name: handle.from_local(flats[name]) for name, handle in handles.items()}


def _real_device(live: Mapping[str, _Live]) -> torch.device:
    """Return the device for values of a model on the meta device: that of the other tensors, else of the mesh, else the CPU."""
    tensors = [entry.value for entry in live.values() if isinstance(entry.value, torch.Tensor)]
    devices = [tensor.device for tensor in tensors if not tensor.is_meta]
    meshes = [tensor.device_mesh.device_type for tensor in tensors if hasattr(tensor, "device_mesh")]
    return devices[0] if devices else torch.device(meshes[0] if meshes else "cpu")


def _prepared_by_broadcast(model: nn.Module, given: Mapping[str, Any], options: Given) -> Callable[[], Any]:
    """As `prepare`, where only rank 0 has the dict, with full tensors."""
    call = CallArguments(strict=options.strict)
    with collective_call(SET, [model], call, call, all_of_plain=True) as ((reader,), group):
        live = _live_of(model, reader, group.ranks)
        if SOURCE_RANK not in group.ranks:
            raise RankError(
                f"broadcast_from_rank0: rank 0 is not one of the ranks {list(group.ranks)} that share this model: give every "
                "rank its dict, with broadcast_from_rank0=False"
            )
        content, failure = b"", Failure()
        with failure:
            if group.rank == SOURCE_RANK:
                check_full(given)
                described = {name: _described(value) for name, value in given.items()}
                content = pickle.dumps((described, {n: given[n] for n, d in described.items() if _is_sent(n, d, live)}))
        result = all_gather_bytes(group, "described", content, error=failure.error)
        described, others = pickle.loads(result.content_of(SOURCE_RANK))
        names = _names(live, described, options)
        _check_alike(live, {name: described[source] for name, source in names.loaded.items()})
        values = {name: others[source] for name, source in names.loaded.items() if source in others}
        places = {name: source for name, source in names.loaded.items() if source not in others}
        here = given if group.rank == SOURCE_RANK else {}
        sources = {
            name: (
                whole_on(described[source][1], (SOURCE_RANK,)),
                flatten(here[source].detach()) if source in here else None,
            )
            for name, source in places.items()
        }
        values |= _moved(group, live, places, sources)
    return _loading(model, live, values, names, options)


def _is_sent(name: str, described: _Described, live: Mapping[str, _Live]) -> bool:
    """Return whether a value goes to all ranks as it is: it is no tensor of the model."""
    return described is None or (name in live and live[name].handle is None)


def check_full(given: Mapping[str, Any]) -> None:
    """Raise StateError for a value that is sharded, so that this rank has only a part."""
    for name, value in given.items():
        if is_sharded_value(value):
            raise StateError(
                f"{name}: is a {type(value).__name__}, and with broadcast_from_rank0=True rank 0 must have full tensors: give "
                "the dict of get_model_state_dict with full_state_dict=True"
            )


def _loading(
    model: nn.Module, live: Mapping[str, _Live], values: Mapping[str, Any], names: _Names, options: Given
) -> Callable[[], Any]:
    """Return the function that loads values in the form of the live ones, by the model's own `load_state_dict`."""
    assigns = any(isinstance(entry.value, torch.Tensor) and entry.value.is_meta for entry in live.values())
    ready = {live[name].key: _own(value) if assigns else value for name, value in values.items()}

    def load() -> Any:
        result = model.load_state_dict(ready, strict=options.strict, assign=assigns)
        return result._replace(missing_keys=names.missing, unexpected_keys=names.unexpected)

    return load


def _own(value: Any) -> Any:
    """Return a value that the model may keep."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _prepared_flat(
    model: nn.Module, reader: ModelReader, given: Mapping[str, Any], options: Given
) -> Callable[[], Any]:
    """As `prepare`, for flat parameters, which this library fills itself."""
    load = prepare_flat(model, flat_names(reader), given, options)
    empty = nn.Module().load_state_dict({}, strict=False)

    def run() -> Any:
        missing, unexpected = load()
        return empty._replace(missing_keys=missing, unexpected_keys=unexpected)

    return run
