"""`Accelerator.save_state` and `Accelerator.load_state` with this library's checkpoints."""

from __future__ import annotations

import copy
import importlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.integrations.common.patches import status_in
from fsdp_optim.integrations.hugging_face import signs
from fsdp_optim.integrations.hugging_face.folders import is_outdated, look_at, optimizers_inside, remove_older
from fsdp_optim.integrations.hugging_face.proofs import number_of, prover_of
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import TrainerFolder, absolute, by_lowest, folders_by_number, wait_on_all

_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
_NAMED = re.compile(r"checkpoint_(\d+)")
_OPTIMIZER = "optimizer.bin"  # where Accelerate by itself looks for the first optimizer

log = logging.getLogger("fsdp_optim")


def save_state(
    original: Callable[..., Any],
    accelerator: Any,
    settings: Settings,
    output_dir: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Save the prepared models and optimizers with this library, and everything else with Accelerate."""
    if not _is_handled(accelerator):
        return original(output_dir, *args, **kwargs)
    naming, options = accelerator.project_configuration, settings.saving()
    is_automatic = naming.automatic_checkpoint_naming
    if is_automatic:
        path = by_lowest("the name of a checkpoint", lambda: _next_folder(accelerator), options)
    else:
        path = str(absolute(output_dir))
    model, optims = _prepared(accelerator)
    save = TrainerFolder.begin(path, options, is_outdated=is_outdated)
    with save.writing(), status_in(naming, automatic_checkpoint_naming=False), _without_models():
        original(save.files, *args, **kwargs)
        if accelerator.is_main_process and len(accelerator._models) == 1:
            write_config(accelerator.unwrap_model(accelerator._models[0]), str(save.files))
        if accelerator.is_main_process and accelerator._optimizers:
            save.write(_OPTIMIZER, signs.sign("accelerator.load_state()"))
    handle = save.commit(model, optims, background=settings.background)
    prover_of(accelerator, settings).saved(path, model, optims, number_of(path), handle=handle)
    if is_automatic and naming.total_limit is not None:
        wait_on_all(options)
        limit, reason = max(naming.total_limit, 1), f"total_limit={naming.total_limit}"
        by_lowest("total_limit", lambda: remove_older(Path(path), _NAMED, limit, reason), options)
    return Path(path)


def load_state(
    original: Callable[..., Any], accelerator: Any, settings: Settings, input_dir: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Load a checkpoint of `save_state`, or a sharded folder of Accelerate. Accelerate's own function loads its other folders."""
    is_automatic = accelerator.project_configuration.automatic_checkpoint_naming
    wait_on_all(settings.saving())
    path = input_dir
    if input_dir is None and is_automatic:
        path = by_lowest("the newest checkpoint", lambda: _newest_folder(accelerator), settings.saving())
    if path is None or not _is_read_here(accelerator, str(absolute(path)), settings):
        return original(path, *args, **kwargs)
    path = str(absolute(path))
    model, optims = _prepared(accelerator)
    fsdp_optim.load(path, model, optims, strict=kwargs.get("strict", True), options=settings.loading())
    with _without_models():
        loaded = original(path, *args, **kwargs)
    prover_of(accelerator, settings).resumed(path, model, optims, number_of(path))
    return loaded


def _is_read_here(accelerator: Any, path: str, settings: Settings) -> bool:
    is_one = len(accelerator._models) == 1 and len(accelerator._optimizers) <= 1
    kind = look_at(path, settings, with_optim=bool(accelerator._optimizers)).kind
    return kind == "ours" or (kind == "sharded" and is_one)


def end_training(original: Callable[..., Any], accelerator: Any, settings: Settings) -> Any:
    """Wait for the save in the background before Accelerate ends the process group, and raise the error of the save."""
    try:
        fsdp_optim.wait_for_saves()
    finally:
        original()


def write_config(model: Any, folder: str) -> None:
    """Write the configuration of a model of transformers, so that `from_pretrained` opens the folder."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


def _is_handled(accelerator: Any) -> bool:
    kind = accelerator.distributed_type.name
    has_hooks = bool(accelerator._save_model_state_pre_hook) and kind != "FSDP"
    if has_hooks:
        log.info("hooks of register_save_state_pre_hook save the models, so Accelerate's own function saves this state")
    on_each_node = accelerator.project_configuration.save_on_each_node
    return kind not in _OTHER_ENGINES and bool(accelerator._models) and not on_each_node and not has_hooks


def _prepared(accelerator: Any) -> tuple[nn.Module, Any]:
    """The prepared models as one, and their optimizers."""
    models = list(accelerator._models)
    model = (
        models[0] if len(models) == 1 else nn.ModuleDict({f"model_{i}": wrapped for i, wrapped in enumerate(models)})
    )
    return model, optimizers_inside(accelerator._optimizers)


def _without_models() -> Any:
    """Accelerate's functions, which neither save nor load models and optimizers inside the block."""
    module = importlib.import_module("accelerate.accelerator")

    def save(folder: Any, models: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        return save_others(folder, [], [], *args, **kwargs)

    def load(folder: Any, models: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        return load_others(folder, [], [], *args, **kwargs)

    save_others, load_others = module.save_accelerator_state, module.load_accelerator_state
    return status_in(
        module,
        save_accelerator_state=save,
        load_accelerator_state=load,
        **dict.fromkeys(("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer"), _nothing),
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A stand-in for a function of Accelerate whose work this library does."""


def _root_of(accelerator: Any) -> Path:
    return absolute(Path(accelerator.project_dir, "checkpoints"))


def _next_folder(accelerator: Any) -> str:
    path = _root_of(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if any(folder == path for _, folder in folders_by_number(path.parent, _NAMED)):
        raise CheckpointError(
            f"{path}: already exists: give accelerator.project_configuration.iteration the number of the next checkpoint"
        )
    return str(path)


def _newest_folder(accelerator: Any) -> str | None:
    folders = folders_by_number(_root_of(accelerator), _NAMED)
    return str(folders[-1][1]) if folders else None
