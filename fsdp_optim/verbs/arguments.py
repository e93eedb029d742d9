"""Checks of arguments that should be a model, an optimizer or a dict, with errors in the words of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.known import wrapper_parts
from fsdp_optim.adapters.shared import shared_tensor
from fsdp_optim.arguments import is_model_name
from fsdp_optim.errors import StateError, WrapperError

_MOST_SHOWN = 60  # characters of a value in an error


def check_model(model: object) -> None:
    """Raise WrapperError unless `model` is a torch.nn.Module, or a list of pipeline stages."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, (list, tuple)):
        _check_stages(model)
        return
    if isinstance(getattr(model, "submod", None), nn.Module):
        raise WrapperError(f"model is {_named(model)}: give its module in a list, as in model=[stage.submod]")
    why = f"model must be a torch.nn.Module, not {_named(model)}"
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        raise WrapperError(f"{why}: the path comes first, as in save(path, model, optim) and load(path, model, optim)")
    if _is_optimizer(model):
        raise WrapperError(f"{why}: the model comes before the optimizer")
    if isinstance(model, Mapping):
        check_models(model)
        raise WrapperError(
            f"{why}: save, async_save, load, resume and CheckpointManager take several models by their names; here give "
            "torch.nn.ModuleDict(models), whose names are the same"
        )
    raise WrapperError(f"{why}: give the wrapped model that the optimizer was built from")


def _check_stages(stages: Sequence[object]) -> None:
    """Raise WrapperError unless these are the pipeline stages of a rank."""
    if not stages:
        raise WrapperError("model is an empty list: give the pipeline stages of this rank, or the model")
    for place, stage in enumerate(stages):
        if isinstance(getattr(stage, "submod", None), nn.Module) and not isinstance(stage, nn.Module):
            raise WrapperError(
                f"stage {place} of model is {_named(stage)}: give its module, as in [stage.submod for stage in stages]"
            )
        if not isinstance(stage, nn.Module):
            raise WrapperError(f"stage {place} of model must be a torch.nn.Module, not {_named(stage)}")
        if any(stage is other for other in stages[:place]):
            raise WrapperError(f"stage {place} of model is in the list twice: give each stage once")


def check_models(models: Mapping[Any, Any]) -> None:
    """Raise WrapperError unless these are models by their names, of which no two share a parameter."""
    if not models:
        raise WrapperError(
            'model is an empty dict: give models by their names, as in {"actor": actor, "critic": critic}'
        )
    if "param_groups" in models or any(isinstance(value, torch.Tensor) for value in models.values()):
        why = f"model must be a torch.nn.Module, not {_named(models)}"
        raise WrapperError(f"{why}: give the model itself, not its state_dict()")
    reserved = {part.lower() for part in wrapper_parts()}
    for name, model in models.items():
        if not is_model_name(name) or name.lower() in reserved:
            raise WrapperError(
                f"{name!r} cannot be the name of a model, which is also the name of its folder: give a name of letters, digits, "
                '"_" and "-", such as "actor", and not one of a checkpoint\'s other folders (extra) or of a wrapper (_orig_mod)'
            )
        try:
            check_model(model)
        except WrapperError as error:
            raise WrapperError(f"the model {name!r}: {error}") from None
    lower = [name.lower() for name in models]
    twice = next((name for name in models if lower.count(name.lower()) > 1), None)
    if twice is not None:
        raise WrapperError(
            f"the names {sorted(models)} differ in upper and lower case alone, and folders may not: rename {twice!r}"
        )
    shared = shared_tensor(models)
    if shared is not None:
        (first, name), (second, other) = shared
        raise WrapperError(
            f"{first}.{name} and {second}.{other} are one tensor, and each model has a folder of its own: save models that share "
            f"parameters as one, as in torch.nn.ModuleDict({{{first!r}: ..., {second!r}: ...}})"
        )


def check_optimizers(optim: object, *, loadable: bool = False) -> None:
    """Raise WrapperError unless `optim` is an optimizer or a list of optimizers.

    `loadable`: an optimizer also needs `load_state_dict()`.
    """
    if isinstance(optim, (list, tuple)):
        if not optim:
            raise WrapperError("optim is an empty list: give at least one optimizer, or None where one may be left out")
        for listed in optim:
            _check_optimizer(listed, loadable=loadable)
    else:
        _check_optimizer(optim, loadable=loadable)


def _check_optimizer(optim: object, *, loadable: bool) -> None:
    if _is_optimizer(optim) and (not loadable or hasattr(optim, "load_state_dict")):
        return
    why = f"optim must be an optimizer, or a list of them, not {_named(optim)}"
    if isinstance(optim, nn.Module):
        raise WrapperError(f"{why}: the optimizer comes after the model")
    if isinstance(optim, Mapping) and "param_groups" in optim:
        raise WrapperError(
            f"{why}: give the optimizer itself, not its state_dict() (a full dict comes after the optimizer)"
        )
    if isinstance(optim, Mapping):
        raise WrapperError(f"{why}: give several optimizers as a list, as in list(optims.values())")
    needed = "param_groups, state_dict() and load_state_dict()" if loadable else "param_groups and state_dict()"
    raise WrapperError(f"{why}: it needs {needed}")


def check_shard(shard: object) -> None:
    """Raise StateError unless `shard` is an optimizer's own dict."""
    fix = "give what get_shard_from_optim_state_dict or scatter_full_optim_state_dict returned"
    if not isinstance(shard, Mapping):
        swapped = ": the optimizer comes before the shard" if _is_optimizer(shard) else f": {fix}"
        raise StateError(f"a shard must be a dict, not {_named(shard)}{swapped}")
    missing = [key for key in ("state", "param_groups") if key not in shard]
    if missing:
        raise StateError(f"this shard has no {' and no '.join(missing)}: {fix}")


def check_full(full: object) -> None:
    """Raise StateError unless `full` is a full dict."""
    if not isinstance(full, Mapping):
        raise StateError(f"a full optimizer state dict is needed here, not {_named(full)}: is this rank a recipient?")
    missing = [key for key in ("state", "param_groups") if key not in full]
    if missing:
        raise StateError(
            f"this is not an optimizer state dict: it has no {' and no '.join(missing)}; give what "
            "gather_full_optim_state_dict returned"
        )


def _is_optimizer(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "param_groups") and hasattr(value, "state_dict")


def _named(value: Any) -> str:
    """Return a value in words: `None`, `the class Adam`, `a str ('run/step-1')`, `a Linear`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    text = f" ({value!r})" if isinstance(value, (str, bytes, int, float)) else ""
    short = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...)"
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}{short}"
