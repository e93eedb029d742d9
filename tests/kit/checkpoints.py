"""Trained models to save, load and compare, and readers of a checkpoint's files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

import fsdp_optim
from kit.compare import Differs, check_same
from kit.local_parts import local_of
from kit.models import Net
from kit.optimizers import OfModel, two_groups
from kit.options import as_options
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu, snapshot

FURTHER = STEPS + 2


class Whole(Net):
    """`Net` with buffers in the root and in units, without dimensions, without elements, and not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(6.0).reshape(2, 3) / 7)
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("unset", None)
        self.register_buffer("scratch", torch.full((3,), 0.5), persistent=False)
        self.head.register_buffer("offset", torch.tensor([0.1, 0.2], dtype=torch.float64))
        self.block[1].register_buffer("mask", torch.tensor([True, False, True]))
        self.block[1].register_buffer("brief", torch.tensor([0.3], dtype=torch.bfloat16))


def save(path: Path | str, trained: Trained, **kwargs: Any) -> Any:
    options = {"durable": False, "progress": False, "process_group": trained.process_group, **kwargs}
    return fsdp_optim.save(path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options))


def load(path: Path | str, trained: Trained, **kwargs: Any) -> Any:
    options = {"progress": False, "process_group": trained.process_group, **kwargs}
    return fsdp_optim.load(path, trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **options))


def optims_of(trained: Trained) -> list[torch.optim.Optimizer]:
    return list(trained.optim) if isinstance(trained.optim, list) else [trained.optim]


def buffers_of(trained: Trained) -> dict[str, Tensor]:
    """The persistent buffers of a model, and the others, which have their own name ending."""
    return {name: local_of(buffer).clone() for name, buffer in trained.model.named_buffers()}


def everything(trained: Trained) -> dict[str, Any]:
    return {**snapshot(trained), "buffers": buffers_of(trained)}


def mine(trained: Trained) -> dict[str, Any]:
    """This rank's parameters, persistent buffers, state and groups, without padding."""
    first = min(trained.numbers.start.values())
    real = {id(param): index >= first for param, index in zip(trained.params, trained.index, strict=True)}

    def cut(param: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local, keep = local_of(value).detach(), real[id(param)]
        return (local.reshape(-1)[keep] if local.dim() and local.numel() == keep.numel() else local).clone()

    named = dict(trained.model.named_parameters())
    state = {
        name: {key: cut(param, optim.state[param][key]) for key in sorted(optim.state[param])}
        for name, param in named.items()
        for optim in optims_of(trained)
        if optim.state.get(param)
    }
    groups = [
        {**{key: group[key] for key in sorted(group)}, "params": len(group["params"])}
        for optim in optims_of(trained)
        for group in optim.param_groups
    ]
    buffers = {name: value for name, value in buffers_of(trained).items() if not name.endswith("scratch")}
    values = {name: cut(param, param) for name, param in named.items()}
    return {"values": values, "buffers": buffers, "state": state, "groups": groups}


def scramble(trained: Trained, forget: bool = True) -> None:
    """Overwrite parameters, buffers, hyperparameters and state with other values."""
    with torch.no_grad():
        for param in trained.params:
            local_of(param).fill_(-3)
        for buffer in trained.model.buffers():
            local_of(buffer).fill_(1)
    if forget:
        trained.fresh_optimizer()
    for optim in optims_of(trained):
        for value in itertools.chain.from_iterable(values.values() for values in optim.state.values()):
            local_of(value).fill_(9)
        for group in optim.param_groups:
            group["lr"] = 99.0


def opened(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of `model` or `optim`, in order of their names, as plain safetensors reads them."""
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        tensors = safetensors.torch.load_file(folder / f"{stem}.safetensors")
    else:
        weight_map = json.loads(index.read_text())["weight_map"]
        tensors = {}
        for name in sorted(set(weight_map.values())):
            for key, tensor in safetensors.torch.load_file(folder / name).items():
                if weight_map.get(key) != name or key in tensors:
                    raise Differs(f"{key} is in {name}, the index has it in {weight_map.get(key)}")
                tensors[key] = tensor
        check_same("names in the index", sorted(weight_map), sorted(tensors))
    return {name: tensors[name] for name in sorted(tensors)}


def header_of(folder: Path, stem: str) -> dict[str, str]:
    """The header's metadata of the first file."""
    first = sorted(folder.glob(f"{stem}*.safetensors"))[0]
    with safe_open(first, "pt") as file:
        return dict(file.metadata() or {})


def check_files(folder: Path, oracle: Oracle) -> None:
    """Raise unless the files have, to the bit, what the unwrapped model and its optimizer have."""
    weights = oracle.model.state_dict()
    first_names = {id(tensor): name for name, tensor in reversed(oracle.model.state_dict(keep_vars=True).items())}
    weights = {name: weights[name] for name in sorted(first_names.values())}
    check_same("model", opened(folder, "model"), weights)
    check_same("model, metadata", header_of(folder, "model").get("format"), "pt")
    state = {f"state.{n}.{key}": v for n, values in oracle.by_name().items() for key, v in values.items()}
    tensors = {key: state[key] for key in sorted(state) if isinstance(state[key], Tensor)}
    check_same("optim", opened(folder, "optim"), tensors)


@functools.cache
def oracle_after(steps: int) -> Oracle:
    return Oracle(OfModel(two_groups), steps, Whole)


def save_trained(path: Path, wrapper: str, kwargs: Mapping[str, Any], **options: Any) -> None:
    """`kwargs` are those of `Trained`."""
    with cpu():
        trained = Trained(wrapper, **kwargs)
        before = everything(trained)
        save(path, trained, **options)
        check_same("after saving", everything(trained), before)


def load_trained(path: Path, wrapper: str, kwargs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Load into a scrambled model, compare it with a model that was trained without a load, and train both on."""
    with cpu():
        place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        alike, trained_on = _without_a_load(wrapper, tuple(kwargs.items()), *place)
        target = Trained(wrapper, **{**kwargs, "steps": 0})
        scramble(target)
        restored = load(path, target, **options)
        check_same("restored", mine(target), alike)
        target.step([STEPS], kwargs.get("unused", ()))
        check_same("trained on", mine(target), trained_on)
        return {"absent": sorted(restored.absent), "extra": dict(restored.state)}


@functools.lru_cache(maxsize=64)
def _without_a_load(wrapper: str, kwargs: tuple[tuple[str, Any], ...], rank: int, world_size: int) -> tuple[Any, Any]:
    """The result of training for this rank of such a world, after `STEPS` steps and one more, as copies."""
    alike = Trained(wrapper, **dict(kwargs))
    before = mine(alike)
    alike.step([STEPS], dict(kwargs).get("unused", ()))
    return before, mine(alike)


def check_groups(folder: Path, oracle: Oracle) -> None:
    name_of = {id(param): name for name, param in oracle.model.named_parameters()}
    wanted = [
        {**{k: group[k] for k in sorted(group)}, "params": [name_of[id(p)] for p in group["params"]]}
        for group in oracle.optim.param_groups
    ]
    got = [{k: group[k] for k in sorted(group)} for group in json.loads(header_of(folder, "optim")["param_groups"])]
    check_same("param_groups", got, json.loads(json.dumps(wanted)))


def in_order(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the values of each parameter by the order of their names."""
    return {name: {key: values[key] for key in sorted(values)} for name, values in state.items()}


# ------------------------------------------------------------------------------------------ in the background

WRITES = ("pwrite", "pwritev", "write", "fsync", "fdatasync", "rename", "replace")


def async_save(path: Path | str, trained: Trained, **kwargs: Any) -> Any:
    options = {"durable": False, "progress": False, "process_group": trained.process_group, **kwargs}
    return fsdp_optim.async_save(path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options))


@contextlib.contextmanager
def before_writes(hook: Callable[[Any], None]) -> Iterator[None]:
    """Call `hook` with the file (descriptor or path) before each of this process's writes, in their threads."""

    def hooked(name: str) -> Any:
        real = getattr(os, name)

        def call(file: Any, *args: Any, **kwargs: Any) -> Any:
            hook(file)
            return real(file, *args, **kwargs)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as stack:
        for name in WRITES:
            stack.enter_context(hooked(name))
        yield
