"""A writer of files that DeepSpeed's ZeRO would write, independent of DeepSpeed and of the reader; it follows the writers in
deepspeed 0.19.8 (`stage_1_and_2.state_dict`, `stage3.state_dict`, `engine._save_checkpoint`, `ds_to_universal`), for shapes of
any kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Tensor]]
"""The fp32 weights of each param group by name, in the order of the flat tensor."""


def write_zero(
    folder: Path, stage: int, world_size: int, groups: Groups, state: Mapping[str, Groups], **options: Any
) -> None:
    """Write a checkpoint. `state`: values that are cut like the weights, by name.

    `options`: `step` (in the state), `group_step` (in the groups, as FusedAdam has it), `client` (values of the trainer),
    `is_lean` False (padding stays, as DeepSpeed's BF16_Optimizer writes it), `alignment` of each parameter, in elements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    param_shapes = [OrderedDict((name, weight.shape) for name, weight in group.items()) for group in groups]
    module = {name: weight.half() for group in groups for name, weight in group.items()}
    for rank in range(world_size):
        saved = _stage_3 if stage == 3 else _flat
        of_rank = saved(rank, world_size, groups, state, options)
        numbers = {"zero_stage": stage, "partition_count": world_size if stage == 3 else [world_size] * len(groups)}
        file = {"optimizer_state_dict": {**numbers, **of_rank}, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(file, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        model = {
            "module": {name: weight.flatten()[:0] for name, weight in module.items()} if stage == 3 else module,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": param_shapes,
            "shared_params": {},
            "global_steps": 5,
            "dp_world_size": world_size,
            "mp_world_size": 1,
            **options.get("client", {}),
        }
        if rank == 0 or stage == 3:
            torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")


def write_universal(folder: Path, stage: int, groups: Groups, state: Mapping[str, Groups], step: int) -> None:
    """Write a universal checkpoint, of a save of two ranks. From stage 3, tensors are flat and there is no `step.pt`."""
    write_zero(folder, stage, 2, groups, state, step=step)
    saved = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=True)["optimizer_state_dict"]
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for index, group in enumerate(groups):
        for fqn, weight in group.items():
            of_param = folder / "zero" / fqn
            of_param.mkdir(parents=True)
            for name, value in {"fp32": weight, **{key: values[index][fqn] for key, values in state.items()}}.items():
                torch.save(value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}, of_param / f"{name}.pt")
            if stage < 3:
                torch.save(torch.tensor(float(step)), of_param / "step.pt")
    inner = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    common = {"param_groups": inner["param_groups"], **({"optimizer_state_dict": inner} if stage == 3 else {})}
    torch.save({"zero_stage": stage, **common}, folder / "zero" / "optimizer_state.pt")


def _groups_of(options: Mapping[str, Any], ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    step = {"step": options["group_step"]} if "group_step" in options else {}
    return [{"lr": 0.5 + index, **step, "params": list(some)} for index, some in enumerate(ids)]


def _flat(
    rank: int, world_size: int, groups: Groups, state: Mapping[str, Groups], options: Mapping[str, Any]
) -> dict[str, Any]:
    alignment = options.get("alignment", 1)

    def paddings(group: Mapping[str, Tensor]) -> list[int]:
        sizes, at = [], 0
        for index, weight in enumerate(group.values()):
            padding = 0 if index == len(group) - 1 else -(at + weight.numel()) % alignment
            at += weight.numel() + padding
            sizes.append(padding)
        return sizes

    def part(group: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """This rank's part of a flat tensor, and how much of it is padding."""
        pieces = [
            torch.cat([weight.flatten(), torch.full((padding,), 77.0)])
            for weight, padding in zip(group.values(), paddings(group), strict=True)
        ]
        flat = torch.cat(pieces)
        used = flat.numel()
        flat = torch.cat([flat, torch.full((-used % (2 * world_size),), 99.0)])
        size = flat.numel() // world_size
        return flat[rank * size :][:size].clone(), size - min(max(used - rank * size, 0), size)

    parts = [part(group) for group in groups]
    is_lean = options.get("is_lean", True)
    values: dict[int, dict[str, Any]] = {}
    for index in range(len(groups)):
        values[index] = {"step": options["step"]} if "step" in options else {}
        values[index].update({name: part(of_groups[index])[0] for name, of_groups in state.items()})
    return {
        "single_partition_of_fp32_groups": [
            flat[: flat.numel() - padding].clone() if is_lean else flat for flat, padding in parts
        ],
        "base_optimizer_state": {
            "state": values,
            "param_groups": _groups_of(options, [[index] for index in range(len(groups))]),
        },
        "group_paddings": [padding for _, padding in parts],
        **({"param_alignment_paddings": [paddings(group) for group in groups]} if alignment > 1 else {}),
    }


def _stage_3(
    rank: int, world_size: int, groups: Groups, state: Mapping[str, Groups], options: Mapping[str, Any]
) -> dict[str, Any]:
    def part(group: Mapping[str, Tensor]) -> Tensor:
        pieces = []
        for weight in group.values():
            size = -(-weight.numel() // world_size)
            padded = torch.full((size * world_size,), 99.0)
            padded[: weight.numel()] = weight.flatten()
            pieces.append(padded[rank * size :][:size])
        return torch.cat(pieces)

    values: dict[int, dict[str, Any]] = {}
    for index in range(len(groups)):
        values[index] = {"step": options["step"]} if "step" in options else {}
        values[index].update({name: part(of_groups[index]) for name, of_groups in state.items()})
    return {
        "fp32_flat_groups": [part(group) for group in groups],
        "optimizer_state_dict": {
            "state": values,
            "param_groups": _groups_of(options, [[index] for index in range(len(groups))]),
        },
    }
