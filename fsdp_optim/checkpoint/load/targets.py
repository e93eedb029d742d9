"""The targets of a load: the model's weights and the optimizer's state, checked against a checkpoint, with memory for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec import Struct

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.casting import cast_state, castable, merged, state_dtype
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, WEIGHT, check_not_empty, weights_of
from fsdp_optim.checkpoint.common.kept_fusions import KeptFusions
from fsdp_optim.checkpoint.common.module_values import StoredModuleValues
from fsdp_optim.checkpoint.common.shared_elements import OF_ITS_OWN
from fsdp_optim.checkpoint.load.matching import (
    differing_tied_copies,
    find_stored,
    renamed_names,
    renamer,
    why_names_differ,
)
from fsdp_optim.checkpoint.load.reading import StoredValue
from fsdp_optim.checkpoint.load.stored_state import StoredState, check_filled, kept_fusions_of
from fsdp_optim.checkpoint.load.unfilled import check_memory, warn_of_unfilled
from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import (
    Reader,
    StoredTensor,
    TensorReader,
)
from fsdp_optim.options import WhichWeights
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.fit_check import Fit
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.live.local_dict import Shard, summarize
from fsdp_optim.state.live.state_memory import StateMemory
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.replicas import ELEMENTS
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.elements import shares_elements
from fsdp_optim.tensors.memory import copy_each, dtype_name, dtype_named, flatten, in_shape
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import Local, agree_on_state, names_of_global_state
from fsdp_optim.verbs.load_plan import LoadPlan, plan_load

_MOST_NAMED = 20  # differences in one error
_FEW = 3  # names of each side, in an error that concerns all names


class Weights(Struct, frozen=True):
    """The weights to load, with memory for their elements, and the values of modules.

    `memory`: by local id and saved dtype, a contiguous tensor for this rank's elements, 1-D or in the local shape.
    """

    local: Local
    global_state: GlobalState
    stored: Mapping[str, StoredTensor]
    memory: Mapping[LocalId, Mapping[str, torch.Tensor]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    module_values: StoredModuleValues

    @classmethod
    def agree_on_state(
        cls,
        reader: ModelReader,
        group: RankGroup,
        checkpoint: TensorReader,
        asked: LoadArguments,
        about: str,
        *,
        readers: Sequence[int] | None = None,
    ) -> Weights:
        """Agree on the weights of a model, matched with a checkpoint. Called by all ranks.

        `readers`: the ranks that can read its elements; None: all.
        """
        options = asked.call
        unsaved = reader.unsaved_buffers() if asked.weights != "none" else {}

        def read() -> Local:
            model_weights = weights_of(reader, group.ranks, options, asked.weights)
            check_memory(unsaved, group.rank)
            return model_weights

        local, global_state = agree_on_state(group, read, asked, f"the model, {about}", with_state=False, what=ELEMENTS)
        if asked.weights != "none":
            check_not_empty(global_state, reader)
        else:
            module_values = StoredModuleValues(local.module_values)
            return cls(local, global_state, {}, {}, missing=(), unexpected=(), module_values=module_values)
        index = checkpoint.index
        names = renamed_names(names_of_global_state(global_state, local.view), index, asked.rename)
        stored, tied_copies = find_stored(global_state.params, names, local.view.aliases, index)
        differing = {}
        if any(key not in global_state.params for key in index.weights):  # the same on all ranks
            by_ranks = group.ranks if readers is None else readers
            differing = _of_all_ranks(group, differing_tied_copies(checkpoint, tied_copies, group.rank, by_ranks))
        used = {tensor.key for tensor in stored.values()}
        used |= {copy.key for copy, _ in tied_copies if copy.key not in differing}
        left_out = {fqn for fqn, param in global_state.params.items() if param.group_index == LEFT_OUT}
        frozen = {fqn: stored.pop(fqn).key for fqn in global_state.params if fqn in left_out and fqn in stored}
        if index.facts.weights.which != "trainable":
            frozen = {}  # all weights were saved, and the caller asked to leave the frozen ones out
        missing = [fqn for fqn in global_state.params if fqn not in stored and fqn not in left_out]
        unexpected = [key for key in index.weights if key not in used and not (options.strict and key in differing)]
        values = StoredModuleValues.find(
            local.module_values,
            global_state,
            index,
            allow_pickle=asked.allow_pickle,
            strict=options.strict,
            renamed=renamer(asked.rename or {}),
        )
        lacking = (*missing, *values.missing)
        unexpected += values.unexpected
        allowed = () if asked.allow_unexpected else unexpected
        why = why_names_differ(reader, index, missing, unexpected)
        one_sided = _OneSided(lacking, allowed, frozen, differing, why) if options.strict else _OneSided()
        _check_model(index, local, global_state, stored, one_sided, cast=asked.cast, which=asked.weights)
        _check_some(index, stored, [fqn for fqn in global_state.params if fqn not in left_out], why)
        unexpected += frozen.values()
        memory: dict[LocalId, dict[str, torch.Tensor]] = {}
        made = StateMemory(
            group.rank, frozenset(missing), shaped=True
        )  # not that of the state, which the optimizer keeps
        of_dtype = {
            dtype: Summary(sharded=((WEIGHT, dtype),), names=(WEIGHT,))
            for dtype in dict.fromkeys(tensor.dtype for tensor in stored.values())
        }
        for param in local.optim.params:
            dtypes = {stored[fqn].dtype: None for fqn in param.named.fqns if fqn in stored}
            memory[param.local_id] = {dtype: made.of(param, of_dtype[dtype])[WEIGHT] for dtype in dtypes}
        warn_of_unfilled(unsaved, local.view.handles, group.rank)
        extra = tuple(unexpected)
        return cls(local, global_state, stored, memory, missing=lacking, unexpected=extra, module_values=values)

    def stored_values(self) -> Iterator[StoredValue]:
        by_fqn, memory = self.local.by_fqn, self.memory
        dtypes = {name: dtype_named(name) for name in {stored.dtype for stored in self.stored.values()}}
        for fqn, param in self.global_state.params.items():
            stored = self.stored.get(fqn)
            if stored is not None:
                local, dtype = by_fqn.get(fqn), dtypes[stored.dtype]
                here = memory[local.local_id][stored.dtype] if local is not None else None
                yield StoredValue(fqn, WEIGHT, dtype, param.placement, False, stored=stored, memory=here)

    def install(self) -> None:
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for param in self.local.optim.params:
            memory = self.memory.get(param.local_id)
            if not memory:
                continue
            handle, (first, *others) = param.named.handle, memory.values()
            is_complete = all(map(self.stored.__contains__, param.named.fqns))
            if others or not (is_complete or dtype_name(handle.weights_dtype) in memory):
                handle.install(merged(param, memory, self.stored, self.local.view.rank))  # memory that is freed at once
            elif (target := handle.filled()) is None:
                handle.install(flatten(first))
            else:
                targets.append(target)
                sources.append(in_shape(first, target.shape))
        copy_each(targets, sources)


def _of_all_ranks(group: RankGroup, differing: Mapping[str, str]) -> dict[str, str]:
    """Return the differences that any rank has found, by name. Called by all ranks."""
    result = all_gather_bytes(group, "tied weights", json.dumps(differing).encode())
    differences: dict[str, str] = {}
    for rank in group.ranks:
        differences.update(json.loads(result.content_of(rank)))
    return differences


def _check_some(index: CheckpointIndex, stored: Mapping[str, StoredTensor], wanted: Sequence[str], why: str) -> None:
    """Raise StateError if a load that is asked for weights would load none of them. `why`: as for `_OneSided`."""
    if wanted and not stored:
        fix = why or "give rename=, which maps its names to those of the model"
        raise StateError(
            f"{index.where}: no weight would be loaded: none of its {counted_noun(len(index.weights), 'tensor')} has "
            f"the name of one of the {len(wanted)} of the model. Its names: {shortened(index.weights, _FEW) or 'none'}; those "
            f'of the model: {shortened(wanted, _FEW)}: {fix}, or weights="none" to load the optimizer alone'
        )


@dataclass(frozen=True)
class _OneSided:
    """The differences that a strict load refuses, besides shapes and dtypes.

    Attributes:
        missing, unexpected: names that only the model, or only the checkpoint, has.
        frozen: the trainable parameters of the checkpoint that are frozen in the model, each with its stored name.
        differing: tied tensors that differ in the checkpoint, with the difference in words.
        why: why names differ, and what to do, if that is known.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    differing: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


def _check_model(
    index: CheckpointIndex,
    local: Local,
    global_state: GlobalState,
    stored: Mapping[str, StoredTensor],
    one_sided: _OneSided,
    *,
    cast: bool,
    which: WhichWeights,
) -> None:
    """Raise StateError with a list of differences if the model differs from the checkpoint."""
    fixes = set()
    missing, unexpected, frozen = one_sided.missing, one_sided.unexpected, one_sided.frozen
    differences = [f"{key}: {difference}" for key, difference in one_sided.differing.items()]
    if differences:
        fixes.add("strict=False loads the first of tensors that the model ties")
    differences += [f"{fqn}: the model has it, the checkpoint does not" for fqn in missing]
    differences += [f"{key}: the checkpoint has it, the model does not" for key in unexpected]
    differences += [f"{fqn}: was saved as a trainable parameter, and is frozen in the model" for fqn in frozen]
    if missing and which == "all" and index.facts.weights.which == "trainable":
        fixes.add('it was saved with weights="trainable": weights="trainable" leaves the frozen parameters as they are')
    elif frozen and not missing and not unexpected:
        fixes.add("strict=False leaves frozen parameters as they are")
    elif missing or unexpected:
        fixes |= {one_sided.why} - {""}
        fixes.add("strict=False loads the parameters that both sides have")
    by_fqn = local.by_fqn
    for fqn, tensor in stored.items():
        shape = global_state.params[fqn].placement.shape
        param = by_fqn.get(fqn)
        held = param.handle.as_value() if param is not None else None
        if held is not None and shares_elements(held):
            differences.append(
                f"{fqn}: its elements share memory in the model (expand), so it cannot be written to: {OF_ITS_OWN}"
            )
        if shape != tensor.shape:
            differences.append(f"{fqn}: shape {list(tensor.shape)} in the checkpoint, {list(shape)} in the model")
        dtype = dtype_name(held.dtype) if held is not None else tensor.dtype
        if dtype != tensor.dtype and not (param is not None and castable(param.handle, tensor.dtype, cast=cast)):
            if param is not None and castable(param.handle, tensor.dtype, cast=True):
                cast_to = index.facts.weights.dtype
                why = f"it was saved with weights_dtype=torch.{cast_to}: " if cast_to is not None else ""
                fixes.add(f"{why}cast=True converts floating dtypes")
            differences.append(f"{fqn}: {tensor.dtype} in the checkpoint, {dtype} in the model")
    if differences:
        ways = f" ({'; '.join(sorted(fixes))})" if fixes else ""
        number = counted_noun(len(differences), "difference")
        raise StateError(
            f"{index.where} does not fit this model; nothing was loaded. {number}{ways}:\n"
            + shortened(differences, _MOST_NAMED, "\n")
        )


class State(Struct, frozen=True):
    """The optimizer state to load, with `memory` for its elements, as for `Weights`, by local id and name."""

    local: Local
    global_state: GlobalState
    full: FullState
    tensors: Mapping[tuple[str, str], StoredTensor]
    fit: Fit
    load_plan: LoadPlan
    memory: Mapping[LocalId, Mapping[str, torch.Tensor]]
    weights: Mapping[str, StoredTensor]  # state values may follow their dtypes; empty without `cast`
    kept: KeptFusions

    @classmethod
    def agree_on_state(
        cls,
        reader: ModelReader,
        optim: Optimizers,
        group: RankGroup,
        checkpoint: Reader,
        options: LoadArguments,
        weights: Weights,
    ) -> State:
        kept = kept_fusions_of(checkpoint.index, options.rename, allow_pickle=options.allow_pickle)
        local, global_state = agree_on_state(
            group,
            lambda: kept.read(reader, optim, options.call, group.ranks),
            options,
            "the optimizer",
            with_state=False,
        )
        live = local.live_optimizer(global_state)
        stored_state = StoredState.of(
            checkpoint,
            live.names,
            live.shapes,
            allow_pickle=options.allow_pickle,
            rename=options.rename,
            off_mesh=live.off_mesh,
        )
        full = kept.check(stored_state.full, live.shapes, global_state.views, strict=options.strict)
        if options.drops_new_state:
            live = replace(live, with_state=live.with_state & full.state.keys())
        full, fit = live.fit(full, strict=options.strict, groups=options.param_groups)
        fit = kept.without(fit, full, live.shapes.keys())
        summaries = summarize(full, live.shapes)
        check_filled(full, summaries)
        load_plan = plan_load(local, summaries, fit, lambda fqn, name: full.state[fqn][name])
        made = StateMemory(group.rank, load_plan.missing, shaped=True)
        memory = {param.local_id: made.of(param, summary) for param, summary in load_plan.receiving}
        stored = weights.stored if options.cast else {}
        return cls(
            local=local,
            global_state=global_state,
            full=full,
            tensors=stored_state.tensors,
            fit=fit,
            load_plan=load_plan,
            memory=memory,
            weights=stored,
            kept=kept,
        )

    def stored_values(self) -> Iterator[StoredValue]:
        by_fqn, tensors, memory = self.local.by_fqn, self.tensors, self.memory
        dtypes = {name: dtype_named(name) for name in {stored.dtype for stored in tensors.values()}}
        for fqn, param in self.global_state.params.items():
            local = by_fqn.get(fqn)
            of_param, placement = memory.get(local.local_id, {}) if local is not None else {}, param.placement
            for name, value in self.full.state.get(fqn, {}).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    stored = tensors[fqn, name]
                    dtype, here = dtypes[stored.dtype], of_param.get(name)
                    yield StoredValue(fqn, name, dtype, placement, is_state=True, stored=stored, memory=here)

    @property
    def small_tensors(self) -> list[torch.Tensor]:
        """The values that every rank has read as they are, such as step counts."""
        values = (value for fqn in self.global_state.params for value in self.full.state.get(fqn, {}).values())
        return [value for value in values if isinstance(value, torch.Tensor) and not value.is_meta]

    @property
    def absent(self) -> tuple[str, ...]:
        """The optimizer's parameters that have no state in the checkpoint, but for those in `fit.begun_anew`."""
        anew = frozenset(self.fit.begun_anew)
        return tuple(fqn for fqn in self.global_state.params if fqn not in self.full.state and fqn not in anew)

    @property
    def cast(self) -> frozenset[tuple[str, str]]:
        """The (FQN, name) of values that this rank's optimizer gets in another dtype than the saved one."""
        cast: set[tuple[str, str]] = set()
        for param, summary in self.load_plan.receiving if self.weights else ():
            for name, dtype in summary.dtypes.items():
                if state_dtype(self.local.optim, param, name, dtype, self.weights) != dtype:
                    cast |= {(fqn, name) for fqn in param.named.fqns}
        return frozenset(cast)

    def dict_of(self) -> Shard | list[Shard]:
        memory = cast_state(self.local.optim, self.memory, self.weights) if self.weights else self.memory
        return self.load_plan.dict_of(memory, self.full.groups, self.full.other_keys)
