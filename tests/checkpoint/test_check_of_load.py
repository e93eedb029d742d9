"""`check="bitwise"` finds what an optimizer, or a file, has lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.cases import expand, some
from kit.checkpoints import Whole, everything, load, save_trained
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.local_parts import local_of
from kit.models import Tied
from kit.opaque import Blockwise
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.verbs.load_state import load_shard


class Forgetful(torch.optim.Adam):
    """Loads a state without an error, and has zeros afterwards."""

    forgets = "exp_avg"

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            local_of(values[self.forgets]).zero_()


class ForgetfulOfSteps(Forgetful):
    forgets = "step"


def lossy(name: str) -> Any:
    """Loads everything, but one number of one value, or of a group."""

    def load_and_lose(optim: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_shard(optim, *args, **kwargs)
        values = next((state for state in reversed(optim.state.values()) if name in state), optim.param_groups[-1])
        if isinstance(values[name], Tensor):
            local_of(values[name]).view(-1)[-1] += 1
        elif isinstance(values[name], list):
            values[name][0] = 0.25
        else:
            values[name] *= 2
        return result

    return mock.patch("fsdp_optim.verbs.load_state.load_shard", load_and_lose)


def load_and_lose(path: Path, wrapper: str) -> dict[str, list[tuple[str, str]]]:
    """By what is lost: everything loaded, checked; something lost, unchecked; checked; and the rate said to be kept."""
    errors = {}
    with cpu():
        for name in LOST:
            target = Trained(wrapper, Blockwise, steps=0)
            errors[name] = [error_text(lambda: load(path, target, compare=True))]  # noqa: B023
            with lossy(name):
                errors[name] += [
                    error_text(lambda: load(path, target, **options))  # noqa: B023
                    for options in ({}, {"compare": True}, {"compare": True, "keep_hyperparameters": ("lr",)})
                ]
    return errors


LOST = ("absmax", "codes", "table", "lr", "step", "moment")


def load_forgetful(path: Path, wrapper: str, kind: type[Forgetful], check: bool) -> tuple[str, str]:
    with cpu():
        target = Trained(wrapper, kind, steps=0)
        return error_text(lambda: load(path, target, compare=check))


def load_damaged(path: Path, wrapper: str) -> dict[str, tuple[str, str]]:
    with cpu():
        target = Trained(wrapper, steps=1, model=Whole)
        before, errors = everything(target), {}
        errors["verified"] = error_text(lambda: load(path, target))
        check_same("after the refusal", everything(target), before)
        errors["not verified"] = error_text(lambda: load(path, target, verify=False))
        errors["checked"] = error_text(lambda: load(path, target, verify=False, compare=True))
        return errors


class Untied(Tied):
    """Where the other has one parameter of two names, this has two."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))


def load_untied(path: Path, wrapper: str) -> None:
    with cpu():
        target = Trained(wrapper, model=Untied, steps=0)
        restored = fsdp_optim.load(
            path,
            target.model,
            options=fsdp_optim.LoadOptions(process_group=target.process_group, progress=False, compare=True),
        )
        check_same("missing", restored.missing_keys, ())


class CheckTest(InFolder):
    @expand(
        *some(
            [(wrapper, Forgetful) for wrapper in ("fairscale flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP")]
            + [(wrapper, ForgetfulOfSteps) for wrapper in ("FSDP1 flat", "FSDP2")],
            every=3,
        )
    )
    def test_state_that_the_optimizer_lost_is_found(self, wrapper: str, kind: type[Forgetful]) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {})
        self.assertEqual(run_on_ranks(load_forgetful, 3, self.path, wrapper, kind, False), [("", "")] * 3)
        errors = run_on_ranks(load_forgetful, 3, self.path, wrapper, kind, True)
        check_refused("zeros", errors, "CheckpointError", kind.forgets)

    @expand(soon=["FSDP2"], later=["fairscale flat", "plain"])
    def test_what_was_tied_and_is_not_any_more(self, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Tied})
        run_on_ranks(load_untied, 2, self.path, wrapper)

    @expand(*some(("FSDP1 flat", "FSDP2", "DDP"), every=2, first=1))
    def test_every_kind_of_value_is_compared(self, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, wrapper, {"make": Blockwise})
        by_rank = run_on_ranks(load_and_lose, 2, self.path, wrapper)
        for name in LOST:
            honest, unchecked, checked, kept = zip(*(errors[name] for errors in by_rank), strict=True)
            check_same(f"{name}, honest", honest, (("", ""),) * 2)
            check_same(f"{name}, unchecked", unchecked, (("", ""),) * 2)
            check_refused(f"{name}, lost", checked, "CheckpointError", name)
            if name == "lr":
                check_same("kept", kept, (("", ""),) * 2)
            else:
                check_refused(f"{name}, kept", kept, "CheckpointError", name)

    @parameterized.expand(
        [
            (stem, name, wrapper)
            for stem, name, wrapper in (
                ("model", "head.weight", "FSDP2"),
                ("model", "block.1.mask", "FSDP1 flat"),
                ("optim", "state.scale.exp_avg", "FSDP1 flat"),
                ("optim", "state.scale.step", "FSDP2"),
            )
        ]
    )
    def test_a_flipped_bit(self, stem: str, name: str, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        self.flip(self.path / f"{stem}.safetensors", name)
        by_rank = run_on_ranks(load_damaged, 3, self.path, wrapper)
        check_refused("verified", [errors["verified"] for errors in by_rank], "CheckpointError", f"{stem}.safetensors")
        self.assertEqual([errors["not verified"] for errors in by_rank], [("", "")] * 3)
        named = name.removeprefix("state.").rpartition(".")[0]
        check_refused("checked", [errors["checked"] for errors in by_rank], "CheckpointError", named)

    def flip(self, file: Path, name: str) -> None:
        """One bit of the last byte of that tensor."""
        content = bytearray(file.read_bytes())
        head = int.from_bytes(content[:8], "little")
        stop = json.loads(content[8 : 8 + head])[name]["data_offsets"][1]
        content[8 + head + stop - 1] ^= 1
        file.write_bytes(content)
