"""What a universal checkpoint has of an optimizer: for each param group one step, and the same values for all parameters.

DeepSpeed keeps the state of a param group in flat tensors, so that no parameter of a group has other values, or another step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base.description import SCALAR, TENSOR, OptimDescription
from fsdp_optim.formats.base.index import CheckpointIndex, StoredOptim
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape

WEIGHT, STEP = "fp32", "step"
_OF_STAGE_3 = {"exp_avg", "exp_avg_sq"}
_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes whose elements fp32 has exactly, so that the engine's copy into its fp32 tensors changes nothing."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NO_FOLDERS = ("", ".", "..")


@dataclass(frozen=True)
class UniversalParam:
    """The state of one parameter that the optimizer trains.

    Attributes:
        values: the key of each stored tensor, by the name of the value.
        zeros: the names of values that the source does not have, and that are zeros.
        step: the number of steps, a number or a tensor; None if the optimizer counts none.
        master: the key of the state value with the fp32 weight; None: the model's weight is the one.
    """

    fqn: str
    shape: Shape
    values: Mapping[str, str] = field(default_factory=dict)
    zeros: Sequence[str] = ()
    step: Any = None
    master: str | None = None


@dataclass(frozen=True)
class UniversalState:
    """The optimizer of a universal checkpoint.

    Attributes:
        groups: the parameters of each param group.
        hyperparameters: the hyperparameters of each param group.
        not_stage_3: why stage 3 of ZeRO cannot resume from it; empty if it can.
    """

    groups: Sequence[Sequence[UniversalParam]]
    hyperparameters: Sequence[Mapping[str, Any]]
    not_stage_3: str = ""

    @property
    def params(self) -> list[UniversalParam]:
        return [param for group in self.groups for param in group]

    @property
    def step(self) -> Any:
        """The step of the first parameter that has one; None if none has."""
        return next((param.step for param in self.params if param.step is not None), None)


def universal_state(
    index: CheckpointIndex, optim: OptimDescription | None, masters: str | None, *, fill_missing: bool
) -> UniversalState:
    """Return the optimizer of a new checkpoint. Raises CheckpointError that names what DeepSpeed has no place for.

    `masters`: the name of the state value with fp32 weights. `fill_missing`: values that a parameter lacks, and others of its
    group have, are zeros.
    """
    where = index.where
    if optim is None or index.optim is None:
        raise CheckpointError(
            f"{where}: has no optimizer, and DeepSpeed finds the weights of a universal checkpoint by the param groups: convert "
            'it with format="safetensors", and load its weights into the model before deepspeed.initialize'
        )
    if optim.other_keys:
        raise CheckpointError(
            f"{where}: the optimizer's dict has {shortened(map(repr, optim.other_keys))} beside its state and its groups, which "
            'DeepSpeed has no place for: convert it with format="torch", which keeps all keys'
        )
    source = _Source(where, index.weights, optim, index.optim.tensors, _scalars(index.optim), masters)
    groups = [[source.param(fqn) for fqn in group.params] for group in optim.groups]
    source.check_masters(groups)
    alike = [_alike(where, params, fill_missing=fill_missing) for params in groups]
    state = UniversalState(alike, [dict(group.hyperparameters) for group in optim.groups])
    return replace(state, not_stage_3=_why_not_stage_3(state))


def _scalars(optim: StoredOptim) -> Mapping[str, torch.Tensor]:
    """Return the elements of the tensors without dimensions, by key."""
    small = {key: tensor for key, tensor in optim.tensors.items() if not tensor.shape}
    return dict(zip(small, optim.read_small(list(small.values())), strict=True)) if small else {}


@dataclass(frozen=True)
class _Source:
    """The optimizer as the source has it. `tensors`: its stored tensors; `scalars`: the elements of those without dimensions."""

    where: str
    weights: Mapping[str, StoredTensor]
    optim: OptimDescription
    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, torch.Tensor]
    masters: str | None

    def param(self, fqn: str) -> UniversalParam:
        if fqn not in self.weights:
            raise CheckpointError(
                f"{self.where}: {fqn}: is in the optimizer, and its weight is not in the checkpoint: DeepSpeed's engine reads "
                'both: save with weights="all"'
            )
        if "/" in fqn or "\0" in fqn or fqn in _NO_FOLDERS:
            raise CheckpointError(
                f"{self.where}: {fqn!r}: cannot be the name of a folder, and DeepSpeed has a folder for each parameter: rename "
                "the parameter"
            )
        self._check_dtype(fqn, self.weights[fqn])
        described = self.optim.params.get(fqn)
        values, step, master = dict[str, str](), None, None
        for name, kind, value in described.values if described is not None else ():
            if value is None:
                continue
            if name == STEP and self._number(kind, value) is not None:
                step = self._number(kind, value)
                continue
            self._check_value(fqn, name, kind)
            self._check_dtype(f"{fqn}: {name!r} of its state", self.tensors[value])
            if name == self.masters:
                master = value
            else:
                values[name] = value
        return UniversalParam(fqn, self.weights[fqn].shape, values, (), step, master)

    def _number(self, kind: str, value: Any) -> Any:
        """Return the number that a value is, as it is saved; None for all other values."""
        if kind == SCALAR:
            return value if type(value) in (int, float) else None
        return self.scalars.get(value) if isinstance(value, str) else None

    def _check_value(self, fqn: str, name: Any, kind: str) -> None:
        if name == WEIGHT and name != self.masters:
            raise CheckpointError(
                f"{self.where}: {fqn}: {name!r} of its state has the name of DeepSpeed's fp32 weights: give "
                f"format=DeepSpeedUniversal(masters={name!r}) if that is what it is"
            )
        if kind == TENSOR and isinstance(name, str) and _FILE_NAME.fullmatch(name) and name != STEP:
            return
        what = f"of the kind {kind!r}" if kind != TENSOR else "a tensor like its parameter"
        raise CheckpointError(
            f"{self.where}: {fqn}: {name!r} of its state is {what}, and DeepSpeed has a place for a number {STEP!r} and for "
            'tensors of the shape of their parameter only: convert it with format="torch", which keeps all values'
        )

    def _check_dtype(self, what: str, tensor: StoredTensor) -> None:
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.where}: {what} is {tensor.dtype}, and DeepSpeed keeps what it trains in float32, which has the elements "
                f"of {shortened(_DTYPES)} only: train it in one of these dtypes, or convert with another format"
            )

    def check_masters(self, groups: Sequence[Sequence[UniversalParam]]) -> None:
        if self.masters is None or any(param.master for group in groups for param in group):
            return
        names = sorted({str(name) for param in self.optim.params.values() for name, _, _ in param.values})
        raise CheckpointError(
            f"{self.where}: no parameter has the value {self.masters!r} in its state, which masters= names: give one of "
            f"{shortened(names)}"
        )


def _alike(where: str, params: Sequence[UniversalParam], *, fill_missing: bool) -> list[UniversalParam]:
    """Return the parameters of one group with the same values. Raises CheckpointError for a parameter that has others."""
    names = list(dict.fromkeys(name for param in params for name in param.values))
    counted = [param for param in params if param.step is not None]
    for param in counted:
        if param.step != counted[0].step:
            raise CheckpointError(
                f"{where}: {param.fqn} has made {_shown(param.step)} steps and {counted[0].fqn} {_shown(counted[0].step)}: "
                "DeepSpeed has one step for a param group: put them into param groups of their own"
            )
    alike = []
    for param in params:
        lacking = [name for name in names if name not in param.values]
        if counted and param.step is None:
            lacking.append(STEP)
        if lacking and not fill_missing:
            having = counted if lacking[0] == STEP else [other for other in params if lacking[0] in other.values]
            other = having[0]
            raise CheckpointError(
                f"{where}: {param.fqn} has no {lacking[0]!r} in its state, and {other.fqn} of the same group has: DeepSpeed "
                "has the same values for all parameters of a group: give format=DeepSpeedUniversal(fill_missing=True), which "
                "writes zeros and the step of the group, as DeepSpeed has them for a parameter without gradients"
            )
        zeros = [name for name in lacking if name != STEP]
        alike.append(replace(param, zeros=zeros, step=counted[0].step if counted else None))
    return alike


def _shown(step: Any) -> str:
    return f"{step.item() if isinstance(step, torch.Tensor) else step:g}"


def _why_not_stage_3(state: UniversalState) -> str:
    """Return why stage 3 cannot resume; empty if it can: its loader knows one step and one group."""
    for param in state.params:
        names = {*param.values, *param.zeros}
        if names != _OF_STAGE_3 or param.step is None:
            has = shortened(sorted(names | ({STEP} if param.step is not None else set()))) or "no state"
            return f"its loader reads exp_avg, exp_avg_sq and step, and {param.fqn} has {has}"
        if param.step != state.step:
            return f"its loader has one step for all groups, and {param.fqn} has another one than {state.params[0].fqn}"
    if len(state.groups) > 1 and isinstance(state.step, torch.Tensor):
        return "its loader gives all groups one tensor as their step, which torch's optimizers then increase once for each group"
    first = state.hyperparameters[0] if state.hyperparameters else {}
    for number, group in enumerate(state.hyperparameters):
        name = next((name for name in {**first, **group} if not _same(first, group, name)), None)
        if name is not None:
            return f"its loader gives all groups the hyperparameters of the first one, and group {number} has another {name!r}"
    return ""


def _same(first: Mapping[str, Any], group: Mapping[str, Any], name: str) -> bool:
    if name not in first or name not in group:
        return False
    value, other = first[name], group[name]
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return bool(value == other)
