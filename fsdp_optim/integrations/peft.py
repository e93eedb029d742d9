"""PEFT: adapters, with their optimizer, in folders that `PeftModel.from_pretrained` opens.

    from fsdp_optim.integrations import peft as fsdp_peft

    fsdp_peft.save("run/step-100", model, optim, step=100)     # a PeftModel, wrapped or not
    fsdp_peft.load("run/step-100", model, optim)               # at any world size

The folder is a checkpoint of this library whose weights are in `adapter_model.safetensors`, under the names that PEFT gives them,
with `adapter_config.json` beside. Tested with peft 0.21.2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions, LoadResult, SaveHandle, SaveOptions, SaveResult, StateError, View, WrapperError
from fsdp_optim.integrations.common.needed import refusal
from fsdp_optim.plugins import OnDamage, Optimizers, OwnFormat, WhichWeights, clean_name, module_inside

__all__ = ["async_save", "load", "resume", "save"]

TESTED = "0.21.2"
"""The version of PEFT that the tests run with. Others are tried."""

try:
    from peft import PeftModel, get_peft_model_state_dict
except ImportError as error:
    raise refusal("peft", TESTED, f"a name ({error})") from error

_NOT_HERE = frozenset({"rename", "max_file_size"})
"""Options of save that PEFT's files leave no choice about."""

_SAVE, _LOAD = SaveOptions(), LoadOptions()

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model"
_ONE_FILE = 1 << 62  # bytes: PEFT reads one file of weights


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None = None,
    *,
    adapter: str = "default",
    base: bool = False,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    options: SaveOptions = _SAVE,
) -> SaveResult:
    """Save an adapter and its optimizer in a folder that `PeftModel.from_pretrained(base_model, path)` opens.

    Called by all ranks of the model. Only trained parameters are written: the adapter's, and those of the base that require
    gradients.

    Args:
        path: as for `fsdp_optim.save`.
        model: a PeftModel, or a wrapper around one: FSDP2, FSDP1 with use_orig_params=True, DistributedDataParallel.
        optim: as for `fsdp_optim.save`; None: without an optimizer.
        adapter: the name of the adapter in the model. The files do not have it, as PEFT's do not.
        base: write the weights of the base too, into the same file. `from_pretrained` then loads these into its base model.
        state, step, overwrite: as for `fsdp_optim.save`.
        options: a `SaveOptions` without `rename` and `max_file_size`, which PEFT's files set.

    Raises (the same on all ranks, beside the errors of `fsdp_optim.save`):
        WrapperError: the model is not a PeftModel, or its wrapper hides the names of its parameters.
        StateError: the model has no such adapter, or the adapter is frozen, or has values that PEFT makes at the save.
    """
    weights, options, format = _save_options(model, adapter, base, options)
    return fsdp_optim.save(
        path,
        model,
        optim,
        state=state,
        step=step,
        overwrite=overwrite,
        weights=weights,
        format=format,
        options=options,
    )


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers | None = None,
    *,
    adapter: str = "default",
    base: bool = False,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    options: SaveOptions = _SAVE,
) -> SaveHandle:
    """As `save`, but returns when the state is copied to host memory, as `fsdp_optim.async_save` does.

    Args:
        path, model, optim, adapter, base, state, step, overwrite, options: as for `save`.

    Returns:
        A handle, whose `wait()` ends when the folder is complete, and raises the error of the save.
    """
    weights, options, format = _save_options(model, adapter, base, options)
    return fsdp_optim.async_save(
        path,
        model,
        optim,
        state=state,
        step=step,
        overwrite=overwrite,
        weights=weights,
        format=format,
        options=options,
    )


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Any = None,
    *,
    adapter: str = "default",
    base: bool = False,
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    options: LoadOptions = _LOAD,
) -> LoadResult:
    """Load an adapter and its optimizer from such a folder, at any world size. Called by all ranks of the model.

    Args:
        path: a folder of `save`, or, without an optimizer, `adapter_model.safetensors` of a folder that PEFT has written.
        model, optim: as for `save`.
        adapter: the name of the adapter in this model; it may have had another name at the save.
        base: load the weights of the base too, from a folder of `save(..., base=True)`. False: the base stays as it is.
        state, strict: as for `fsdp_optim.load`.
        options: a `LoadOptions` without `rename`.

    Returns:
        As `fsdp_optim.load`.

    Raises (the same on all ranks, before anything is changed):
        FsdpOptimError: the errors of `fsdp_optim.load`, and of the model as `save` has them.
    """
    weights, options = _load_options(model, adapter, base, options)
    return fsdp_optim.load(path, model, optim, state=state, strict=strict, weights=weights, options=options)


def resume(
    root: str | os.PathLike[str],
    model: nn.Module,
    optim: Any = None,
    *,
    adapter: str = "default",
    base: bool = False,
    state: Mapping[str, Any] | None = None,
    on_damage: OnDamage = "error",
    strict: bool = True,
    options: LoadOptions = _LOAD,
) -> LoadResult | None:
    """Load the newest of such folders in a folder, as `fsdp_optim.resume` does; None where there is none.

    Args:
        root: the folder in which `save` has written its folders.
        model, optim, adapter, base, state, strict, options: as for `load`.
        on_damage: as for `fsdp_optim.resume`.
    """
    weights, options = _load_options(model, adapter, base, options)
    return fsdp_optim.resume(
        root, model, optim, state=state, on_damage=on_damage, strict=strict, weights=weights, options=options
    )


def _save_options(
    model: nn.Module, adapter: str, base: bool, options: SaveOptions
) -> tuple[WhichWeights, SaveOptions, OwnFormat]:
    """The weights and options of a save, and the files that PEFT expects."""
    _refuse(options, _NOT_HERE)
    names = AdapterNames.of(model, adapter)
    names.check_views(options.views)
    if not base:
        names.check_trains(model, adapter)
    beside = ((_CONFIG, _config_of(_peft_model(model, adapter), adapter)),)
    options = replace(options, rename=names.key_of, max_file_size=_ONE_FILE)
    return "all" if base else "trainable", options, OwnFormat(_WEIGHTS, beside)


def _load_options(model: nn.Module, adapter: str, base: bool, options: LoadOptions) -> tuple[WhichWeights, LoadOptions]:
    _refuse(options, {"rename"})
    names = AdapterNames.of(model, adapter)
    names.check_views(options.views)
    return "all" if base else "trainable", replace(options, rename=names.fqn_of)


def _refuse(options: SaveOptions | LoadOptions, set_here: Set[str]) -> None:
    """Raise TypeError for options that are given and that PEFT's files leave no choice about."""
    wrong = [
        option.name
        for option in fields(options)
        if option.name in set_here and getattr(options, option.name) != option.default
    ]
    if wrong:
        raise TypeError(f"{wrong[0]}= cannot be chosen here: PEFT's files set it")


@dataclass(frozen=True)
class AdapterNames:
    """The names of the parameters of one adapter: `keys` has PEFT's name of each FQN whose names differ."""

    keys: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, adapter: str) -> AdapterNames:
        """Ask PEFT for the names. Raises an error for a model in which they are not to be seen."""
        named, marks = _named_tensors(_peft_model(model, adapter)), {}
        for name in named:
            marks[name] = torch.empty(0)  # stands for the tensor, so that PEFT moves nothing
        given = get_peft_model_state_dict(
            _peft_model(model, adapter), state_dict=dict(marks), adapter_name=adapter, save_embedding_layers=False
        )
        name_of = {id(mark): name for name, mark in marks.items()}
        made = [key for key, mark in given.items() if id(mark) not in name_of]
        if made:
            raise StateError(
                f"{made[0]}: PEFT makes this value of the adapter {adapter!r} when it saves, so that no parameter could be "
                "loaded from it: save with fsdp_optim.save(..., weights='trainable')"
            )
        if not given:
            raise WrapperError(
                f"no parameter of the adapter {adapter!r} is to be seen by its name: its wrapper has flattened them; with FSDP1, "
                "give use_orig_params=True"
            )
        inner = _peft_model(model, adapter)
        return cls({clean_name(inner, name_of[id(mark)]): clean_name(inner, key) for key, mark in given.items()})

    @classmethod
    def of_active(cls, model: nn.Module) -> AdapterNames:
        """The names of the adapter that trains."""
        return cls.of(model, str(_peft_model(model).active_adapter))

    def check_trains(self, model: nn.Module, adapter: str) -> None:
        """Raise StateError for a parameter of the adapter that `weights="trainable"` would leave out."""
        inner = _peft_model(model, adapter)
        for name, tensor in _named_tensors(inner).items():
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if is_frozen and (fqn := clean_name(inner, name)) in self.keys:
                raise StateError(
                    f"{fqn}: belongs to the adapter {adapter!r} and requires no gradients, so it would be left out: "
                    "call model.set_adapter() with this adapter, or give base=True"
                )

    def check_views(self, views: Sequence[View] | str) -> None:
        """Raise StateError for a View of a parameter of the adapter, whose names and shapes are PEFT's."""
        for view in views if isinstance(views, (list, tuple)) else ():
            for fqn in self.keys:
                if isinstance(view, View) and view.matches(fqn):
                    raise StateError(
                        f"{fqn}: belongs to the adapter, whose names in files are PEFT's, and {view} would give it others: "
                        "give Views of the base model alone, with base=True"
                    )

    def key_of(self, fqn: str) -> str:
        """PEFT's name of a parameter."""
        return self.keys.get(fqn, fqn)

    @property
    def fqn_of(self) -> Callable[[str], str]:
        """The function from PEFT's name of a parameter to the model's."""
        fqns = {key: fqn for fqn, key in self.keys.items()}
        return lambda key: fqns.get(key, key)


def _peft_model(model: nn.Module, adapter: str | None = None) -> Any:
    """The PeftModel inside the wrappers of a model. Raises an error where there is none, or without this adapter."""
    inner: Any = model
    while not isinstance(inner, PeftModel):
        child = module_inside(inner)
        if child is None:
            raise WrapperError(
                f"the {type(model).__name__} that was given is neither a PeftModel nor a wrapper around one: give the model of "
                "get_peft_model, as it is wrapped"
            )
        inner = child
    if adapter is not None and adapter not in inner.peft_config:
        has: Sequence[str] = sorted(inner.peft_config)
        raise StateError(f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, has))}: give adapter=")
    return inner


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers, under all their names, which may have parts of wrappers inside."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _config_of(model: Any, adapter: str) -> bytes:
    """The content of `adapter_config.json`, as PEFT writes it, but with sets in order, so that all ranks make the same."""
    config = model.peft_config[adapter]
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values["inference_mode"] = True  # of the model that opens it
    if values.get("base_model_name_or_path") is None:
        holder = model.base_model if config.is_prompt_learning else model.base_model.model
        values["base_model_name_or_path"] = vars(holder).get("name_or_path") or None
    if config.task_type is None:
        holder = model.base_model if config.is_prompt_learning else model.base_model.model
        values["auto_mapping"] = {
            "base_model_class": type(holder).__name__,
            "parent_library": type(holder).__module__,
        }
    return json.dumps(values, indent=2, sort_keys=True).encode()
