"""verl with this library's checkpoints, by a line of its config:

    actor_rollout_ref.model.external_lib=fsdp_optim.integrations.verl

Each worker imports this module, and the import puts `FsdpOptimCheckpointManager` in the place of the FSDPCheckpointManager that
verl's FSDP and VeOmni engines make. `disable()` puts verl's own back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointError, LoadOptions, SaveHandle, SaveOptions
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.plugins import (
    ResumeProver,
    WhichWeights,
    by_lowest,
    folders_in,
    has_checkpoint,
    has_file,
    is_being_saved,
    is_url,
    random_states,
    replace_text,
    sees,
    set_random_states,
    visible_within,
    waited_for,
)

__all__ = ["FsdpOptimCheckpointManager", "disable", "enable"]

TESTED = "0.9.1"
"""The version of verl that the tests run with."""

_MANAGERS, _MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager", "FSDPCheckpointManager"
_ENGINES = ("verl.workers.engine.fsdp.transformer_impl", "verl.workers.engine.veomni.transformer_impl")

_FOUND = needed(
    "verl",
    TESTED,
    {
        _MANAGERS: (
            *(_MANAGER, "fsdp_version"),
            *(f"{_MANAGER}.{name}" for name in ("load_checkpoint", "save_checkpoint", "register_checkpoint")),
        ),
        "verl.utils.checkpoint.checkpoint_manager": ("BaseCheckpointManager", "get_checkpoint_tracker_filename"),
    },
)
_Own: Any = _FOUND[_MANAGER]

_FOLDER = "huggingface"
"""The folder of the checkpoint: verl has the config and the tokenizer in it, and with the weights it is a pretrained model."""

_SCHEDULER, _RANDOM, _OLD_RANDOM = "lr_scheduler", "random", "fsdp_optim.rng"
"""The names of the schedule and of each rank's random states in a checkpoint; the last one: in those of older versions."""

_LOADER = "data.pt"
"""The state of the data loader, which verl's PPO trainers write when all roles have begun to save."""

_PROVE, _VIEWS = "FSDP_OPTIM_PROVE", "FSDP_OPTIM_VIEWS"
_PATIENCE = 90.0  # seconds for that file; clients of network file systems may keep for 60 that it is not there

log = logging.getLogger("fsdp_optim")


class FsdpOptimCheckpointManager(_Own):
    """verl's checkpoint manager on this library: the same calls, options and folders; other files.

    `global_step_8/actor/huggingface` is a checkpoint that loads on any number of ranks, and that `from_pretrained` opens.
    With `checkpoint.async_save` it is written while training continues. verl's config has no place for an option of its own, so
    the environment variable FSDP_OPTIM_PROVE of the workers asks for proofs of resumes: "1", or "raise" (`CheckpointManager`).
    FSDP_OPTIM_VIEWS asks for canonical names: "hub" or "hooks" (`CallOptions.views`).
    """

    _views: Any = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._finisher: threading.Thread | None = None
        asked = os.environ.get(_PROVE, "")
        self._views = os.environ.get(_VIEWS) or ()
        self.prover = ResumeProver(
            "raise" if asked == "raise" else asked == "1", options=CallOptions(views=self._views)
        )

    # ------------------------------------------------------------------------------------------ save

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the parts that `save_contents` lists into `local_path`, and also to `hdfs_path`, if that is a URL."""
        if local_path is None:
            return
        self.wait()
        self.previous_global_step = global_step
        given: dict[str, Any] = {
            "state": self._state() if self.should_save_extra else None,
            "step": global_step,
            "weights": self._weights_to_save(),
            "overwrite": True,  # of the same step, which a run that went back reaches again
            "options": SaveOptions(views=self._views),
        }
        optim = self.optimizer if self.should_save_optimizer else None
        places = [f"{path}/{_FOLDER}" for path in (local_path, hdfs_path) if path]
        if not self._writes_in_background(local_path):
            for place in places:
                fsdp_optim.save(place, self.model, optim, **given)
            self._prove_later(places, global_step)
            if self.rank == 0:
                self._finish(local_path, max_ckpt_to_keep)
            return
        handles = [fsdp_optim.async_save(place, self.model, optim, **given) for place in places]
        self._prove_later(places, global_step, handles[0])
        if self.rank == 0:
            # No daemon, so that the process does not end before the config is written beside the weights.
            self._finisher = threading.Thread(
                target=self._finish_later, args=(handles, local_path, global_step, max_ckpt_to_keep)
            )
            self._finisher.start()

    def _prove_later(self, places: Sequence[str], step: int, handle: SaveHandle | None = None) -> None:
        """Record the optimizer's next step beside the checkpoint, where that is asked for."""
        if self.should_save_optimizer and self.optimizer is not None:
            self.prover.saved(places[0], self.model, self.optimizer, step, state=self._schedule(), handle=handle)

    def wait(self) -> None:
        """Wait until this rank has done all of the save in the background. All ranks call it, and get its error."""
        finisher, self._finisher = self._finisher, None
        if finisher is not None:
            finisher.join()
        fsdp_optim.wait_for_saves()

    def _weights_to_save(self) -> WhichWeights:
        if not (self.should_save_model or self.should_save_hf_model):
            if not self.should_save_optimizer:
                raise CheckpointError(
                    f"save_contents is {list(self.checkpoint_save_contents)}: it needs 'model', 'hf_model' or 'optimizer'"
                )
            return "none"
        return "trainable" if self.should_save_lora_only and hasattr(self._unwrapped, "peft_config") else "all"

    def _writes_in_background(self, local_path: str) -> bool:
        config = self.checkpoint_config
        if config is None or not config.get("async_save", False):
            return False
        if _step_of(local_path) is None:
            return True
        if self.rank == 0:
            log.warning(
                "async_save: verl's SFT trainer names a checkpoint in its tracker file as soon as the save returns, so "
                "%s is written before that",
                local_path,
            )
        return False

    def _finish_later(
        self, handles: Sequence[SaveHandle], local_path: str, step: int, max_ckpt_to_keep: int | None
    ) -> None:
        """The steps after the manifest, in a thread of rank 0."""
        try:
            for handle in handles:
                handle.wait()
            self._finish(local_path, max_ckpt_to_keep)
            write_tracker(local_path, step)
        except Exception:
            log.exception("%s was not finished, so the tracker file does not name it", local_path)

    def _finish(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Write the small files beside the weights, and remove older checkpoints."""
        place = f"{local_path}/{_FOLDER}"
        model = self._unwrapped
        if not is_url(local_path):
            _save_config(model, place)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(place)
            about = {"FSDP_version": _FOUND["fsdp_version"](self.model), "world_size": self.world_size}
            replace_text(f"{local_path}/fsdp_config.json", json.dumps(about, indent=4))
            self._save_lora_train_meta(local_path, model)  # of verl's own manager
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    @property
    def _unwrapped(self) -> Any:
        """The model without FSDP1's wrapper."""
        return self.model.module if _FOUND["fsdp_version"](self.model) == 1 else self.model

    def _state(self) -> dict[str, Any]:
        """What is saved besides the model and the optimizer."""
        return {**self._schedule(), _RANDOM: fsdp_optim.per_rank(_RandomStates())}

    def _schedule(self) -> dict[str, Any]:
        return {_SCHEDULER: self.lr_scheduler} if self.lr_scheduler is not None else {}

    # ------------------------------------------------------------------------------------------ load

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load the parts that `load_contents` lists, on any number of ranks.

        verl's own manager loads its own checkpoints at the number of ranks that they have; this library does at any other.

        `del_local_after_load` removes verl's local copies of remote files; here each rank reads remote files in place.
        """
        path = local_path if local_path is not None else hdfs_path
        if path is None:
            return
        self.wait()
        place = f"{path}/{_FOLDER}"
        if by_lowest("whose checkpoint it is", lambda: _is_verls_own(path)):
            if by_lowest("by how many ranks", lambda: has_file(path, f"model_world_size_{self.world_size}_rank_0.pt")):
                super().load_checkpoint(path, hdfs_path, del_local_after_load)
            else:
                self._load_verls_own(path)
            return
        weights: WhichWeights = "none"
        if self.should_load_model or self.should_load_hf_model:
            weights = "all"
            if hasattr(self._unwrapped, "peft_config"):
                weights = by_lowest("the weights", lambda: _weights_in(place))
        optim = self.optimizer if self.should_load_optimizer else None
        model = self.model if weights != "none" or optim is not None else None
        options = LoadOptions(views=self._views)
        loaded = fsdp_optim.load(
            place, model, optim, state=self._state_to_load(place), weights=weights, options=options
        )
        if self.should_load_extra and _OLD_RANDOM in loaded.state:
            set_random_states(loaded.state[_OLD_RANDOM])
        if optim is not None and weights != "none" and loaded.step is not None:
            self.prover.resumed(place, self.model, optim, loaded.step, state=self._schedule())

    def _load_verls_own(self, path: str) -> None:
        """Load a checkpoint that verl's own manager has written on another number of ranks. Random states stay as they are."""
        weights: WhichWeights = "all" if self.should_load_model else "none"
        if self.should_load_model and hasattr(self._unwrapped, "peft_config"):
            names = by_lowest("the weights", lambda: list(fsdp_optim.inspect(path).model))
            weights = "all" if any("lora_" not in name for name in names) else "trainable"
        optim = self.optimizer if self.should_load_optimizer else None
        model = self.model if weights != "none" or optim is not None else None
        state = fsdp_optim.load(path, model, optim, weights=weights, options=LoadOptions(views=self._views)).state
        if self.should_load_extra and self.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _state_to_load(self, place: str) -> dict[str, Any]:
        """Return what gets the schedule and the random states of this rank, under the names that the checkpoint has.

        The load takes them together with the model on all ranks, or on none. The random states of older versions, whose name is
        the library's own now, are set afterwards.
        """
        names = by_lowest("the names of the state", lambda: sorted(fsdp_optim.load(place).state))
        state: dict[str, Any] = {name: None for name in names if name != _OLD_RANDOM}
        if not self.should_load_extra:
            return state
        if self.lr_scheduler is not None and _SCHEDULER in state:
            state[_SCHEDULER] = self.lr_scheduler
        elif self.lr_scheduler is not None and self.rank == 0:
            log.warning("%s has no %s, so the schedule stays as it is", place, _SCHEDULER)
        if _RANDOM in state:
            state[_RANDOM] = fsdp_optim.per_rank(_RandomStates())
        elif _OLD_RANDOM not in names and self.rank == 0:  # a rank that is new keeps its own, which the load says
            log.warning("%s has no random states, so they stay as they are", place)
        return state


class _RandomStates:
    """The random states of this rank, as an object whose state a load sets."""

    def state_dict(self) -> dict[str, Any]:
        return random_states()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_random_states(state)

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        """Each rank gets the states of the same index; a new rank keeps its own, so that no two ranks draw the same numbers."""
        return [states[rank] if rank < len(states) else None for rank in range(world_size)]


def _is_verls_own(path: str) -> bool:
    """Whether verl's own manager has written a checkpoint."""
    return not is_url(path) and not has_checkpoint(f"{path}/{_FOLDER}") and has_file(path, "fsdp_config.json")


def _weights_in(place: str) -> WhichWeights:
    return "trainable" if fsdp_optim.inspect(place).weights == "trainable" else "all"


def write_tracker(local_path: str, step: int) -> None:
    """Name this step in verl's tracker file, when every role and the data loader are saved. Raises CheckpointError.

    verl's trainers leave it to the managers if `async_save` is set. Each role that finds all others ready writes the file, which
    has the same text then. A role that ends while others are saved leaves the file to them; the last one finds them ready,
    because it looks until a network file system must have shown their manifests.
    """
    step_folder, _, _ = local_path.rstrip("/").rpartition("/")
    if _step_of(step_folder) is None or is_url(local_path):
        return
    if not waited_for(lambda: sees(Path(step_folder, _LOADER)), _PATIENCE):
        log.warning(
            "%s has no %s after %.0f s: a run that resumes from it has no loader state", step_folder, _LOADER, _PATIENCE
        )
    if waited_for(lambda: set(_roles(step_folder, step)) <= {"ready"}, visible_within(step_folder)) or (
        "saving" not in _roles(step_folder, step)  # others are saved by verl's own manager, which has ended
    ):
        replace_text(_FOUND["get_checkpoint_tracker_filename"](step_folder.rpartition("/")[0]), str(step))


def _roles(step_folder: str, step: int) -> list[Literal["ready", "saving", "unknown"]]:
    """How far the roles are that save into the folder of a step, as far as this machine can see."""
    return [_state_of(f"{step_folder}/{role}", step) for role in folders_in(step_folder)]


def _state_of(role: str, step: int) -> Literal["ready", "saving", "unknown"]:
    with contextlib.suppress(CheckpointError):  # it cannot be read just now
        if is_being_saved(f"{role}/{_FOLDER}"):
            return "saving"
        if not has_checkpoint(f"{role}/{_FOLDER}"):
            return "unknown"
        if fsdp_optim.inspect(f"{role}/{_FOLDER}").step == step:
            return "ready"
    return "saving"


def _step_of(path: str) -> int | None:
    """The step of a folder `global_step_8`; None for a folder of another name."""
    match = re.fullmatch(r"global_step_(\d+)", path.rstrip("/").rpartition("/")[2])
    return int(match.group(1)) if match else None


def _save_config(model: nn.Module, place: str) -> None:
    """Write the config, the config of generation, and the code of a model that is not part of transformers."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(place)
    auto_map = getattr(config, "auto_map", None)
    if auto_map is not None and None in auto_map:
        config.auto_map = {name: value for name, value in auto_map.items() if name is not None}
    config.save_pretrained(place)
    if auto_map is not None:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        needed("transformers", "5.23.0", {"transformers.dynamic_module_utils": ("custom_object_save",)})[
            "custom_object_save"
        ](base, place, config=config)


def enable() -> None:
    """Put this manager in the place of verl's, also in engines that are imported already. The import of this module does it."""
    _bind(_Own, FsdpOptimCheckpointManager)


def disable() -> None:
    """Put verl's own manager back."""
    _bind(FsdpOptimCheckpointManager, _Own)


def _bind(old: type, new: type) -> None:
    for name in (_MANAGERS, *_ENGINES):
        module = sys.modules.get(name)
        if module is not None and getattr(module, _MANAGER, None) is old:
            setattr(module, _MANAGER, new)


enable()
