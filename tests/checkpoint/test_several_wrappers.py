"""Several models in one checkpoint, each in another of the nine wrappers, or cut into pipeline stages; and averages of them."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_format import check_folder
from kit.checkpoints import check_files, mine, scramble
from kit.compare import check_same
from kit.folders import InFolder
from kit.optimizers import adam
from kit.several import models, numbers, plain, wrapped
from kit.stages import Language, stage_of
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WORLD = 4
PAIRS = (
    ("fairscale flat", "FSDP1 flat"),
    ("FSDP1 orig", "FSDP2 x TP"),
    ("HSDP", "plain"),
    ("fairscale non-flat", "DDP"),
)
QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)
COMPARE = fsdp_optim.LoadOptions(compare=True, progress=False)


def of(trained: dict[str, Trained]) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    return {name: value.model for name, value in trained.items()}, {
        name: value.optim for name, value in trained.items()
    }


def every_wrapper(root: Path) -> None:
    for pair in PAIRS:
        with cpu():
            saved = dict(zip("ab", map(Trained, pair), strict=True))
            path = root / f"{pair[0]} and {pair[1]}"
            fsdp_optim.save(path, *of(saved), options=QUIET)
            for ways in (pair, pair[::-1]):
                into = {name: Trained(how, steps=0) for name, how in zip("ab", ways, strict=True)}
                for target in into.values():
                    scramble(target)
                fsdp_optim.load(path, *of(into), options=COMPARE)
                for how, target in zip(ways, into.values(), strict=True):
                    check_same(f"{pair}, as {how}", mine(target), mine(Trained(how)))
                    target.step([STEPS])
                    check_same(f"{pair}, as {how}, trained on", mine(target), mine(Trained(how, steps=STEPS + 1)))
        if dist.get_rank() == 0:
            oracle = Oracle(adam, STEPS)
            for name in "ab":
                check_files(path / name, oracle)


def language(filled: bool) -> Language:
    model = Language()
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.copy_(numbers(tensor, number if filled else -7))
    return model


def pipeline_stages(root: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def build(filled: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        stages = [stage_of(language(filled), rank, size)]
        live = {"actor": stages, "critic": wrapped(plain("critic", filled), "FSDP2")}
        return live, {"actor": [torch.optim.SGD(stage.parameters(), lr=0.5) for stage in stages]}

    fsdp_optim.save(root, *build(True), options=QUIET)
    live, optims = build(False)
    optims["actor"][0].param_groups[0]["lr"] = 3.0
    fsdp_optim.load(root, live, optims, options=COMPARE)
    check_same("lr", optims["actor"][0].param_groups[0]["lr"], 0.5)
    wanted = dict(stage_of(language(True), rank, size).state_dict())
    check_same("the stage", dict(live["actor"][0].state_dict()), wanted)
    if rank == 0:
        whole = {name: tensor.detach() for name, tensor in sorted(language(True).state_dict().items())}
        check_same("the folder", dict(sorted(load_file(root / "actor" / "model.safetensors").items())), whole)


def on_ranks(root: Path) -> None:
    every_wrapper(root / "wrappers")
    pipeline_stages(root / "stages")


class SeveralWrappersTest(InFolder):
    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, WORLD, self.root)
        whole = language(False)
        fsdp_optim.load(self.root / "stages" / "actor", whole, options=COMPARE)
        check_same("one model of the stages", dict(whole.state_dict()), dict(language(True).state_dict()))

    def test_averages_have_the_folders(self) -> None:
        for number in range(2):
            live, optims = models({"actor": "plain", "ema": "plain"}, filled=True)
            with torch.no_grad():
                live["ema"].outer.weight.add_(2.0 * number)
            fsdp_optim.save(self.root / f"{number}", live, optims, options=QUIET)
        fsdp_optim.average([self.root / "0", self.root / "1"], self.root / "mean")
        check_folder(self.root / "mean")
        averaged = load_file(self.root / "mean" / "ema" / "model.safetensors")
        check_same("mean", averaged["outer.weight"], plain("ema").outer.weight.detach() + 1.0)
        into, _ = models({"actor": "plain", "ema": "plain"}, filled=False)
        fsdp_optim.load(self.root / "mean", into, options=COMPARE)
        check_same("loaded", into["actor"].inner.bias.detach(), live["actor"].inner.bias.detach())
        fsdp_optim.average([self.root / "0" / "ema", self.root / "1" / "ema"], self.root / "of one")
        check_same(
            "of one", load_file(self.root / "of one" / "model.safetensors")["outer.weight"], averaged["outer.weight"]
        )


if __name__ == "__main__":
    unittest.main()
