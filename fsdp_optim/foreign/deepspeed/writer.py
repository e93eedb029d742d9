"""Writing universal checkpoints of DeepSpeed 0.19, from which its engine resumes at any world size, at stages 1, 2 and 3 of ZeRO.

zero/<FQN>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt   the weight and the state of each parameter that the optimizer trains
zero/optimizer_state.pt                                  the param groups
mp_rank_00_model_states.pt                               all other weights, buffers, the trainer's values and the step
zero_pp_rank_0_mp_rank_00_model_states.pt                the same without tensors, where stage 3 looks for it
latest_universal                                         the tag: this folder itself
deepspeed_universal.json                                 this library's manifest, put last

The dtypes are those of the source: the engine copies them into fp32 tensors, which have all elements of narrower dtypes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fsdp_optim.arguments import check_switch
from fsdp_optim.errors import CheckpointError, counted_noun, shortened
from fsdp_optim.foreign.archive.safe_values import Kinds, safe
from fsdp_optim.foreign.archive.torch_zip import TensorStub
from fsdp_optim.foreign.deepspeed.manifest import (
    COMMON_STATE,
    LATEST,
    MODEL,
    MODEL_OF_STAGE_3,
    NAME,
    OURS,
    UniversalProbe,
    file_of,
)
from fsdp_optim.foreign.deepspeed.model import OF_FILES
from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.foreign.deepspeed.universal_state import STEP, WEIGHT, UniversalParam, UniversalState, universal_state
from fsdp_optim.foreign.torch.checked_values import check_safe, saved_by_torch
from fsdp_optim.foreign.torch.folder import PER_RANK, sequence_of
from fsdp_optim.foreign.torch.writer import (
    as_dict,
    manifest_of,
    planned_archive,
    values_of_modules,
    with_values_of_modules,
)
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Reader,
    Stamp,
    Writer,
    WrittenFiles,
)
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.storage.base import CheckpointProbe, Opened
from fsdp_optim.tensors.memory import dtype_named

log = logging.getLogger("fsdp_optim")

_DS_VERSION = "0.19.8"
_TAKEN = OF_FILES | {PER_RANK, OURS, "num_experts", "ds_autoep_layers", "autoep_layers", "autoep_folding"}
"""Keys of DeepSpeed's files with the model that no value of the trainer may have."""


@dataclass(frozen=True)
class DeepSpeedUniversal(Format):
    """A universal checkpoint of DeepSpeed, from which its engine resumes at any world size, with `load_universal` in its config.

    Attributes:
        masters: the name of the value in the optimizer's state that has the fp32 weights of a model in 16 bits. None: the weights
            of the model are those to train.
        fill_missing: where a parameter has no state and others of its group have, write zeros and the step of the group, as
            DeepSpeed itself has them for parameters without gradients. False: refuse such a checkpoint.
    """

    masters: str | None = None
    fill_missing: bool = False

    name: ClassVar[str] = "deepspeed_universal"
    needs_names: ClassVar[bool] = True
    saves: ClassVar[bool] = False
    probe: ClassVar[CheckpointProbe[Any]] = UniversalProbe()

    def __post_init__(self) -> None:
        check_switch("fill_missing", self.fill_missing)
        if self.masters is not None and (not isinstance(self.masters, str) or not self.masters):
            raise CheckpointError(f"masters must be the name of a value in the optimizer's state, not {self.masters!r}")

    def recognises(self, opened: Opened) -> bool:
        return opened.has(NAME)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return DEEPSPEED.open(opened, verify=verify)

    def writer(self) -> Writer:
        return UniversalWriter(self.masters, self.fill_missing)

    def sequence_in(self, opened: Opened) -> int:
        return sequence_of(opened, NAME)


DEEPSPEED_UNIVERSAL = DeepSpeedUniversal()


@dataclass
class UniversalWriter(Writer):
    """The `Writer` of universal checkpoints."""

    masters: str | None = None
    fills: bool = False
    _contents: CheckpointContents | None = None
    _state: UniversalState | None = None
    _step: int | None = None
    _weights: tuple[str, ...] = ()
    _values: dict[str, Any] = field(default_factory=dict)
    _modules: dict[str, Any] = field(default_factory=dict)
    _kinds: Kinds = field(default_factory=list)

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        state = universal_state(index, contents.optim, self.masters, fill_missing=self.fills)
        self._contents, self._state, self._step = contents, state, index.facts.step
        self._weights = tuple(index.weights)
        for name, value in extras_in(index, allow_pickle=allow_pickle):
            self._keep(index.where, name, value, allow_pickle=allow_pickle)
        common = self._common_state(state)
        check_safe(COMMON_STATE, common, allow_pickle=allow_pickle)
        files = {LATEST: b".", COMMON_STATE: saved_by_torch(common), **_small_files(state)}
        if not state.not_stage_3:
            files[MODEL_OF_STAGE_3] = saved_by_torch(self._model(contents, state, {}))
        return Prepared(contents.content, "", files, contents.optim, contents)

    def _keep(self, where: str, name: str, value: Any, *, allow_pickle: bool) -> None:
        """Take an extra into the planned files."""
        if name == MODULES:
            self._modules = value
            check_safe(name, values_of_modules(value), allow_pickle=allow_pickle)
            return
        position = None if name == COMMON else int(name.rpartition("-")[2])
        given = as_dict(value) if position is None else value
        kept, kinds = safe(given, () if position is None else (PER_RANK, position))
        check_safe(name, kept, allow_pickle=allow_pickle)
        self._kinds += kinds
        if position is not None:
            self._values.setdefault(PER_RANK, {})[position] = kept
            return
        taken = [key for key in kept if key in _TAKEN]
        if taken:
            raise CheckpointError(
                f"{where}: the trainer's value {taken[0]!r} has the name of a part of DeepSpeed's files, in which values of the "
                "trainer have their own keys: save it under another name"
            )
        self._values = {**kept, **self._values}

    def _common_state(self, state: UniversalState) -> dict[str, Any]:
        """Return the content of `optimizer_state.pt`, in which stages 1 and 2, and stage 3, look for other keys."""
        groups = [{**values, "params": [number]} for number, values in enumerate(state.hyperparameters)]
        common: dict[str, Any] = {"ds_version": self._values.get("ds_version", _DS_VERSION), "param_groups": groups}
        if not state.not_stage_3:
            of_groups = {number: {STEP: state.step} for number in range(len(groups))}
            common["optimizer_state_dict"] = {"state": of_groups, "param_groups": groups}
        return common

    def _model(self, contents: CheckpointContents, state: UniversalState, module: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a file with the model. `module`: the tensors in the module's dict."""
        own: dict[str, Any] = {
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self._step if self._step is not None else int(state.step or 0),
            "ds_config": {},
            "ds_version": _DS_VERSION,
        }
        added = {name: value for name, value in own.items() if name not in self._values}
        shapes = [OrderedDict((param.fqn, torch.Size(param.shape)) for param in group) for group in state.groups]
        return {
            "module": with_values_of_modules(module, self._modules, contents.aliases),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": dict(contents.aliases),
            "dp_world_size": contents.world_size,
            "mp_world_size": 1,
            **added,
            **self._values,
            OURS: {"added": sorted(added), "kinds": self._kinds, "step": self._step},
        }

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        raise CheckpointError("universal checkpoints of DeepSpeed are written by convert")

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan a file for each value of each parameter, and one for all other weights, however large."""
        contents, state = self._contents, self._state
        if contents is None or state is None:
            raise CheckpointError(
                "universal checkpoints are written by convert, whose ranks all prepare what they write"
            )
        by_key = {(half, tensor.key): tensor for half, planned in tensors.items() for tensor in planned}
        files = [
            _of_value(param, name, by_key[key]) for param in state.params for name, key in _tensors_of(param).items()
        ]
        in_module = [by_key["model", key] for key in self._in_module(state)]
        in_module.sort(key=lambda tensor: -dtype_named(tensor.dtype).itemsize)  # so that all elements are aligned
        stubs = {tensor.key: TensorStub(tensor.dtype, tensor.shape, number) for number, tensor in enumerate(in_module)}
        return [
            *files,
            planned_archive(MODEL, None, in_module, self._model(contents, state, stubs)),
        ]

    def _in_module(self, state: UniversalState) -> list[str]:
        """Return the weights that no file of a parameter has."""
        elsewhere = {param.fqn for param in state.params if param.master is None}
        return [fqn for fqn in self._weights if fqn not in elsewhere]

    def info_of(self, data: bytes) -> Any:
        return len(data)

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        contents: CheckpointContents = prepared.document
        if self._state is not None:
            self._warn(self._state)
        _, data = manifest_of(prepared.content, contents, contents.world_size, files, written, stamp)
        yield NAME, data

    def _warn(self, state: UniversalState) -> None:
        """Say what is in the files, and is not loaded by DeepSpeed's engine."""
        trained = {param.fqn for param in state.params}
        others = [fqn for fqn in self._in_module(state) if fqn not in trained]
        if others:
            log.warning(
                "DeepSpeed's engine does not load %s, frozen weights and buffers, from a universal checkpoint: they are in "
                "torch.load(%r)['module'], and must be in the model before deepspeed.initialize: %s",
                counted_noun(len(others), "tensor"),
                MODEL,
                shortened(others),
            )
        if state.not_stage_3:
            log.warning("stage 3 of ZeRO cannot resume from it, and stages 1 and 2 can: %s", state.not_stage_3)
        if "loss_scaler" in self._values:
            log.warning(
                "DeepSpeed's engine begins with the loss scale of its configuration: the saved one is in "
                "client_state['loss_scaler']"
            )


def _tensors_of(param: UniversalParam) -> dict[str, tuple[Half, str]]:
    """Return the half and the key of the tensor in each file of a parameter, by the name of the value."""
    weight: tuple[Half, str] = ("model", param.fqn) if param.master is None else ("optim", param.master)
    return {WEIGHT: weight, **{name: ("optim", key) for name, key in param.values.items()}}


def _of_value(param: UniversalParam, name: str, tensor: PlannedTensor) -> PlannedFile:
    stub = TensorStub(tensor.dtype, tensor.shape or (1,), 0)  # DeepSpeed cannot cut a tensor without dimensions
    return planned_archive(file_of(param.fqn, name), tensor.half, [tensor], {"cat_dim": 0, "param": stub})


def _small_files(state: UniversalState) -> dict[str, bytes]:
    """Return the files with the steps, and those with zeros, which are one element that is repeated."""
    files: dict[str, bytes] = {}
    for group in state.groups:
        step = saved_by_torch(group[0].step) if group and group[0].step is not None else None
        for param in group:
            if step is not None:
                files[file_of(param.fqn, STEP)] = step
            for name in param.zeros:
                zeros = torch.zeros(1).expand(param.shape or (1,))
                files[file_of(param.fqn, name)] = saved_by_torch({"cat_dim": 0, "param": zeros})
    return files
