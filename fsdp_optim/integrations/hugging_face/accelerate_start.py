"""The start of a run with Accelerate: every rank reads its own part of a Hugging Face folder.

Accelerate by itself has rank 0 send the complete weights to all ranks, tensor by tensor (`fsdp2_load_full_state_dict`), after
`from_pretrained` of transformers 5 has read all of them on every rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_optim
from fsdp_optim import LoadOptions, StateError
from fsdp_optim.integrations.common.needed import needed
from fsdp_optim.integrations.common.patches import put_back, replace_function, replace_method, status_in
from fsdp_optim.integrations.hugging_face.empty_files import without_reading

_CAST = LoadOptions(cast=True)
_ACCELERATOR, _UTILS, _MODELS = "accelerate.accelerator", "accelerate.utils.fsdp_utils", "transformers.modeling_utils"
_OF_ACCELERATE = {
    _ACCELERATOR: ("Accelerator", "Accelerator.prepare", "Accelerator._prepare_fsdp2"),
    _UTILS: ("fsdp2_load_full_state_dict", "fsdp2_canonicalize_names"),
}
_OF_TRANSFORMERS = {_MODELS: ("PreTrainedModel", "PreTrainedModel._load_pretrained_model", "safe_open")}
_ENTERED = threading.Lock()


@dataclass(frozen=True)
class _Start:
    """A block of `weights_from` on this rank.

    Attributes:
        buffers: the buffers with persistent=False of the model that is prepared, by name.
        dtypes: the dtypes that its parameters have before Accelerate makes them float32, by name.
        waiting: models of `from_pretrained` that have no values yet.
    """

    path: str
    options: LoadOptions
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    waiting: list[weakref.ref[nn.Module]] = field(default_factory=list)

    def note(self, model: nn.Module) -> None:
        """Note a model that has no values yet."""
        self.waiting.append(weakref.ref(model))

    def without_values(self) -> list[nn.Module]:
        """The models that still have no values."""
        return [model for model in (ref() for ref in self.waiting) if model is not None]


@contextlib.contextmanager
def weights_from(path: str | os.PathLike[str], *, options: LoadOptions = _CAST) -> Iterator[None]:
    """Inside the block, `Accelerator.prepare` fills an FSDP2 model from a Hugging Face folder: each rank reads its own part.

    Entered by all ranks. `from_pretrained` builds a model in the block without reading its weights, and uses no memory for them.
    A model that was made in another way (on the meta device, say) loses the values that it has. The prepared model is bit for
    bit what Accelerate makes by itself. A Trainer calls `prepare` in `train()`, so `train()` belongs into the block.

    Args:
        path: the folder of the weights, or a URL, as for `fsdp_optim.load`. For a name on the hub:
            `huggingface_hub.snapshot_download(name)`.
        options: as for `fsdp_optim.load`. `rename` where the model has other names than the folder.

    Raises:
        WrapperError, ImportError: a name that this needs is missing in the installed version of accelerate or transformers.
        StateError: in `prepare`: there is no FSDP2 with `cpu_ram_efficient_loading=True`, the model is quantized or has tensor
            parallelism, or the folder lacks a parameter of the model (a new head, adapters). At the end of the block: a model
            of `from_pretrained` was not prepared, so that it has no values.
        CheckpointError: in `prepare`: the folder cannot be read.
    """
    start = _Start(os.fspath(path), options)
    needed("accelerate", _tested("accelerate"), _OF_ACCELERATE)
    if not _ENTERED.acquire(blocking=False):
        raise StateError("weights_from is entered already in this process: leave that block first")
    try:
        with _replaced(start):
            yield
    finally:
        _ENTERED.release()
    if empty := start.without_values():
        raise StateError(
            f"a {type(empty[0]).__name__} of from_pretrained has no values, because nothing has prepared it inside "
            f"weights_from({start.path!r}): call accelerator.prepare(model, optimizer) there, or make the model outside"
        )


@contextlib.contextmanager
def _replaced(start: _Start) -> Iterator[None]:
    """Accelerate's functions and `from_pretrained` with this start in their place."""
    owner, utils = importlib.import_module(_ACCELERATOR).Accelerator, importlib.import_module(_UTILS)

    def fill(_: Any, accelerator: Any, model: nn.Module, full_sd: Any, cpu_offload: bool = False) -> nn.Module:
        return _fill(start, model, torch.device("cpu" if cpu_offload else accelerator.device))

    methods = {"prepare": _checked(start), "_prepare_fsdp2": _prepared(start)}
    with contextlib.ExitStack() as stack:
        for name, new in methods.items():
            replace_method(owner, name, new)
            stack.callback(put_back, owner, name)
        replace_function(utils, "fsdp2_load_full_state_dict", fill)
        stack.callback(put_back, utils, "fsdp2_load_full_state_dict")
        if find_spec("transformers") is not None:
            needed("transformers", _tested("transformers"), _OF_TRANSFORMERS)
            models = importlib.import_module(_MODELS)
            new = staticmethod(without_reading(models, start.note))
            stack.enter_context(status_in(models.PreTrainedModel, _load_pretrained_model=new))
        yield


def _tested(package: str) -> str:
    tested: dict[str, str] = importlib.import_module("fsdp_optim.integrations.accelerate").TESTED
    return tested[package]


def _checked(start: _Start) -> Callable[..., Any]:
    """`Accelerator.prepare`, which refuses what would leave a model without values."""

    def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                _check(start, accelerator, model)
        return original(*args, **kwargs)

    return prepare


def _check(start: _Start, accelerator: Any, model: nn.Module) -> None:
    where = f"weights_from({start.path!r})"
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not accelerator.is_fsdp2 or not plugin.cpu_ram_efficient_loading:
        raise StateError(
            f"{where} needs FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True): set both, or prepare "
            "the model outside the block"
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise StateError(
                f"{where} takes no model with tensor parallelism, and {name} is a DTensor: prepare it outside the block"
            )
        if type(param).__name__ == "Params4bit":
            raise StateError(f"{where} takes no quantized model, and {name} has 4 bits: prepare it outside the block")


def _prepared(start: _Start) -> Callable[..., Any]:
    """`Accelerator._prepare_fsdp2`, for a model on the meta device.

    Accelerate finds the parameters of an optimizer by their addresses, which are all 0 there; this finds them by their names.
    """

    def prepare(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
        model = next((item for item in args if isinstance(item, nn.Module)), None)
        if model is None:
            return original(*args)
        params = _params_of(model)
        wanted = [_fqns_in(optim, params) for optim in _optimizers(args)]
        start.dtypes.update({fqn: param.dtype for fqn, param in params.items()})
        start.buffers.update({fqn: module._buffers[name] for fqn, module, name in _not_persistent(model)})  # type: ignore[misc]
        _to_meta(model)
        _give(args, wanted, _params_of(model))  # so that nothing holds the values that the model had
        result = original(*args)
        _give(result, wanted, _params_of(next(item for item in result if isinstance(item, nn.Module))))
        return result

    return prepare


def _optimizers(items: Iterable[Any]) -> list[torch.optim.Optimizer]:
    return [item for item in items if isinstance(item, torch.optim.Optimizer)]


def _give(items: Iterable[Any], wanted: Sequence[Sequence[Sequence[str]]], params: Mapping[str, nn.Parameter]) -> None:
    """Give the groups of the optimizers among `items` the parameters of these names."""
    for optim, groups in zip(_optimizers(items), wanted, strict=True):
        for group, fqns in zip(optim.param_groups, groups, strict=True):
            group["params"] = [params[fqn] for fqn in fqns]


def _params_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return _by_fqn(dict(model.named_parameters()))


def _by_fqn(named: dict[str, Any]) -> dict[str, Any]:
    """The same values by names without the wrappers of activation checkpointing and of compilation."""
    canonical: dict[str, Any] = importlib.import_module(_UTILS).fsdp2_canonicalize_names(named)
    return canonical


def _fqns_in(optim: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters in each group."""
    fqns = {id(param): fqn for fqn, param in params.items()}
    groups = [[fqns.get(id(param)) for param in group["params"]] for group in optim.param_groups]
    strange = sum(fqn is None for group in groups for fqn in group)
    if strange:
        raise StateError(
            f"{strange} parameters of the {type(optim).__name__} are not in the model that is prepared with it: make the "
            "optimizer from model.parameters() after the model's last change"
        )
    return [[fqn for fqn in group if fqn is not None] for group in groups]


def _not_persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The FQN of each buffer with persistent=False, its module, and its name there."""
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if module._buffers.get(name) is not None:
                (fqn,) = _by_fqn({f"{path}.{name}" if path else name: None})
                yield fqn, module, name


def _to_meta(model: nn.Module) -> None:
    """Take the values of everything that a checkpoint has. What is tied stays tied."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                module._parameters[name] = moved.setdefault(id(param), (param, empty))[1]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to("meta")


def _fill(start: _Start, model: nn.Module, device: torch.device) -> nn.Module:
    """Give a sharded model on the meta device memory, and the values of the folder. Called by all ranks."""
    model.to_empty(device=device)
    tie_weights = getattr(model, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    for fqn, module, name in _not_persistent(model):
        module._buffers[name] = start.buffers[fqn].to(device)
    loaded = fsdp_optim.load(start.path, model, strict=False, options=start.options)
    if loaded.missing_keys:
        raise StateError(
            f"{start.path}: has no {loaded.missing_keys[0]}, which the model has, so weights_from cannot fill it "
            f"({len(loaded.missing_keys)} parameters are missing in all): give LoadOptions(cast=True, rename=...) if only the "
            "names differ; make and prepare a model with a new head or with adapters outside the block"
        )
    _round(start, model)
    filled = set(map(id, model.modules()))
    start.waiting[:] = [weakref.ref(other) for other in start.without_values() if id(other) not in filled]
    return model


@torch.no_grad()
def _round(start: _Start, model: nn.Module) -> None:
    """Round parameters that Accelerate has made float32 to the dtype that they had, in which it has read them itself."""
    for fqn, param in _params_of(model).items():
        before = start.dtypes.get(fqn, param.dtype)
        if before != param.dtype and before.is_floating_point:
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(local.to(before))
