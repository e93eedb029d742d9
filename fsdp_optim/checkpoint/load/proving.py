"""The proof of a load: the fingerprints of the live model and optimizer are those that the save has made of its own.

Nothing is read again: the elements are those of the live tensors, as they are cut now, and only sums are exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.contents import TREE, weights_of
from fsdp_optim.checkpoint.common.printing import Place, PrintEnd, merged, place_of, print_of, prints_by_key
from fsdp_optim.checkpoint.common.trees import key_of
from fsdp_optim.checkpoint.load.compare import cut_as_live, held_part
from fsdp_optim.checkpoint.load.loaded_objects import LoadedObjects
from fsdp_optim.checkpoint.load.reading import StoredValue
from fsdp_optim.checkpoint.load.targets import State, Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.errors import CheckpointError, counted_noun, shortened
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.move import Slice
from fsdp_optim.results.fingerprints import Difference, Fingerprint, ValueFingerprint, summary_of
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.values.kinds import is_scalar
from fsdp_optim.tensors.memory import dtype_name, flat_slice
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local

log = logging.getLogger("fsdp_optim")


def prints_in(checkpoint: Reader, options: LoadArguments) -> Fingerprint | None:
    """Return the fingerprints that a load compares, which are read once; None where there are none, or it compares none.

    Raises CheckpointError where their file is damaged.
    """
    return checkpoint.index.fingerprint if options.fingerprint else None


def check_prints(
    reader: ModelReader,
    optim: Optimizers | None,
    group: RankGroup,
    checkpoint: Reader,
    options: LoadArguments,
    *,
    weights: Weights,
    state: State | None,
    trees: TreeTargets | None,
    objects: LoadedObjects,
) -> int:
    """Compare what a load has put in place with the fingerprints in the checkpoint. Called by all ranks.

    Of the tensors in `trees`, those that the load has overwritten are compared; the others are in objects of the caller.
    Values that the load has cast have none to compare. Returns the number of values that are equal; 0 where the checkpoint has
    no fingerprints, or the options leave them out. Raises CheckpointError on all ranks, with the names of values that differ.
    """
    saved = prints_in(checkpoint, options)
    if saved is None:
        return 0
    failure, expected = Failure(), prints_by_key(saved)
    values = [value for half in (weights, state, trees) if half is not None for value in half.stored_values()]
    values = [value for value in values if value.name != TREE or key_of(value.fqn) in objects.in_place]
    values = [value for value in values if _key_of(value) in expected and not _is_missing(value, state)]
    model, loaded = None, None
    with failure:
        model = weights_of(reader, group.ranks, options.call)
        if state is not None and optim is not None:
            loaded = state.kept.read(reader, optim, options.call, group.ranks)
    values = cut_as_live(group, loaded, values, failure)
    end = PrintEnd(values, group.rank, group.budget.share(2, "rows of elements"), group.world.plans)
    own: dict[Place, ValueFingerprint] = {}
    with failure:
        for half, local in (
            ("weights", model),
            ("optim", loaded),
            ("state", trees.local if trees is not None else None),
        ):
            if local is not None:
                own.update(_add_all(end, [value for value in values if _key_of(value)[0] == half], local, group))
        if loaded is not None and state is not None:
            own.update(_other_constants(state, loaded, expected))
    live = merged(group, end, own, failure)
    wanted = {place_of(value): expected[_key_of(value)] for value in values}
    wanted |= dict(_constants(state, expected)) if state is not None else {}
    pairs = [(place, live.get(place, want), want) for place, want in wanted.items()]
    compared = [(place, got, want) for place, got, want in pairs if got.dtype == want.dtype]
    differing = tuple(Difference(*place, "values", got, want) for place, got, want in compared if got != want)
    if differing:
        raise CheckpointError(
            f"{checkpoint.index.where}: {len(differing)} of {counted_noun(len(compared), 'value')} in the live model and "
            f"optimizer are not what was saved, by their fingerprints (here: live, there: saved): {summary_of(differing)}: load "
            "another checkpoint, and run fsdp-optim verify on this one"
        )
    cast = sorted({place[1] for place, got, want in pairs if got.dtype != want.dtype})
    if cast and group.rank == group.ranks[0]:
        noun = counted_noun(len(cast), "value")
        log.warning("the fingerprints of %s that the load casts are not compared: %s", noun, shortened(cast))
    return len(compared)


def _add_all(
    end: PrintEnd, values: Sequence[StoredValue], local: Local, group: RankGroup
) -> Iterator[tuple[Place, ValueFingerprint]]:
    """Add this rank's elements of values. Yields the dtypes of values that have another one than was saved."""
    for value in values:
        held = held_part(local, value)
        if held is None:
            continue
        if held.dtype != value.dtype:
            yield place_of(value), ValueFingerprint(0, dtype_name(held.dtype))
            continue
        start, stop = value.placement.local_range(group.rank)
        width = stop - start if held.is_contiguous() else max(end.budget.nbytes // held.itemsize, 1)
        for first in range(start, stop, max(width, 1)):
            last = min(first + width, stop)
            end.drain([Slice(value, value.placement, flat_slice(held, first, last), first)])


def _constants(
    state: State, expected: Mapping[tuple[str, str], ValueFingerprint]
) -> Iterator[tuple[Place, ValueFingerprint]]:
    """Yield the places and the saved fingerprints of tensors that every rank has, such as step counts."""
    prefixes = {fqn: stored.key.removesuffix(f".{name}") for (fqn, name), stored in state.tensors.items()}
    for fqn in state.global_state.params.keys() - state.fit.missing:
        for name, value in state.full.state.get(fqn, {}).items():
            if isinstance(value, torch.Tensor) and not value.is_meta and not value.dim():
                want = expected.get(("optim", f"{prefixes.get(fqn, f'state.{fqn}')}.{name}"))
                if want is not None:
                    yield ("optim", fqn, str(name)), want


def _other_constants(
    state: State, loaded: Local, expected: Mapping[tuple[str, str], ValueFingerprint]
) -> Iterator[tuple[Place, ValueFingerprint]]:
    """Yield those that are others in the live optimizer of this rank."""
    known: dict[object, ValueFingerprint] = {}
    for place, want in _constants(state, expected):
        param = loaded.by_fqn.get(place[1])
        for name, value in (param.state or {}).items() if param is not None and not param.handle.skipped else ():
            if str(name) == place[2] and is_scalar(value):
                key = (value.dtype, value.item()) if isinstance(value, torch.Tensor) else (type(value), value)
                if key not in known:
                    known[key] = print_of(place[1], value)
                if known[key] != want:
                    yield place, known[key]


def _is_missing(value: StoredValue, state: State | None) -> bool:
    return value.is_state and state is not None and value.fqn in state.fit.missing


def _key_of(value: StoredValue) -> tuple[str, str]:
    if value.name == TREE:
        return "state", key_of(value.fqn)  # a view of a checkpoint may have a weight, which has another key in its file
    return "optim" if value.is_state else "weights", value.stored.key
