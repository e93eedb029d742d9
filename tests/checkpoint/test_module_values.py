"""The entries of state_dict() besides parameters and buffers are saved and restored: extra state, and modules' own entries."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
import threading
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.log_texts import log_texts
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Scaled(nn.Linear):
    """With an extra state, as TransformerEngine's fp8 scales."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: Any = {"scale": torch.tensor([1.0, 2.0]), "history": (1, 2.5), "recipe": None}

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        if state == "refused":
            raise ValueError("no such recipe")
        self.told = state


class Packed(nn.Module):
    """With values of its own beside a parameter and a buffer, as quantised modules of torch.ao and bitsandbytes have them."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("zero", torch.zeros(2))
        self.blocks = torch.arange(5, dtype=torch.uint8)
        self.seen: list[float] = []  # saved where there is any

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "blocks"] = self.blocks
        if self.seen:
            destination[prefix + "seen"] = list(self.seen)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        if local_metadata.get("version") != 3:
            raise ValueError(f"version {local_metadata.get('version')}")
        self.blocks = state_dict.pop(prefix + "blocks", self.blocks)
        self.seen = state_dict.pop(prefix + "seen", [])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class Deep(nn.Module):
    units = ("inner", "")
    tensor_parallel = {"last": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Scaled(5, 3), Packed())
        self.outer = Scaled(3, 2)
        self.last = nn.Linear(2, 2)


NAMES = ["inner.0._extra_state", "inner.1.blocks", "outer._extra_state"]


def modules_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, (Scaled, Packed))]


def values_of(model: nn.Module) -> list[Any]:
    return [m.told if isinstance(m, Scaled) else (m.blocks.clone(), list(m.seen)) for m in modules_of(model)]


def give(model: nn.Module, number: int) -> None:
    for place, module in enumerate(modules_of(model)):
        if isinstance(module, Scaled):
            module.told = {"scale": torch.tensor([number, place / 7]), "history": (number, 2.5), "recipe": None}
        else:
            module.blocks = torch.full((4,), number, dtype=torch.uint8)


def stored_in(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "extra/model.safetensors", "pt") as file:
        stored: dict[str, Any] = json.loads(file.metadata()["json"])
        return stored


def untouched(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise AssertionError("state_dict() of a module was called, which gathers in some wrappers")


def save_in_all(folder: str) -> None:
    with cpu(), log_texts(logging.WARNING) as told:
        for number, wrapper in enumerate(WRAPPERS):
            target = Trained(wrapper, adam, 1, Deep)
            give(target.model, number)
            path, group = Path(folder, wrapper), target.process_group
            with mock.patch.object(nn.Module, "state_dict", untouched):
                fsdp_optim.save(path, target.model, options=fsdp_optim.SaveOptions(process_group=group))
            if dist.get_rank() == 0:
                check_same(wrapper, sorted(stored_in(path)), NAMES)
    check_same("no warning because of hooks of wrappers", told, [])


def load_in_all(folder: str) -> None:
    """The values saved from one wrapper go into the next one."""
    with cpu():
        names = list(WRAPPERS)
        for number, wrapper in enumerate(WRAPPERS):
            alike, target = Deep(), Trained(names[number - 1], adam, 0, Deep)
            give(alike, number)
            fsdp_optim.load(
                Path(folder, wrapper),
                target.model,
                options=fsdp_optim.LoadOptions(process_group=target.process_group, compare=True),
            )
            check_same(f"{wrapper} to {names[number - 1]}", values_of(target.model), values_of(alike))


def between_ranks(folder: str) -> dict[str, tuple[str, str]]:
    told, rank = {}, dist.get_rank()
    with cpu():
        target = Trained("FSDP2", adam, 1, Deep)
        load = partial(fsdp_optim.load, f"{folder}/a", target.model, target.optim)
        give(target.model, 3)
        target.model.outer.told["scale"][0] += rank // 2
        save = partial(fsdp_optim.save, f"{folder}/a", target.model, target.optim)
        told["differ"] = error_text(save)
        save(options=fsdp_optim.SaveOptions(on_replica_mismatch="lowest_rank"))
        load(options=fsdp_optim.LoadOptions(compare=True))
        alike = Deep()
        give(alike, 3)
        check_same("the lowest rank's", values_of(target.model), values_of(alike))
        save(overwrite=True)
        # one rank's module refuses what it gets: all have what they had
        give(target.model, 5)
        had, weight = values_of(target.model), target.optim.state_dict()
        refuse = mock.patch.object(Scaled, "set_extra_state", refused_on(1))
        with refuse:
            told["refused"] = error_text(load)
        check_same("what they had", values_of(target.model), had)
        # the optimizer refuses: the same
        with mock.patch.object(
            type(target.optim), "load_state_dict", raising if rank == 2 else type(target.optim).load_state_dict
        ):
            told["optimizer"] = error_text(load)
        check_same("what they had before the optimizer", values_of(target.model), had)
        check_same("and the optimizer", list(target.optim.state_dict()["state"]), list(weight["state"]))
        # a value that is altered between the load and its check
        with mock.patch.object(Scaled, "get_extra_state", altered_on(1)):
            told["check"] = error_text(partial(load, options=fsdp_optim.LoadOptions(compare=True)))
    return told


def refused_on(number: int) -> Callable[..., None]:
    real = Scaled.set_extra_state

    def put(module: Any, state: Any) -> None:
        real(module, "refused" if dist.get_rank() == number and int(state["history"][0]) == 3 else state)

    return put


def altered_on(number: int) -> Callable[..., Any]:
    def get(module: Any) -> Any:
        is_other = dist.get_rank() == number and module.told["history"][0] == 3
        return {**module.told, "recipe": "another"} if is_other else module.told

    return get


def raising(optim: Any, state: Any) -> None:
    raise ValueError("no such state")


class Stage(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.add_module(f"stage{rank}", Scaled(2, 2))


def stages(folder: str) -> None:
    """Each rank has a module of its own: its values come to the rank that writes, and back."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = Stage(rank)
    give(model, rank)
    fsdp_optim.async_save(f"{folder}/stages", model, options=fsdp_optim.SaveOptions(process_group=group)).wait()
    wanted = values_of(model)
    give(model, 9)
    restored = fsdp_optim.load(
        f"{folder}/stages", model, options=fsdp_optim.LoadOptions(process_group=group, compare=True)
    )
    check_same("each its own", values_of(model), wanted)
    check_same("nothing missing", (restored.missing_keys, restored.unexpected_keys), ((), ()))
    # A module that all of them have, with values of its own on each, is no replica.
    alike = nn.Sequential(Scaled(2, 2))
    with torch.no_grad():
        for param in alike.parameters():
            param.zero_()
    give(alike, rank)
    kind, text = error_text(
        partial(fsdp_optim.save, f"{folder}/alike", alike, options=fsdp_optim.SaveOptions(process_group=group))
    )
    check_same("not told apart", (kind, "0._extra_state" in text, "name_of" in text), ("StateError", True, True))


class Object:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


class Dumb(nn.Linear):
    """A module that gives extra state, and cannot load extra state."""

    def get_extra_state(self) -> Any:
        return 5


def rename_keys(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "renamed"] = state.pop(prefix + "weight")


class ModuleValuesTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.path = Path(temporary.name, "a")

    def test_in_every_wrapper_at_every_size(self) -> None:
        for size in (2, 3):
            folder = f"{self.folder}/{size}"
            run_on_ranks(save_in_all, size, folder)
            run_on_ranks(load_in_all, 5 - size, folder)
            run_on_ranks(load_in_all, 1, folder)

    def test_names_are_those_of_state_dict(self) -> None:
        model = Deep()
        fsdp_optim.save(self.path, model)
        tensors = {*dict(model.named_parameters()), *dict(model.named_buffers())}
        self.assertEqual(sorted(stored_in(self.path)), sorted(set(model.state_dict()) - tensors))

    def test_between_ranks(self) -> None:
        by_rank = run_on_ranks(between_ranks, 3, self.folder)
        told = {name: [errors[name] for errors in by_rank] for name in by_rank[0]}
        words = ("outer._extra_state", "ranks 0, 1", "rank 2", "on_replica_mismatch='lowest_rank'")
        check_refused("differ", told["differ"], "StateError", *words)
        check_refused("refused", told["refused"], "StateError", "inner.0", "Scaled", "no such recipe", "rank 1")
        check_refused("optimizer", told["optimizer"], "StateError", "no such state", "rank 2")
        check_refused("check", told["check"], "CheckpointError", "inner.0._extra_state", "rank 1")

    def test_stages(self) -> None:
        run_on_ranks(stages, 3, self.folder)

    def test_without_pickle(self) -> None:
        """As any value that is neither JSON nor a tensor: named at save, and at load when it is needed."""
        model, target = Deep(), Deep()
        model.outer.told = Object(3)
        kind, text = error_text(partial(fsdp_optim.save, self.path, model))
        check_same(
            "refused", (kind, "outer._extra_state" in text, "allow_pickle" in text), ("CheckpointError", True, True)
        )
        self.assertFalse(self.path.exists())
        fsdp_optim.save(self.path, model, options=fsdp_optim.SaveOptions(allow_pickle=True))
        kind, text = error_text(partial(fsdp_optim.load, self.path, target))
        words = ("outer._extra_state" in text, "allow_pickle" in text, "strict=False" in text)
        check_same("not read", (kind, *words), ("CheckpointError", True, True, True))
        restored = fsdp_optim.load(self.path, target, strict=False)
        check_same(
            "left as it is",
            (restored.missing_keys, values_of(target)[2]),
            (("outer._extra_state",), values_of(Deep())[2]),
        )
        check_same("the others", values_of(target)[:2], values_of(model)[:2])
        fsdp_optim.load(self.path, target, options=fsdp_optim.LoadOptions(allow_pickle=True, compare=True))
        self.assertEqual(target.outer.told, Object(3))
        plain = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(5, 3))})
        fsdp_optim.load(self.path, plain, strict=False)  # who does not have the module needs no trust

    def test_what_one_side_lacks(self) -> None:
        model = nn.ModuleDict({"a": Scaled(2, 2), "b": nn.Linear(2, 2)})
        target = nn.ModuleDict({"a": nn.Linear(2, 2), "b": Scaled(2, 2)})
        fsdp_optim.save(self.path, model)
        kind, text = error_text(partial(fsdp_optim.load, self.path, target))
        check_same("kind", kind, "StateError")
        self.assertIn("b._extra_state: the model has it, the checkpoint does not", text)
        self.assertIn("a._extra_state: the checkpoint has it, the model does not", text)
        restored = fsdp_optim.load(self.path, target, strict=False)
        check_same(
            "listed", (restored.missing_keys, restored.unexpected_keys), (("b._extra_state",), ("a._extra_state",))
        )

    def test_values_that_a_module_has_at_times(self) -> None:
        model, target = Deep(), Deep()
        model.inner[1].seen = [0.5, 1.5]
        fsdp_optim.save(self.path, model)
        fsdp_optim.load(self.path, target, options=fsdp_optim.LoadOptions(compare=True))
        check_same("given", target.inner[1].seen, [0.5, 1.5])

    def test_a_module_in_two_places(self) -> None:
        model = nn.Sequential(*[Scaled(2, 2)] * 2)
        give(model, 4)
        fsdp_optim.save(self.path, model)
        self.assertEqual(list(stored_in(self.path)), ["0._extra_state"])
        target = nn.Sequential(Scaled(2, 2), Scaled(2, 2))
        fsdp_optim.load(self.path, target)
        check_same("both", [values["scale"] for values in values_of(target)], [values_of(model)[0]["scale"]] * 2)

    def test_no_two_modules_share_a_value(self) -> None:
        """What a module does after a load changes no other module, where one stored value is for several of them."""
        model = nn.Sequential(*[Scaled(2, 2)] * 2)
        give(model, 4)
        fsdp_optim.save(self.path, model)
        target = nn.Sequential(Scaled(2, 2), Scaled(2, 2))
        fsdp_optim.load(self.path, target)
        wanted = copy.deepcopy(target[1].told)
        go_on(target[0])
        check_same("another place", target[1].told, wanted)
        stages = [TwinStage(0), TwinStage(1)]
        fsdp_optim.save(self.path, stages, overwrite=True)
        fsdp_optim.load(self.path, stages)
        wanted = copy.deepcopy(stages[1].scaled.told)
        go_on(stages[0].scaled)
        check_same("another stage", stages[1].scaled.told, wanted)

    def test_a_gathered_value_is_a_copy(self) -> None:
        model = Deep()
        model.outer.told["lists"] = [[1]]
        full = fsdp_optim.gather_full_model_state_dict(model)
        wanted = copy.deepcopy(full)
        go_on(model.outer)
        model.inner[1].blocks += 1
        check_same("gathered", full, wanted)
        layer, target = Scaled(2, 2), Scaled(2, 2)
        full = fsdp_optim.gather_full_model_state_dict(layer)
        wanted = copy.deepcopy(full)
        fsdp_optim.scatter_full_model_state_dict(target, full)
        go_on(target)
        check_same("loaded", full, wanted)

    def test_a_value_without_a_copy(self) -> None:
        model = Deep()
        model.outer.told = {"lock": threading.Lock()}
        kind, text = error_text(lambda: fsdp_optim.gather_full_model_state_dict(model))
        check_same("kind", kind, "StateError")
        self.assertIn("outer._extra_state: is a dict that cannot be copied: TypeError: cannot pickle", text)

    def test_what_changes_after_async_save_returns(self) -> None:
        model = Deep()
        give(model, 2)
        handle = fsdp_optim.async_save(self.path, model)
        for module in modules_of(model):
            if isinstance(module, Scaled):
                module.told["scale"].zero_()
        handle.wait()
        target, alike = Deep(), Deep()
        give(alike, 2)
        fsdp_optim.load(self.path, target)
        check_same("as it was", values_of(target), values_of(alike))

    def test_what_cannot_be_saved_is_named(self) -> None:
        model = nn.Sequential(Dumb(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].register_state_dict_post_hook(rename_keys)
        model[2].register_state_dict_pre_hook(lambda module, prefix, keep_vars: None)
        with log_texts(logging.WARNING) as told:
            fsdp_optim.save(self.path, model)
        self.assertEqual(len(told), 2, told)
        self.assertIn("0._extra_state", told[0])
        self.assertRegex(told[1], r"hooks are not run.*1 \(Linear: rename_keys\), 2 \(Linear: .*<lambda>\)")
        fsdp_optim.load(
            self.path, model, options=fsdp_optim.LoadOptions(compare=True)
        )  # under the names of modules and attributes

    def test_a_module_that_fails(self) -> None:
        model = Deep()
        with mock.patch.object(Packed, "_save_to_state_dict", raising_save):
            for call in (fsdp_optim.save, fsdp_optim.load):
                kind, text = error_text(partial(call, self.path, model))
                check_same("kind", kind, "StateError" if call is fsdp_optim.save else "CheckpointError")
                self.assertTrue(call is fsdp_optim.load or ("inner.1" in text and "not packed yet" in text), text)

    def test_a_damaged_file_of_values(self) -> None:
        fsdp_optim.save(self.path, Deep())
        file = self.path / "extra/model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        target = Deep()
        give(target, 6)
        had = values_of(target)
        kind, text = error_text(partial(fsdp_optim.load, self.path, target))
        check_same("named", (kind, "extra/model.safetensors" in text), ("CheckpointError", True))
        check_same("as before", values_of(target), had)


class TwinStage(nn.Module):
    """A pipeline stage that has a module of its own beside one that all stages have."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scaled = Told()
        self.register_parameter(f"weight{number}", nn.Parameter(torch.ones(2)))


class Told(Scaled):
    """Without parameters."""

    def __init__(self) -> None:
        super().__init__(1, 1, False)
        del self.weight


def go_on(module: Any) -> None:
    """Change the extra state of a module in place."""
    module.told["scale"] += 1
    module.told["more"] = True
    for listed in module.told.get("lists", ()):
        listed.append(2)


def raising_save(module: Any, *args: Any) -> None:
    raise ValueError("not packed yet")
