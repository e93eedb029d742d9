"""Universal checkpoints of DeepSpeed: a folder for each parameter, with a file for its weight and for each value of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive
from fsdp_optim.foreign.deepspeed.files import DeepSpeedFiles
from fsdp_optim.foreign.deepspeed.model import ModelFiles, flat_as
from fsdp_optim.foreign.deepspeed.optim import Optimizer, with_step
from fsdp_optim.foreign.deepspeed.trees import (
    LossScaler,
    any_tensor,
    listed,
    mapping,
    read_files,
    shapes_of,
    whole_number,
)
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened

_COMMON = "zero/optimizer_state.pt"
_WEIGHT = "fp32"
_NUM_COMPARED = 64  # elements of each parameter


def read_universal(
    opened: Opened, files: DeepSpeedFiles, models: ModelFiles
) -> tuple[Optimizer, Sequence[TorchArchive]]:
    """Return the fp32 weights of all parameters and the optimizer, and the files that were read."""
    with as_checkpoint_error(models.file):
        groups = [shapes_of(shapes, "param_shapes") for shapes in listed(models.saved.get("param_shapes") or (), "")]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lacking = sorted(set(shapes) - set(files.params))
    if lacking:
        raise CheckpointError(
            f"{files.where}/zero/{lacking[0]}/fp32.pt: is missing, and so are the files of {len(lacking) - 1} other parameters: "
            "the conversion to a universal checkpoint did not finish"
        )
    of_params = _names_by_param(files)
    paths = [f"{files.folder}zero/{fqn}/{name}.pt" for fqn, names in of_params.items() for name in names]
    has_common = _COMMON in files.names
    archives = read_files(opened, [*paths, *([f"{files.folder}{_COMMON}"] if has_common else [])])
    of_file = iter(archives)
    weights: dict[str, StoredTensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for fqn, names in of_params.items():
        for name in names:
            value = _value(next(of_file), fqn, name, shapes.get(fqn))
            if name == _WEIGHT:
                weights[fqn] = any_tensor(value, fqn)
            else:
                state.setdefault(fqn, {})[name] = value
    of_weights = dict(zip(of_params, _firsts(of_params, archives), strict=True))
    with as_checkpoint_error(models.file):
        _check_order(files, models, {fqn: weights[fqn] for fqn in shapes}, of_weights)
    for fqn, values in state.items():
        _check_shapes(files, fqn, weights[fqn], values)
    full, scaler = (None, {}) if not has_common else _common(archives[-1], groups, state)
    if full is None and state:
        raise CheckpointError(f"{files.where}/{_COMMON}: is missing, and has the groups of the optimizer")
    return Optimizer(weights, full, scaler), archives


def _names_by_param(files: DeepSpeedFiles) -> Mapping[str, Sequence[str]]:
    """Return the names of the values of each parameter, the weight first."""
    by_param: dict[str, list[str]] = {fqn: [_WEIGHT] for fqn in files.params}
    for path in sorted(files.names):
        folder, _, name = path.rpartition("/")
        fqn, stem = folder.removeprefix("zero/"), name.removesuffix(".pt")
        if folder.startswith("zero/") and name.endswith(".pt") and fqn in by_param and stem != _WEIGHT:
            by_param[fqn].append(stem)
    return by_param


def _value(archive: TorchArchive, fqn: str, name: str, shape: Shape | None) -> Any:
    with as_checkpoint_error(archive.where):
        value = archive.value
        if isinstance(value, dict):  # from stage 1 or 2; stage 3 gives the tensor alone, and flat
            value = value["param"]
        if not isinstance(value, StoredTensor):
            if name == _WEIGHT or not isinstance(value, (int, float)):
                raise TypeError(f"it has a {type(value).__name__}, not a tensor")
            return value
        key = fqn if name == _WEIGHT else f"{fqn}.{name}"
        if len(value.shape) == 1 and shape is not None:
            return flat_as(value, key, shape)
        return structs.replace(value, key=key)


def _firsts(of_params: Mapping[str, Sequence[str]], archives: Sequence[TorchArchive]) -> Iterator[TorchArchive]:
    """Yield the file of the weight of each parameter."""
    at = 0
    for names in of_params.values():
        yield archives[at]
        at += len(names)


def _check_order(
    files: DeepSpeedFiles, models: ModelFiles, weights: Mapping[str, StoredTensor], archives: Mapping[str, TorchArchive]
) -> None:
    """Refuse fp32 weights that differ from the module's, as a run with round robin gradients leaves them.

    DeepSpeed's converter takes the parameters of a flat tensor in another order than such a run has laid them, unless it also
    aligned them, so that files have the elements of other parameters.
    """
    config = models.saved.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or not zero.get("round_robin_gradients"):
        return
    for fqn, weight in weights.items():
        of_module = models.module.get(fqn)
        if of_module is None or of_module.shape != weight.shape:
            continue
        few = (min(prod(weight.shape), _NUM_COMPARED),)
        fp32 = archives[fqn].materialised(structs.replace(weight, shape=few))
        module = models.first.materialised(structs.replace(of_module, shape=few))
        if not torch.equal(fp32.to(module.dtype), module):
            raise CheckpointError(
                f"{files.where}/zero/{fqn}/fp32.pt: has other weights than the module: DeepSpeed's converter mixes up the "
                "parameters of a run with round_robin_gradients: load the checkpoint that was converted"
            )


def _check_shapes(files: DeepSpeedFiles, fqn: str, weight: StoredTensor, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, StoredTensor) and value.shape not in ((), weight.shape):
            raise CheckpointError(
                f"{files.where}/zero/{fqn}/{name}.pt: has the shape {list(value.shape)}, and the weight has {list(weight.shape)}"
            )


def _common(
    archive: TorchArchive, shapes: Sequence[Mapping[str, Shape]], state: Mapping[str, dict[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the full dict, and the numbers of the loss scaler, from the file of the values that belong to no parameter."""
    with as_checkpoint_error(archive.where):
        saved = mapping(archive.value, "the file")
        steps = _steps(saved)
        groups = []
        for group in listed(saved["param_groups"], "param_groups"):
            flats = [
                whole_number(index, "an id") for index in listed(mapping(group, "a param group")["params"], "params")
            ]
            if any(index >= len(shapes) for index in flats):
                raise ValueError(f"a param group has {flats}, but the model has {len(shapes)} groups of parameters")
            fqns = [fqn for index in flats for fqn in shapes[index]]
            for index in flats:
                for fqn in shapes[index] if index in steps else ():
                    if fqn in state:
                        state[fqn].setdefault("step", steps[index])
            groups.append(with_step({**archive.materialised(group), "params": fqns}, state))
        scaler = saved.get("loss_scaler")
        return {"state": state, "param_groups": groups}, scaler.numbers if isinstance(scaler, LossScaler) else {}


def _steps(saved: Mapping[str, Any]) -> Mapping[int, Any]:
    """Return the step of each flat group, which the universal checkpoint of stage 3 has in the first rank's own state."""
    tree = saved.get("optimizer_state_dict")
    if not isinstance(tree, dict):
        return {}
    steps: dict[int, Any] = {}
    for index, values in mapping(tree.get("state", {}), "the state").items():
        step = mapping(values, "the state of a group").get("step")
        if isinstance(step, StoredTensor) and not step.shape:
            steps[index] = structs.replace(step, key=f"{index}.step")
        elif isinstance(step, (int, float)):
            steps[index] = step
    return steps
