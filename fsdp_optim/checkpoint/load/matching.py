"""Which stored tensor belongs to which parameter: by its name, by other names of the parameter, or renamed by the caller.

And why names do not match, for the errors of loads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.checkpoint.load.reading import elements_in
from fsdp_optim.errors import StateError, shortened
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import StoredTensor, TensorReader
from fsdp_optim.layout import Whole
from fsdp_optim.options import Rename
from fsdp_optim.state.dicts.flattened import fqns_of_flattened, is_flattened
from fsdp_optim.state.dicts.names import Names

_COMPARED_NBYTES = 8 << 20  # at once

TiedCopies = Sequence[tuple[StoredTensor, StoredTensor]]
"""Stored tensors of one tied parameter, each with the one that is loaded."""
_MOST_PAIRS = 4


def renamed_names(
    names: Names, index: CheckpointIndex, rename: Rename | None, full: Mapping[str, Any] | None = None
) -> Names:
    """Return the names of a model, which also know the names in a checkpoint that `rename` maps to them.

    `full`: the optimizer's full dict, which has parameters whose weights the checkpoint may not have.
    """
    if rename is None:
        return names
    function = renamer(rename)
    given = {}
    for stored in {*index.weights, *index.aliases, *(_names_in(full) if full is not None else ())}:
        new = function(stored)
        if not isinstance(new, str):
            raise StateError(f"rename returned {new!r} for {stored}, which is not a name")
        if new != stored:
            given[stored] = new
    return replace(names, given={**names.given, **given})


def renamer(rename: Rename) -> Callable[[str], str]:
    """Return `rename` as a function. In a dict of prefixes, the longest prefix that fits a name is replaced."""
    if not isinstance(rename, Mapping):
        return rename
    prefixes = sorted(rename, key=len, reverse=True)

    def renamed(name: str) -> str:
        longest = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if longest is None else rename[longest] + name[len(longest) :]

    return renamed


def _names_in(full: Mapping[str, Any]) -> Collection[str]:
    """Return the names of parameters in a full dict of any dialect."""
    of_state = {name for name in full.get("state", ()) if isinstance(name, str)}
    of_groups = {
        name for group in full.get("param_groups", ()) for name in group.get("params", ()) if isinstance(name, str)
    }
    return {*of_state, *of_groups, *(fqns_of_flattened(full) if is_flattened(full) else ())}


def find_stored(
    fqns: Collection[str], names: Names, live_aliases: Mapping[str, str], index: CheckpointIndex
) -> tuple[dict[str, StoredTensor], TiedCopies]:
    """Return the stored tensor of each parameter, by any of its names, and further stored tensors of parameters tied here.

    `live_aliases`: other names of the model's parameters, each with the FQN.
    """
    stored, saved_aliases = dict(index.weights.items()), index.aliases  # one by one takes three times as long
    others: dict[str, list[str]] = {}
    for alias, fqn in live_aliases.items():
        others.setdefault(fqn, []).append(alias)
    renamed = {old: new for old, new in names.given.items() if old in stored}
    by_fqn = {}
    for fqn in fqns:
        for name in (fqn, saved_aliases.get(fqn), *others.get(fqn, ())):
            if name is not None and name in stored and name not in renamed:
                by_fqn[fqn] = stored[name]
                break
    used = {stored_tensor.key for stored_tensor in by_fqn.values()}
    tied_copies = []
    for key, tensor in stored.items():
        if key in used:
            continue
        fqn = names.canonical(key)
        if fqn in by_fqn and names.would_collide(key, by_fqn[fqn].key):
            continue  # two tensors of the checkpoint, and the model has one of them
        if fqn in by_fqn:
            tied_copies.append((tensor, by_fqn[fqn]))
        elif fqn in fqns:
            by_fqn[fqn] = tensor
    return by_fqn, tied_copies


def differing_tied_copies(
    checkpoint: TensorReader, tied_copies: TiedCopies, rank: int, ranks: Sequence[int]
) -> dict[str, str]:
    """Return the names of stored tied tensors that differ from the tensor that is loaded, with the difference in words.

    Each of `ranks` compares some of the elements, and finds differences in these only.
    """
    differing = {}
    for copy, loaded in tied_copies:
        if (copy.file, copy.start, copy.chunks) == (loaded.file, loaded.start, loaded.chunks) and copy.file:
            continue
        tied = f"the model ties it to {loaded.key}"
        if (copy.shape, copy.dtype) != (loaded.shape, loaded.dtype):
            copy_type, other = (f"{tensor.dtype} of shape {list(tensor.shape)}" for tensor in (copy, loaded))
            differing[copy.key] = f"{tied}, but they are {copy_type} and {other} in the checkpoint"
        elif rank in ranks and _differ(checkpoint, copy, loaded, ranks.index(rank), len(ranks)):
            differing[copy.key] = f"{tied}, but they differ in the checkpoint"
    return differing


def _differ(checkpoint: TensorReader, copy: StoredTensor, loaded: StoredTensor, position: int, num: int) -> bool:
    """Return whether one of `num` equal parts of two stored tensors differs in any bit."""
    numel = copy.placement.numel
    first, last = (numel * (position + index) // num for index in (0, 1))
    step = _COMPARED_NBYTES // copy.itemsize
    return any(
        not torch.equal(*(_elements(checkpoint, tensor, start, min(step, last - start)) for tensor in (copy, loaded)))
        for start in range(first, last, step)
    )


def _elements(checkpoint: TensorReader, stored: StoredTensor, start: int, num: int) -> torch.Tensor:
    """Return some elements of a stored tensor, in row-major order, as bytes."""
    data, size = torch.empty(num * stored.itemsize, dtype=torch.uint8), stored.itemsize
    memory = bytes_of(data)
    extents: dict[str, list[Extent]] = {}
    for rank, stored_offset, offset, numel in elements_in(stored.placement, Whole(stored.shape, (0,)), 0, start, num):
        file, at = stored.place_on(rank)
        part = memory[offset * size : (offset + numel) * size]
        extents.setdefault(file, []).append(Extent(at + stored_offset * size, part))
    checkpoint.read(extents)
    return data


def why_names_differ(
    reader: ModelReader, index: CheckpointIndex, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """How transformers renames the weights of this model, and the fix; "" where it keeps them.

    `missing`, `unexpected`: names that only the model has, and only the checkpoint.
    """
    if not missing or not unexpected:
        return ""
    models = index.facts.models
    if models and not any(name.partition(".")[0] in models for name in missing):
        return (
            f"it has the models {', '.join(models)}: give the model by its name, as in model={{{models[0]!r}: model}}"
        )
    names = reader.stored_names() if not index.facts.names_are_fqns else None
    if names is None:
        return ""
    pairs = shortened((f"{stored} -> {live}" for stored, live in names.pairs), _MOST_PAIRS)
    return (
        f"transformers 5 stores a {names.class_name} under other names than its state_dict() has, and may split or join its "
        f"tensors ({pairs}; {unexpected[0]} is in the checkpoint, {missing[0]} in the model): give "
        "options=LoadOptions(views=fsdp_optim.views_for(model)), which has these names; or read the folder once with "
        f"{names.class_name}.from_pretrained, write it with save_pretrained(NEW, save_original_format=False), and load NEW"
    )
