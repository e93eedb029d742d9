"""The two forms of a recorded optimizer: the description that writers encode, and the full dict of an index. They are inverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import is_text
from fsdp_optim.formats.base.description import (
    OPAQUE,
    PLACED,
    SCALAR,
    SCALAR_TENSOR,
    TENSOR,
    GroupDescription,
    OptimDescription,
    ParamDescription,
)
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex, SavedOptim
from fsdp_optim.formats.base.records import COMMON, CheckpointContents, StoredTensor

WORD_OF = {"sharded": TENSOR, "scalar": SCALAR_TENSOR}
"""The words in a description for kinds of a full dict, where a file has the elements. All other kinds have one word in both."""

_NAME_AND_WORD = itemgetter(0, 1)
_KIND_OF = {word: kind for kind, word in WORD_OF.items()}


def saved_optim(where: str, description: OptimDescription, tensors: Mapping[str, StoredTensor]) -> SavedOptim:
    """Return the full dict, by FQN, of a description whose tensors are in files.

    Raises CheckpointError if the description and the files contradict each other.
    """
    state: dict[str, dict[Any, Any]] = {}
    kinds: dict[str, dict[Any, str]] = {}
    shared: dict[tuple[tuple[Any, str], ...], dict[Any, str]] = {}
    with as_checkpoint_error(f"{where}: the optimizer"):
        at_hand = dict(tensors.items())  # one by one takes three times as long
        for fqn, param in description.params.items():
            if param.has_state:
                kinds[fqn] = _kinds_of(param, shared)
            state[fqn] = values = {}
            for name, kind, content in param.values:
                shape = param.shape if kind == TENSOR else () if kind == SCALAR_TENSOR else None
                stored = at_hand.get(content) if shape is not None else None
                if stored is not None and stored.shape == shape:
                    values[name] = stored
                elif kind in (SCALAR, OPAQUE):
                    values[name] = content
                else:
                    values[name] = _stored(where, fqn, param, (name, kind, content), at_hand)
    groups = [{**dict(group.hyperparameters), "params": list(group.params)} for group in description.groups]
    full: dict[str, Any] = {"state": state, "param_groups": groups, "kinds": kinds}
    if description.optimizer_class is not None:
        full["optimizer_class"] = description.optimizer_class
    shapes = {fqn: param.shape for fqn, param in description.params.items()}
    return SavedOptim(full, description.other_keys, shapes, is_checked=True)


def _kinds_of(param: ParamDescription, shared: dict[tuple[tuple[Any, str], ...], dict[Any, str]]) -> dict[Any, str]:
    """Return the kinds of a parameter's values in a full dict: one dict for parameters with equal ones, which is in `shared`."""
    words = tuple(map(_NAME_AND_WORD, param.values))
    known = shared.get(words)
    if known is not None:
        return known
    kinds = {name: _KIND_OF.get(word, word) for name, word in words}
    if all(type(name) is str for name, _ in words):  # other names may be equal and yet differ, as 1 and True
        shared[words] = kinds
    return kinds


def _stored(
    where: str, fqn: str, param: ParamDescription, value: tuple[Any, str, Any], tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Return the tensor of one value, which has the shape that its kind asks for. `value`: its name, its kind, and its key."""
    name, kind, key = value
    if kind not in (TENSOR, SCALAR_TENSOR) and kind.partition(" ")[0] != PLACED:
        raise ValueError(f"{fqn}: {name} has the kind {kind!r}, which is not known")
    if key not in tensors:
        raise CheckpointError(f"{where}: the description of the optimizer names {key}, which is in no file")
    stored = tensors[key]
    if kind == TENSOR and stored.shape != param.shape:
        raise ValueError(f"{key} has shape {list(stored.shape)}, its parameter {list(param.shape)}")
    if kind == SCALAR_TENSOR and stored.shape:
        raise ValueError(f"{key} is a scalar of shape {list(stored.shape)}")
    return stored


def description_of(saved: SavedOptim) -> OptimDescription:
    """Return the description of a full dict that was recorded with its kinds and shapes."""
    kinds: Mapping[str, Mapping[Any, str]] = saved.full["kinds"]
    params = {}
    for fqn, values in saved.full["state"].items():
        words = kinds.get(fqn, {})
        listed = [
            (name, WORD_OF.get(words[name], words[name]), value.key)
            if isinstance(value, StoredTensor)
            else (name, words[name], value)
            for name, value in values.items()
        ]
        params[fqn] = ParamDescription(saved.shapes[fqn], tuple(listed), fqn in kinds)
    groups = tuple(
        GroupDescription(
            tuple((name, value) for name, value in group.items() if name != "params"), tuple(group["params"])
        )
        for group in saved.full["param_groups"]
    )
    return OptimDescription(groups, dict(saved.other_keys), params, saved.full.get("optimizer_class"))


def contents_of(index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> CheckpointContents:
    """Return the index of a new checkpoint, decoded. Raises CheckpointError for a name that no file can hold."""
    weights, optim = index.facts.weights, index.optim
    of_optim = optim.tensors if optim is not None else ()
    _check_names((*index.weights, *index.left_out, *index.aliases, *index.trees, *of_optim))
    return CheckpointContents(
        world_size=max(index.facts.world_size, 1),
        params={**{fqn: stored.shape for fqn, stored in index.weights.items()}, **index.left_out},
        aliases=index.aliases,
        optim=description_of(optim.decoded(allow_pickle=allow_pickle, records=records)) if optim is not None else None,
        weights="trainable" if weights.which == "trainable" else "none" if weights.which == "none" else "all",
        weights_dtype=weights.dtype,
        cut=index.facts.cut,
    )


def _check_names(names: Iterable[str]) -> None:
    """Refuse a name with a lone surrogate: headers, manifests and other tools' readers are UTF-8."""
    listed = list(names)
    try:
        "".join(listed).encode()
    except UnicodeEncodeError:
        wrong = next(name for name in listed if not is_text(name))
        raise CheckpointError(
            f"{wrong!r}: this name cannot be encoded as UTF-8, so no checkpoint can hold it: give another name, for a parameter "
            "by rename= of the options"
        ) from None


def extras_in(index: CheckpointIndex, *, allow_pickle: bool, as_trees: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the extras of a new checkpoint.

    `as_trees`: with an `InFile` in the place of each tensor of `index.trees`, which the writer gets in the half "state".
    """
    for name in sorted(index.extras):
        extra = index.extras[name]
        if as_trees and name == COMMON:
            value = extra.as_tree(allow_pickle=allow_pickle)
        else:
            value = extra.decoded(allow_pickle=allow_pickle)
        if value is not None:
            yield name, value
