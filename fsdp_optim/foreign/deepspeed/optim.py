"""The content of `*_optim_states.pt` of DeepSpeed's ZeRO: fp32 weights and the optimizer's full dict, by names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive
from fsdp_optim.foreign.deepspeed.cuts import Cut, Parts, cuts_of_flat_groups, cuts_of_params
from fsdp_optim.foreign.deepspeed.trees import (
    LossScaler,
    check_same_dtype,
    flat_tensor,
    listed,
    mapping,
    shapes_of,
    whole_number,
)
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape

_MOST_NAMED = 8
_NUMBERS = (int, float, str, type(None))


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a checkpoint.

    Attributes:
        masters: the fp32 weights, by name.
        full_dict: its full dict by name, with StoredTensors; None if only weights were saved.
        scaler: the numbers of the loss scaler; empty where there is none.
    """

    masters: Mapping[str, StoredTensor]
    full_dict: Mapping[str, Any] | None
    scaler: Mapping[str, Any]


def read_optimizer(archives: Sequence[TorchArchive], param_shapes: object) -> Optimizer:
    """Join the files of all ranks, in their order. `param_shapes`: as DeepSpeed has it, a list of shapes by name.

    Raises CheckpointError that names the file of a rank which does not fit to the others.
    """
    ranks = [_Rank.of(archive) for archive in archives]
    first = ranks[0]
    for rank in ranks:
        with as_checkpoint_error(rank.file):
            rank.check_beside(first, len(ranks))
    with as_checkpoint_error(first.file):
        groups = [
            shapes_of(shapes, "param_shapes") for shapes in listed(_as_list(param_shapes), "param_shapes of the model")
        ]
        _check_names(first.file, groups)
        cuts = list(_cuts(ranks, groups))
        masters = {cut.fqn: cut.stored(cut.fqn, [rank.flats[cut.flat] for rank in ranks]) for cut in cuts}
        return Optimizer(masters, _full_dict(ranks, cuts), first.scaler)


def _as_list(param_shapes: object) -> object:
    return [param_shapes] if isinstance(param_shapes, dict) else param_shapes


def _check_names(file: str, groups: Sequence[Mapping[str, Shape]]) -> None:
    names = [name for shapes in groups for name in shapes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{file}: {twice} is in two groups of parameters")


@dataclass(frozen=True)
class _Rank:
    """The file of one rank.

    Attributes:
        stage: the stage of ZeRO; 1 for a file of DeepSpeed's BF16_Optimizer.
        num_ranks: the number of ranks that saved.
        flats: the parts of the fp32 weights.
        paddings: the elements after each parameter of a flat tensor; None where only its end is padded.
        ends: the elements of padding that the weights of each flat tensor lack here at their end, and the state has.
        state: the values of each flat tensor's state, by its number.
        groups: the param groups, with the numbers of flat tensors in the place of parameters; None if they were not saved.
    """

    archive: TorchArchive
    stage: int
    num_ranks: int
    flats: Sequence[StoredTensor]
    paddings: Sequence[Sequence[int]] | None
    ends: Sequence[int]
    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]] | None
    scaler: Mapping[str, Any]

    @property
    def file(self) -> str:
        return self.archive.where

    @classmethod
    def of(cls, archive: TorchArchive) -> _Rank:
        with as_checkpoint_error(archive.where):
            saved = mapping(mapping(archive.value, "the file")["optimizer_state_dict"], "optimizer_state_dict")
            stage = whole_number(saved.get("zero_stage", 1), "zero_stage")
            counts = saved["partition_count"]
            counts = counts if isinstance(counts, (list, tuple)) else [counts]
            if stage == 3:
                flats, state = saved["fp32_flat_groups"], saved["optimizer_state_dict"]
            elif stage in (1, 2):
                flats, state = saved["single_partition_of_fp32_groups"], saved["base_optimizer_state"]
            else:
                raise ValueError(f"the stage of ZeRO is {stage}")
            if "ds_zero_partition_groups" in saved or len(set(counts)) > 1:
                raise CheckpointError(
                    f"{archive.where}: parameters of experts are cut over other ranks than the rest, which cannot be read: "
                    "convert the checkpoint with deepspeed.checkpoint.ds_to_universal"
                )
            scaler = saved.get("loss_scaler")
            values, groups = _state_and_groups(state, saved.get("base_optimizer_state_step"))
            groups = archive.materialised(groups)
            return cls(
                archive=archive,
                stage=stage,
                num_ranks=whole_number(counts[0], "partition_count") if counts else 0,
                flats=[flat_tensor(flat, "a flat group of weights") for flat in listed(flats, "the weights")],
                paddings=_paddings(saved.get("param_alignment_paddings")),
                ends=[
                    whole_number(end, "a padding") for end in listed(saved.get("group_paddings", ()), "group_paddings")
                ],
                state=values,
                groups=groups,
                scaler=scaler.numbers if isinstance(scaler, LossScaler) else {},
            )

    def end_of(self, index: int) -> int:
        """Return the padding at the end of one flat tensor."""
        return self.ends[index] if index < len(self.ends) else 0

    def check_beside(self, first: _Rank, num_files: int) -> None:
        """Raise CheckpointError unless this rank's file and the first rank's may be of one save."""
        if self.num_ranks != num_files:
            raise CheckpointError(
                f"{self.file}: is of {self.num_ranks} ranks, but files of {num_files} ranks are there: some are missing, or "
                "are left over from another save"
            )
        facts, others = self._facts(), first._facts()
        for what, value in facts.items():
            if value != others[what]:
                raise CheckpointError(
                    f"{self.file}: differs in {what} from {first.file}: {value!r:.80} is not {others[what]!r:.80}; the files "
                    "are of different saves"
                )

    def _facts(self) -> Mapping[str, Any]:
        """Return the values that are the same on all ranks of one save."""
        return {
            "the stage of ZeRO": self.stage,
            "the number of groups": len(self.flats),
            "paddings": self.paddings,
            "the groups of the optimizer": repr(self.groups),
            "the names of state values": {index: sorted(values) for index, values in self.state.items()},
            "numbers of the state": {
                f"{index}.{name}": value if not isinstance(value, StoredTensor) else self._number(value)
                for index, values in self.state.items()
                for name, value in values.items()
                if not isinstance(value, StoredTensor) or not value.shape
            },
        }

    def _number(self, stored: StoredTensor) -> Any:
        tensor: torch.Tensor = self.archive.materialised(stored)
        return tensor.item()


def _state_and_groups(
    saved: object, step: object
) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Return the state by flat tensor, and the groups.

    A list is an elastic checkpoint, which has no hyperparameters but `step`.
    """
    if isinstance(saved, (list, tuple)):
        added = {} if step is None else {"step": step}
        return {index: {**added, **_values(values)} for index, values in enumerate(saved)}, None
    tree = mapping(saved, "the optimizer")
    state = {
        whole_number(index, "an id"): _values(values) for index, values in mapping(tree["state"], "the state").items()
    }
    groups = [
        mapping(group, "a param group") for group in listed(tree["param_groups"], "the param groups of the optimizer")
    ]
    return {index: values for index, values in state.items() if values}, groups


def _values(values: object) -> dict[str, Any]:
    return {str(name): value for name, value in mapping(values, "the state of a group").items()}


def _paddings(saved: object) -> Sequence[Sequence[int]] | None:
    if saved is None:
        return None
    return [
        [whole_number(padding, "a padding") for padding in listed(of_group, "paddings")]
        for of_group in listed(saved, "")
    ]


def _cuts(ranks: Sequence[_Rank], groups: Sequence[Mapping[str, Shape]]) -> Sequence[Cut]:
    first, files = ranks[0], [rank.file for rank in ranks]
    flats: list[Parts] = [[rank.flats[index] for rank in ranks] for index in range(len(first.flats))]
    for parts in flats:
        check_same_dtype("a flat group of weights", parts, files)
    if first.stage == 3:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        if shapes and not flats:
            raise CheckpointError(f"{first.file}: has no weights")
        return list(cuts_of_params(files, shapes, flats))
    paddings = first.paddings or [[0] * len(shapes) for shapes in groups]
    if len(groups) != len(flats) or [len(of_group) for of_group in paddings] != [len(shapes) for shapes in groups]:
        raise CheckpointError(
            f"{first.file}: has {len(flats)} groups of weights, but the model's file has {len(groups)}: the files are of "
            "different saves"
        )
    return list(cuts_of_flat_groups(files, groups, paddings, flats))


# ------------------------------------------------------------------------------------------- the full dict


def _full_dict(ranks: Sequence[_Rank], cuts: Sequence[Cut]) -> Mapping[str, Any]:
    """Return the state of each parameter, and the groups with names."""
    first = ranks[0]
    members: dict[int, list[Cut]] = {index: [] for index in range(len(first.flats))}
    for cut in cuts:
        members[cut.flat].append(cut)
    unknown = sorted(set(first.state) - set(members))
    if unknown:
        raise CheckpointError(f"{first.file}: has state of the group {unknown[0]}, but no weights of it")
    state: dict[str, dict[str, Any]] = {}
    for index, values in first.state.items():
        for name in values:
            of_param = _value_of(ranks, index, name)
            for cut in members[index]:
                state.setdefault(cut.fqn, {})[name] = of_param(cut)
    groups = []
    for position, group in enumerate(first.groups or [{"params": [index]} for index in members]):
        flats = [whole_number(index, "an id of a param group") for index in listed(group["params"], "params")]
        if not set(flats) <= set(members):
            raise CheckpointError(
                f"{first.file}: the param group {position} has {flats}, but there are {len(members)} flats"
            )
        fqns = [cut.fqn for index in flats for cut in members[index]]
        groups.append(with_step({**group, "params": fqns}, state))
    return {"state": state, "param_groups": groups}


def with_step(group: dict[str, Any], state: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Move the `step` of a param group, where FusedAdam counts it, into the state of its parameters; return the group."""
    states = [state[fqn] for fqn in group["params"] if state.get(fqn)]
    if "step" in group and states and not any("step" in values for values in states):
        step = group.pop("step")
        for values in states:
            values["step"] = step
    return group


def _value_of(ranks: Sequence[_Rank], index: int, name: str) -> Callable[[Cut], Any]:
    """Return a function that returns a state value of one flat tensor for a parameter in it."""
    values = [rank.state[index][name] for rank in ranks]
    tensors = [value for value in values if isinstance(value, StoredTensor) and value.shape]
    if not tensors and all(isinstance(value, (*_NUMBERS, StoredTensor)) for value in values):
        number = values[0]
        if isinstance(number, StoredTensor):
            number = structs.replace(number, key=f"{index}.{name}")
        return lambda cut: number
    whole = [prod(rank.flats[index].shape) for rank in ranks]
    numels = [prod(value.shape) for value in tensors if len(value.shape) == 1]
    is_padded = len(set(numels)) == 1 and numels[0] == whole[0] + ranks[0].end_of(index)
    if len(numels) != len(ranks) or not (numels == whole or is_padded):
        shapes = [list(value.shape) if isinstance(value, StoredTensor) else value for value in values[:_MOST_NAMED]]
        raise CheckpointError(
            f"{ranks[0].file}: the state value {name} of group {index} is {shapes!r:.200} on the ranks, but the weights have the "
            f"shapes {[[num] for num in whole[:_MOST_NAMED]]}: the state of such an optimizer cannot be read"
        )
    check_same_dtype(name, tensors, [rank.file for rank in ranks])
    return lambda cut: cut.stored(f"{cut.fqn}.{name}", tensors)
