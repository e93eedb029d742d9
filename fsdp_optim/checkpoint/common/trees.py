"""The trees of `state=`: dicts, lists and tuples of values. Their tensors are saved and loaded as weights are, by all ranks.

{"ema": {"w": DTensor}, "step": 7}  ->  {"ema": {"w": InFile("ema.w")}, "step": 7}  and  {"ema.w": DTensor}
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_optim.adapters import reader_of
from fsdp_optim.adapters.known import is_sharded_value
from fsdp_optim.arguments import Arguments
from fsdp_optim.checkpoint.common.contents import TREE, SavedHalf, SavedValue, aligned, loadable
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.header_entries import DTYPES
from fsdp_optim.formats.base.tree_values import BRANCHES, InFile, items_of, leaves_of
from fsdp_optim.options import OnReplicaMismatch
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.state.merged.replicas import ELEMENTS
from fsdp_optim.tensors.dtensors import is_dtensor, is_usual_dtensor
from fsdp_optim.tensors.elements import MOST_DEEP, check_elements, is_usual
from fsdp_optim.tensors.memory import dtype_name, is_plain
from fsdp_optim.transport.agree import all_equal, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state
from fsdp_optim.verbs.replicas import compare_shards

_PREFIX = "state."
"""The beginning of the FQNs of tensors in trees, which tells them from parameters in messages."""

_IN_PAIRS = "float4_e2m1fn_x2"  # a dtype that needs a dimension to count its numbers along
_DTYPES = frozenset(name for name, _ in DTYPES.values())


def fqn_of(key: str) -> str:
    """Return the FQN of a tensor of a tree among the parameters of a call. `key`: its name in its file."""
    return f"{_PREFIX}{key}"


def key_of(fqn: str) -> str:
    """Return the name in its file of a tensor of a tree: the inverse of `fqn_of`."""
    return fqn.removeprefix(_PREFIX)


def shown(path: Sequence[Any]) -> str:
    """Return the place of a value in `state=`, for messages: state['ema']['w']."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def is_tree_tensor(value: object) -> bool:
    """Return whether a value is a tensor that is saved as weights are.

    DTensors, other tensors that say how they are cut over ranks (ShardedTensor), and plain tensors with ordinary elements.
    """
    if is_dtensor(value) or is_sharded_value(value):
        return True
    return (
        isinstance(value, torch.Tensor)
        and is_plain(value)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested or value.is_quantized or value.is_conj() or value.is_neg())
        and dtype_name(value.dtype) in _DTYPES
        and (value.dim() > 0 or dtype_name(value.dtype) != _IN_PAIRS)
    )


@dataclass(frozen=True)
class SplitTrees:
    """The values of `state=` and the tensors in them.

    Attributes:
        values: the values by name, with an `InFile` in the place of each tensor.
        tensors: the tensors of this rank, by key.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SplitTrees:
        """Split values. Raises StateError for two tensors that would have one key, such as those of {"a.b": x, "a": {"b": y}}."""
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, tuple[Any, ...]] = {}

        def split(value: Any, path: tuple[Any, ...]) -> Any:
            if is_tree_tensor(value):
                key = ".".join(map(str, path))
                if key in tensors:
                    raise _same_key(key, places[key], path)
                tensors[key], places[key] = value, path
                return InFile(key)
            kind = type(value)
            if kind not in BRANCHES:
                return value
            if len(path) > MOST_DEEP:
                raise CheckpointError(
                    f"{shown(path[:3])}...: is nested more than {MOST_DEEP} levels deep, which no reader accepts: save flatter "
                    "values"
                )
            items = [(key, split(item, (*path, key))) for key, item in items_of(value)]
            return kind(item for _, item in items) if kind in (list, tuple) else kind(items)

        new = {name: split(value, (name,)) for name, value in values.items()}
        return cls(new, tensors)


def is_opened(values: Iterable[Any]) -> bool:
    """Return whether torch.distributed.checkpoint saves each item of a list by itself: some are dicts or tensors."""
    return any(
        isinstance(item, (Mapping, torch.Tensor)) or (isinstance(item, list) and is_opened(item)) for item in values
    )


def is_unsaved(value: object) -> bool:
    """Return whether torch.distributed.checkpoint saves nothing of a value: a dict without items, or with such dicts alone."""
    if isinstance(value, Mapping):
        return all(map(is_unsaved, value.values()))
    return isinstance(value, list) and bool(value) and all(map(is_unsaved, value))


def _same_key(key: str, first: Sequence[Any], second: Sequence[Any]) -> StateError:
    return StateError(
        f"{shown(first)} and {shown(second)}: both would be the tensor {key} of the checkpoint: rename one of their keys"
    )


def local_of(tensors: Mapping[str, torch.Tensor], rank: int, ranks: tuple[int, ...]) -> Local:
    """Return the tensors of trees on this rank, by key, read as the weights of a model are. `ranks`: those of the call."""
    for key, tensor in tensors.items():
        if not is_usual(tensor) and not is_usual_dtensor(tensor):
            check_elements(f"{fqn_of(key)}: this tensor on rank {rank}", tensor)
    reader = reader_of({fqn_of(key): tensor for key, tensor in tensors.items()}, rank)
    view = reader.read(ranks)
    handles = tuple(named.with_all_collected() for named in view.handles)
    params = tuple(LocalParam(index, 0, named, {TREE: named.handle.as_value()}) for index, named in enumerate(handles))
    ids = (tuple(param.local_id for param in params),)
    return Local(replace(view, handles=handles), LocalOptim(params, ({},), ids, (None,), {}))


def read_trees(
    group: RankGroup, given: Mapping[str, Any], asked: Arguments, mismatch: OnReplicaMismatch
) -> tuple[Mapping[str, Any], SavedHalf | None, Mapping[str, torch.Tensor]]:
    """Agree with the other ranks on the values of `state=`. Called by all ranks, with the arguments `asked` of their call.

    Returns the values of all ranks together, with an `InFile` in the place of each tensor; the tensors, None if no rank has one;
    and those of this rank, by key. Raises StateError, the same on all ranks, for trees that cannot be joined, and for replicas
    that differ.
    """
    split = SplitTrees.of(given)
    values = _joined(group, split.values)
    if not any(isinstance(leaf, InFile) for _, leaf in leaves_of(values)):
        return values, None, {}
    local, global_state = agree_on_state(
        group,
        lambda: loadable(local_of(split.tensors, group.rank, group.ranks), group.rank),
        asked,
        "the tensors of state=",
        with_state=True,
        on_replica_mismatch=mismatch,
        every_replica=True,
        what=ELEMENTS,
    )
    global_state = compare_shards(group, local, global_state, mismatch, ELEMENTS)
    tensors = []
    for fqn, param in global_state.params.items():
        if param.summary is None or not param.summary.dtypes:
            raise StateError(f"{fqn}: is no tensor that ranks can save together: give its full_tensor()")
        tensors += [
            SavedValue(fqn, TREE, dtype, param.placement, False, key_of(fqn)) for dtype in param.summary.dtypes.values()
        ]
    return values, SavedHalf(local, global_state, aligned(tensors)), split.tensors


# ------------------------------------------------------------------------------------------- ranks with different trees


def _joined(group: RankGroup, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of all ranks together. Of plain values that several ranks have, those of the lowest rank count."""
    if all_equal(group, "state", repr(_outline(values)).encode()):
        return values
    failure, content = Failure(), b""
    with failure:
        try:
            content = pickle.dumps(values)
        except Exception as error:
            raise StateError(
                f"state: ranks have different keys, and rank {group.rank} cannot send its values to the others: {error}: give "
                "all ranks the same keys, or plain values"
            ) from error
    joined: Any = None
    for rank, report in zip(group.ranks, exchange_reports(group, content, failure.error), strict=True):
        other = pickle.loads(report)
        joined = other if joined is None else _union(joined, other, ("state",), rank)
    _check_keys(joined)
    result: Mapping[str, Any] = joined
    return result


def _outline(value: Any) -> Any:
    """Return the keys and the tensors of a tree, without its other values."""
    kind = type(value)
    if kind is InFile:
        return value.key
    if kind not in BRANCHES:
        return None
    return kind.__name__, [(key, _outline(item)) for key, item in items_of(value)]


def _union(first: Any, second: Any, path: tuple[Any, ...], rank: int) -> Any:
    """Join the trees of lower ranks and of `rank`. Raises StateError where one has other things than the other in one place."""
    kind, other = type(first), type(second)
    is_branch = kind in BRANCHES
    if kind is not other and (is_branch or other in BRANCHES or InFile in (kind, other)):
        raise _not_joined(path, rank, _named(first), _named(second))
    if not is_branch:
        return first
    if kind in (list, tuple):
        if len(first) != len(second):
            raise _not_joined(path, rank, f"{len(first)} items", f"{len(second)} items")
        return kind(_union(a, b, (*path, index), rank) for index, (a, b) in enumerate(zip(first, second, strict=True)))
    joined = kind(first)
    for key, item in second.items():
        joined[key] = _union(joined[key], item, (*path, key), rank) if key in joined else item
    return joined


def _not_joined(path: Sequence[Any], rank: int, first: str, second: str) -> StateError:
    return StateError(
        f"{shown(path[1:])}: has {first} on a lower rank and {second} on rank {rank}: trees of ranks are joined by the keys of "
        "their dicts alone: give the parts different keys, or per_rank(...) for what each rank has for itself"
    )


def _named(value: Any) -> str:
    return "a tensor" if isinstance(value, InFile) else f"a {type(value).__name__}"


def _check_keys(joined: Any) -> None:
    places: dict[str, tuple[Any, ...]] = {}
    for path, leaf in leaves_of(joined):
        if isinstance(leaf, InFile) and places.setdefault(leaf.key, path) is not path:
            raise _same_key(leaf.key, places[leaf.key], path)
