"""Unshard: from a tree with sharded values (DTensors, ShardedTensors) to the same tree with full tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.adapters.known import is_sharded_value, read_sharded_values
from fsdp_optim.dcp.dicts.options import SOURCE_RANK, Given
from fsdp_optim.errors import StateError, StateKeysError, shortened
from fsdp_optim.layout import Placement
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.tensors.dtensors import is_complete, is_dtensor, local_of
from fsdp_optim.tensors.memory import dtype_name, dtype_named
from fsdp_optim.transport.agree import agree, all_equal, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.ends import DictEnd, WholeEnd

Path = tuple[Any, ...]
_CPU = torch.device("cpu")
Described = tuple[tuple[str, str, Placement], ...]
"""(name, dtype, placement) of each sharded value on a rank."""


def mapped(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a tree of dicts, lists and tuples with other leaves. `change(path, leaf)` gives each."""
    if isinstance(tree, Mapping):
        return {key: mapped(item, change, (*path, key)) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(item, change, (*path, index)) for index, item in enumerate(tree)])
    return change(path, tree)


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, (*path, key))
    elif type(tree) in (list, tuple):
        for index, item in enumerate(tree):
            yield from _leaves(item, (*path, index))
    else:
        yield path, tree


def _is_cut(value: Any) -> bool:
    """Return whether this rank has only a part of a value."""
    return is_sharded_value(value) and not (is_dtensor(value) and is_complete(value))


def delivered(call: str, reader: ModelReader, model: Model, tree: dict[str, Any], given: Given) -> dict[str, Any]:
    """Return a dict as the options ask for it: sharded or unsharded, on its device or on the CPU.

    With `given.full`, all ranks of the model call this. Values that need no change are those of `tree`.
    """
    if not given.full:
        return dict(mapped(tree, lambda _, leaf: _on_cpu(leaf))) if given.to_cpu else tree
    cut = {".".join(map(str, path)): leaf for path, leaf in _leaves(tree) if _is_cut(leaf)}
    full, is_recipient = dict[str, torch.Tensor](), True
    if cut or any(named.handle.is_cut for named in reader.read().handles):
        options = CallArguments()
        with collective_call(call, [model], options, options) as (_, group):
            recipients = (_first(group.ranks),) if given.to_cpu else group.ranks
            full, is_recipient = _gathered(group, cut, recipients), group.rank in recipients
    elif given.to_cpu:
        world = world_here()
        ranks = reader.ranks if reader.is_wrapped else range(world.size)
        is_recipient = world.rank == _first(tuple(ranks))
    if not is_recipient:
        return {}

    def change(path: Path, leaf: Any) -> Any:
        name = ".".join(map(str, path))
        if name in full:
            return full[name] if given.to_cpu else full[name].to(leaf.device)
        whole = local_of(leaf).detach() if is_dtensor(leaf) else leaf
        return _on_cpu(whole) if given.to_cpu else whole

    return dict(mapped(tree, change))


def _first(ranks: tuple[int, ...]) -> int:
    return SOURCE_RANK if SOURCE_RANK in ranks else min(ranks)


def _on_cpu(value: Any) -> Any:
    return value.to(_CPU) if isinstance(value, torch.Tensor) else value


def _gathered(
    group: RankGroup, cut: Mapping[str, torch.Tensor], recipients: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return the full tensors of sharded values on the recipients; an empty dict on the other ranks."""
    flats, described = dict[str, torch.Tensor](), list[tuple[str, str, Placement]]()
    for name, (placement, flat) in read_sharded_values((name, name, value) for name, value in cut.items()).items():
        flats[name] = flat
        described.append((name, dtype_name(cut[name].dtype), placement))
    values = [
        StateValue(name, "", dtype_named(dtype), placement)
        for name, dtype, placement in of_all_ranks(group, tuple(described))
    ]
    source = DictEnd(lambda value: value.placement, lambda name, _: flats.get(name))
    whole, failure = WholeEnd(group, recipients), Failure()
    move(values, source, whole, group, group.budget, failure)
    agree(group, "unsharded", failure.error, fatal=failure.fatal)
    return {name: tensor for (name, _), tensor in whole.made.items()}


def of_all_ranks(group: RankGroup, own: Described) -> Described:
    """Return the sharded values of all ranks, in one order. A value that several ranks have has one placement.

    Raises StateError, the same on all ranks, where two ranks have different values of one name.
    """
    if all_equal(group, "sharded values", repr(own).encode()):
        return own
    joined: dict[str, tuple[str, Placement]] = {}
    for report in dict.fromkeys(exchange_reports(group, pickle.dumps(own))):
        for name, dtype, placement in pickle.loads(report):
            known = joined.setdefault(name, (dtype, placement))
            both = known[1] if known[1] == placement else known[1].join(placement)
            if both is None or known[0] != dtype:
                raise StateError(
                    f"{name}: a {known[0]} value cut as {known[1]} on some ranks, and a {dtype} value cut as {placement} on "
                    "others: all ranks must have parts of the same value"
                )
            joined[name] = dtype, both
    return tuple((name, dtype, placement) for name, (dtype, placement) in joined.items())


def check_names(missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise StateKeysError if a dict to load lacks names, or has others than the model."""
    if missing or unexpected:
        texts = [f"Missing key(s) in the model's dict: {shortened(missing)}"] if missing else []
        texts += [f"Unexpected key(s) in the model's dict: {shortened(unexpected)}"] if unexpected else []
        raise StateKeysError(
            f"{'; '.join(texts)}; nothing was loaded: give the dict of this model, or StateDictOptions(strict=False), which "
            "loads the names that both have"
        )
