"""torchtitan with this library's checkpoints, chosen by the config of the trainer:

    from fsdp_optim.integrations.torchtitan import FsdpOptimCheckpointManager

    def my_llama3() -> Trainer.Config:  # a function of a config registry, as for `--module my_module --config my_llama3`
        config = llama3_8b()
        config.checkpoint = FsdpOptimCheckpointManager.Config(enable=True, interval=500, async_mode="async")
        return config

The options are those of torchtitan's own manager.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import fsdp_optim
from fsdp_optim import (
    CheckpointError,
    CheckpointManager,
    LoadOptions,
    ManagerOptions,
    SaveOptions,
    StateError,
    per_rank,
)
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.torchtitan_state import TrainState, Unloaded, loader_state
from fsdp_optim.plugins import by_lowest, copy_beside, is_url, make_folder, remove_checkpoint

__all__ = ["FsdpOptimCheckpointManager"]

TESTED = "0.3.0"
"""The version of torchtitan that the tests run with."""

_FOUND = needed(
    "torchtitan",
    TESTED,
    {
        "torchtitan.components.checkpointer.base": (
            *("BaseCheckpointManager", "ModelWrapper"),
            *("DATALOADER", "LR_SCHEDULER", "MODEL", "OPTIMIZER", "TRAIN_STATE"),
        ),
        "torchtitan.config": ("TORCH_DTYPE_MAP",),
        "torchtitan.tools.filesystem": ("join",),
    },
)
_Base: Any = _FOUND["BaseCheckpointManager"]
_ModelWrapper = _FOUND["ModelWrapper"]
_DATALOADER, _LR_SCHEDULER, _MODEL = _FOUND["DATALOADER"], _FOUND["LR_SCHEDULER"], _FOUND["MODEL"]
_OPTIMIZER, _TRAIN_STATE = _FOUND["OPTIMIZER"], _FOUND["TRAIN_STATE"]

_PER_RANK = (_TRAIN_STATE, _DATALOADER)
"""The values that each rank has for itself: its part of the data, and the number of tokens that it has seen."""

_HF, _WEIGHTS = "hf", "weights"
"""Folders beside the checkpoints: weights as Hugging Face names them, and weights alone under torchtitan's names."""

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")

log = logging.getLogger("fsdp_optim")


class FsdpOptimCheckpointManager(_Base):
    """torchtitan's checkpoint manager on `fsdp_optim.CheckpointManager`. A config builds it; the trainer makes all calls.

    `folder/step-00001000` is a checkpoint that loads at any world size and in any parallelism. `folder/hf/step-1000` has the
    weights as `from_pretrained` opens them, if the model has a state dict adapter. `folder/weights/step-1000` has weights alone:
    those of the last step (`last_save_model_only`) and a seed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The options of all of torchtitan's checkpoint managers, and some more."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Write in the background. Both kinds of it copy the state to (pinned) host memory, and then continue."""

        hf_weights: bool = True
        """Whether each save writes the weights as Hugging Face names them too, where the model has an adapter."""

        on_damage: Literal["error", "previous"] = "error"
        """Whether a damaged newest checkpoint is an error, or the one before it is loaded."""

        on_replica_mismatch: Literal["error", "lowest_rank"] = "error"
        """Whether replicas that differ are an error, or those of the lowest rank are saved."""

        durable: bool = True
        """Whether a checkpoint is complete only when it is on the disk."""

        views: Literal["hooks", "no"] = "hooks"
        """Whether fused parameters and their moments are saved under the names of torchtitan's own files (`wq`, `wk`, `wv` for
        `wqkv`), so that a run resumes with the fusion on and off; "no" keeps the live names."""

        prove: Literal["no", "yes", "raise"] = "no"
        """Whether the step after each checkpoint is recorded beside it, and a run that resumes compares its own."""

        def __post_init__(self) -> None:
            """Check the values, and refuse the options that are not supported."""
            _Base.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise ValueError(f"Invalid async_mode: {self.async_mode}")
            if self.initial_load_in_hf_quantized:
                raise ValueError(
                    "initial_load_in_hf_quantized is not supported by FsdpOptimCheckpointManager: make a seed checkpoint by "
                    "torchtitan's CheckpointManager, and load it by initial_load_path"
                )
            if _OPTIMIZER in self.exclude_from_loading:
                raise ValueError(
                    f"exclude_from_loading: {_OPTIMIZER!r} is not supported by FsdpOptimCheckpointManager: to begin with the "
                    "weights alone, give initial_load_path with initial_load_model_only, and another folder"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf is True, but sd_adapter is not provided.")
        self.folder = _FOUND["join"](base_folder, config.folder)
        self.states = states
        self.states.update({_OPTIMIZER: optimizers, _DATALOADER: dataloader, _LR_SCHEDULER: lr_schedulers})
        unknown = [key for key in config.exclude_from_loading if key not in self.states]
        if unknown:
            raise ValueError(f"{unknown[0]} not found in state_dict.")
        self._config, self._adapter = config, sd_adapter
        self._weights = _ModelWrapper(model_parts)
        parts: Any = model_parts
        self._model = parts[0] if len(parts) == 1 else parts
        self._optimizers = [*optimizers.optimizers]
        self._group = dist.group.WORLD if dist.is_initialized() else None
        by_rank = {_TRAIN_STATE: TrainState, _DATALOADER: loader_state}
        self._objects = {
            key: by_rank[key](component) if key in by_rank else component
            for key, component in states.items()
            if component is not None and key not in (_MODEL, _OPTIMIZER)
        }
        kept = {
            key: Unloaded(component) if key in config.exclude_from_loading else component
            for key, component in self._objects.items()
        }
        views: Any = "hooks" if config.views == "hooks" else ()
        self._call = LoadOptions(process_group=self._group, views=views)
        self._saving = SaveOptions(
            process_group=self._group, durable=config.durable, on_replica_mismatch=config.on_replica_mismatch
        )
        self._manager = CheckpointManager(
            self.folder,
            self._model,
            self._optimizers,
            state={key: per_rank(value) if key in _PER_RANK else value for key, value in kept.items()},
            keep_last=config.keep_latest_k or None,
            prove="raise" if config.prove == "raise" else config.prove == "yes",
            options=ManagerOptions(
                process_group=self._group,
                durable=config.durable,
                on_replica_mismatch=config.on_replica_mismatch,
                views=views,
                signals=(),
            ),
        )

    # ------------------------------------------------------------------------------------------ save

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        if config.prove != "no":
            self._manager.step(
                curr_step
            )  # where the step that follows a checkpoint is compared; it saves nothing by itself
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        self.maybe_wait_for_saving()
        if last_step and (config.last_save_model_only or curr_step == 0):
            self._save_last(curr_step)
            return True
        if config.hf_weights and self._adapter is not None:
            self._save_hf(curr_step, self._weights.state_dict())
            by_lowest("retention", self._remove_older_hf)
        self._manager.save(curr_step)
        self.save_future = _Background(self._manager)
        if last_step or config.async_mode == "disabled":
            self._wait_for_saving()
        return True

    def _save_last(self, step: int) -> None:
        """Save weights alone, in the dtype for export."""
        dtype = _FOUND["TORCH_DTYPE_MAP"][self._config.export_dtype]
        tensors = {name: _cast(value, dtype) for name, value in self._weights.state_dict().items()}
        if step and (self._config.last_save_in_hf or (self._config.hf_weights and self._adapter is not None)):
            self._save_hf(step, tensors)
        if not step or not self._config.last_save_in_hf:
            self._save_tensors(f"{self.folder}/{_WEIGHTS}/step-{step}", step, tensors)

    def _save_hf(self, step: int, tensors: Mapping[str, Any]) -> None:
        """Save weights in the names and shapes of Hugging Face, and the model's config beside them."""
        place = f"{self.folder}/{_HF}/step-{step}"
        self._save_tensors(place, step, self._adapter.to_hf(dict(tensors)))
        assets = getattr(self._adapter, "hf_assets_path", None)
        if assets and not is_url(place):
            by_lowest("assets", lambda: copy_beside(assets, place, without=_WEIGHT_FILES))

    def _remove_older_hf(self) -> None:
        """Remove the oldest exports until `keep_latest_k` are left. Called on one rank."""
        limit = self._config.keep_latest_k
        complete = [info for info in fsdp_optim.checkpoints(f"{self.folder}/{_HF}") if info.complete]
        for info in complete[limit:] if limit else ():
            remove_checkpoint(info.path, f"keep_latest_k={limit}")

    def _save_tensors(self, place: str, step: int, tensors: Mapping[str, Any]) -> None:
        fsdp_optim.save(
            place,
            module_of(tensors),
            step=step,
            overwrite=True,  # of the same step, which a run that went back reaches again
            options=self._saving,
        )

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._manager.wait()

    def _maybe_wait_for_staging(self) -> None:
        """The state was copied when the save returned."""

    def _close(self) -> None:
        error = sys.exc_info()
        if not hasattr(self, "_manager"):
            return
        if error[0] is None:
            self._manager.close()
        else:  # the trainer closes after an error, which other ranks may not have
            self._manager.__exit__(*error)

    # ------------------------------------------------------------------------------------------ load

    def _load(self, step: int = -1) -> bool:
        if step > 0:
            self._manager.rollback(step)
            return True
        if not is_url(self.folder):  # in torchtitan's dump folder, which a run that begins may not have yet
            by_lowest("the folder of the checkpoints", lambda: make_folder(self.folder))
        if step == -1 and self._manager.resume(on_damage=self._config.on_damage):
            return True
        seed = f"{self.folder}/{_WEIGHTS}/step-0"
        if by_lowest("the seed", lambda: _has_seed(f"{self.folder}/{_WEIGHTS}")):
            self._load_weights(seed)
            return True
        if step == 0:
            raise FileNotFoundError(f"--checkpoint.load_step=0 not found at {seed}")
        return self._load_initial()

    def _load_initial(self) -> bool:
        """Load the initial checkpoint of the config. Returns whether there is one."""
        config = self._config
        place = config.initial_load_path
        if config.initial_load_in_hf:
            place = place or getattr(self._adapter, "hf_assets_path", None)
            if self._adapter is None or not place:
                raise ValueError("initial_load_in_hf needs a model with a state dict adapter, and a folder to load")
            self._load_hf(place)
        elif place and config.initial_load_model_only:
            self._load_weights(place)
        elif place:
            self._load_everything(place)
        return bool(place)

    def _load_weights(self, place: str) -> None:
        """Load weights that are under the names of parameters or, where a module joins parameters, of its state dict."""
        if self._call.views:
            fsdp_optim.load(place, self._model, options=replace(self._call, cast=True))
            return
        tensors = self._weights.state_dict()
        own = {name for part in self._weights.model for name, _ in part.named_parameters()}
        saved = set(by_lowest("names of weights", lambda: sorted(fsdp_optim.inspect(place).model)))
        if set(tensors) >= own or saved >= own:
            fsdp_optim.load(place, self._model, options=replace(self._call, cast=True))
            return
        self._load_tensors(place, tensors)
        self._weights.load_state_dict(tensors)

    def _load_hf(self, place: str) -> None:
        tensors = self._adapter.to_hf(self._weights.state_dict())
        self._load_tensors(place, tensors)
        self._weights.load_state_dict(self._adapter.from_hf(tensors))

    def _load_tensors(self, place: str, tensors: Mapping[str, Any]) -> None:
        """Load into these tensors. Other tensors of the checkpoint are passed over."""
        options = replace(self._call, cast=True)
        missing = fsdp_optim.load(place, module_of(tensors), strict=False, options=options).missing_keys
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{place}: does not have {missing[0]}{more}, which the model needs")

    def _load_everything(self, place: str) -> None:
        """Load a checkpoint of this manager, or of torchtitan's own, to continue from it in a new folder."""
        result = fsdp_optim.load(place, self._model, self._optimizers, options=self._call)
        values, num_ranks = dict(result.state), dist.get_world_size() if dist.is_initialized() else 1
        for key, part in self._objects.items():
            if key in self._config.exclude_from_loading:
                continue
            if key in _PER_RANK and result.all_ranks and result.world_size != num_ranks:
                states = part.reshard([of_rank[key] for of_rank in result.all_ranks], num_ranks)
                values[key] = states[dist.get_rank() if dist.is_initialized() else 0]
            if key not in values:
                raise StateError(
                    f"{place}: has no {key}: give exclude_from_loading=[{key!r}], or initial_load_model_only"
                )
            part.load_state_dict(values[key])


class _Background(Future[None]):
    """The save in the background, as torchtitan looks at it."""

    def __init__(self, manager: CheckpointManager) -> None:
        super().__init__()
        self._manager = manager

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save on all ranks, and raise its error."""
        self._manager.wait()


def module_of(tensors: Mapping[str, Any]) -> nn.Module:
    """A module with these tensors as its parameters, without copies. Values that are no tensors are left out."""
    root = nn.Module()
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            continue
        *path, leaf = name.split(".")
        module = root
        for part in path:
            children = dict(module.named_children())
            if part not in children:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(value.detach(), requires_grad=False))
    return root


def _has_seed(folder: str) -> bool:
    return any(entry.complete and entry.step == 0 for entry in fsdp_optim.checkpoints(folder))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other else value
