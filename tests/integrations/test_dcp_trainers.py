"""LLaMA-Factory v1 and NeMo Automodel, whose own functions save and resume by this library, and prime-rl by its call sites."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_same, refused, sorted_state
from kit.pretrained import CUT_VIEWS, build, cut, transformers
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.integrations import llama_factory, nemo_automodel, prime_rl
from fsdp_optim.integrations.common.needed import MissingNameError
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.dcp_trainers",)
SAVING = fsdp_optim.SaveOptions(durable=False, progress=False)

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the trainers need Python 3.11")


class Processor:
    """A tokenizer, as far as a checkpoint knows it."""

    def save_pretrained(self, folder: str, **_: Any) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


@dataclasses.dataclass
class Progress:
    """prime-rl's counters."""

    step: int = 0
    total_tokens: int = 0


class Loader:
    """A data loader with a state of its own on each rank."""

    def __init__(self) -> None:
        self.position = -1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def reshard(self, states: list[dict[str, int]], world_size: int) -> list[dict[str, int] | None]:
        return [*states, *[None] * world_size][:world_size]


class Run:
    """A model in FSDP2 with an AdamW and a schedule."""

    def __init__(self, seed: int, num_steps: int = 0) -> None:
        model = build("llama")
        with torch.no_grad():
            for param in model.parameters():
                param.add_(seed)
        self.model = WRAPPERS["FSDP2"](model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 1, 0.5)
        self.progress, self.loader = Progress(), Loader()
        for number in range(num_steps):
            for param in self.model.parameters():
                param.grad = param.detach() * (0.5 + number)
            self.optim.step()
            self.optim.zero_grad()
            self.sched.step()
            self.progress.step += 1
            self.loader.position = 10 * dist.get_rank() + number

    @property
    def state(self) -> dict[str, Any]:
        full = fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, recipient_rank=None, key_by="name")
        return {
            "weights": dict(sorted(fsdp_optim.gather_full_model_state_dict(self.model, recipient_rank=None).items())),
            "state": sorted_state(full["state"]),
            "lr": self.optim.param_groups[0]["lr"],
            "last": self.sched.last_epoch,
        }


def by_llama_factory(run: Run, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """The calls that LLaMA-Factory's coordinator makes of its plug-in."""
    from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin

    def save() -> None:
        folder.mkdir(exist_ok=True)
        DistributedPlugin("fsdp2").save_checkpoint(
            run.model, run.optim, str(folder), save_ckpt_as_hf=False, processor=Processor()
        )
        if dist.get_rank() == 0:
            torch.save(run.sched.state_dict(), folder / "scheduler.pt")
        dist.barrier()

    def load() -> None:
        DistributedPlugin("fsdp2").load_checkpoint(run.model, run.optim, str(folder), processor=Processor())
        run.sched.load_state_dict(torch.load(folder / "scheduler.pt"))

    return save, load


def by_nemo(run: Run, folder: Path, is_async: bool = False) -> tuple[Callable[[], None], Callable[[], None]]:
    """The calls that NeMo's recipes make of a Checkpointer."""
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    config = CheckpointingConfig(checkpoint_dir=folder.parent, model_repo_id="none", is_async=is_async)
    module = sys.modules["nemo_automodel.components.checkpoint.checkpointing"]
    with mock.patch.object(module, "DefaultStager"):  # which needs a GPU
        checkpointer = config.build(dist.get_rank(), 0, 0)

    def save() -> None:
        checkpointer.save_model(model=run.model, weights_path=str(folder), peft_config=None, tokenizer=Processor())
        checkpointer.save_optimizer(run.optim, run.model, str(folder), run.sched, optimizer_part_ids=None)
        checkpointer.maybe_wait_for_staging()
        checkpointer.async_wait()

    def load() -> None:
        checkpointer.load_model(run.model, str(folder / "model"))
        checkpointer.load_optimizer(run.optim, run.model, str(folder), run.sched, optimizer_part_ids=None)

    return save, load


def by_nemo_async(run: Run, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    return by_nemo(run, folder, is_async=True)


def by_prime_rl(run: Run, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """The calls that prime-rl's `save` and `load` make, of the stand-in below: the package is on no registry."""
    manager = sys.modules["prime_rl.trainer.ckpt"].CheckpointManager()  # type: ignore[attr-defined]

    def save() -> None:
        manager.save_to_path(folder / "trainer", run.model, [run.optim], run.sched, run.progress, run.loader)

    def load() -> None:
        manager.load_from_path(folder / "trainer", run.model, [run.optim], run.sched, run.progress, run.loader)
        check_same("progress", run.progress.step, 2)
        check_same("loader", run.loader.position, 10 * dist.get_rank() + 1 if dist.get_rank() < 2 else -1)

    return save, load


class StandInOfPrimeRl:
    """prime-rl's CheckpointManager, as far as its signatures go. Its own methods are not to be called."""

    def save_to_path(
        self, path: Any, model: Any, optimizers: Any, scheduler: Any, progress: Any, dataloader: Any = None
    ) -> None:
        raise AssertionError("prime-rl's own save")

    def load_from_path(
        self, path: Any, model: Any, optimizers: Any, scheduler: Any, progress: Any, dataloader: Any = None
    ) -> None:
        raise AssertionError("prime-rl's own load")


@contextlib.contextmanager
def stand_in_of_prime_rl() -> Iterator[None]:
    names = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.ckpt")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].CheckpointManager = StandInOfPrimeRl  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield


TRAINERS = {
    "LLaMA-Factory": (by_llama_factory, llama_factory, "model"),
    "NeMo": (by_nemo, nemo_automodel, "model"),
    "NeMo, async": (by_nemo_async, nemo_automodel, "model"),
    "prime-rl": (by_prime_rl, prime_rl, "trainer"),
}


def call(
    name: str, folder: Path, method: int, seed: int, num_steps: int, on: bool = True, views: Any = ()
) -> dict[str, Any]:
    """Save (0) or load (1) by a trainer's own calls, with the plug-in or without."""
    make, plugin, _ = TRAINERS[name]
    with cpu(), stand_in_of_prime_rl() if plugin is prime_rl else contextlib.nullcontext():
        if on:
            loading = fsdp_optim.LoadOptions(views=views)
            plugin.enable(save_options=replace(SAVING, views=views), load_options=loading)  # type: ignore[attr-defined]
        try:
            run = Run(seed, num_steps)
            for _ in range(2 if on and method == 0 else 1):  # a second save of the same step replaces the first
                make(run, folder)[method]()
            return run.state
        finally:
            plugin.disable()  # type: ignore[attr-defined]


class DcpTrainersTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())) / "step_2"

    @parameterized.expand(list(TRAINERS))
    def test_a_run_resumes_at_another_world_size(self, name: str) -> None:
        wanted = run_on_ranks(call, 2, name, self.folder, 0, 0, 2)[0]
        for state in run_on_ranks(call, 3, name, self.folder, 1, 5, 0):
            check_same(name, state, wanted)
        place = self.folder / TRAINERS[name][2]
        check_same("the file", dict(sorted(load_file(place / "model.safetensors").items())), wanted["weights"])
        if name != "prime-rl":
            self.assertTrue((place / "tokenizer.json").exists())
            model = transformers().AutoModelForCausalLM.from_pretrained(place)
            check_same("from_pretrained", dict(sorted(model.state_dict().items())), wanted["weights"])

    @parameterized.expand(["LLaMA-Factory", "NeMo, async", "prime-rl"])
    def test_views_of_the_options_name_what_is_saved(self, name: str) -> None:
        wanted = run_on_ranks(call, 2, name, self.folder, 0, 0, 2, views=CUT_VIEWS)[0]
        place = self.folder / TRAINERS[name][2]
        saved = dict(sorted(load_file(place / "model.safetensors").items()))
        check_same("the file", saved, cut(wanted["weights"]))
        for state in run_on_ranks(call, 3, name, self.folder, 1, 5, 0, views=CUT_VIEWS):
            check_same(name, state, wanted)

    @parameterized.expand(["LLaMA-Factory", "NeMo"])
    def test_a_folder_of_the_trainer_is_resumed_from(self, name: str) -> None:
        wanted = run_on_ranks(call, 2, name, self.folder, 0, 0, 2, on=False)[0]
        for state in run_on_ranks(call, 2, name, self.folder, 1, 5, 0):
            check_same(name, state, wanted)

    @parameterized.expand(["LLaMA-Factory", "NeMo"])
    def test_everything_is_put_back(self, name: str) -> None:
        run_on_ranks(call, 2, name, self.folder, 0, 0, 1)
        run_on_ranks(call, 2, name, self.folder.parent / "after", 0, 0, 1, on=False)
        self.assertFalse((self.folder.parent / "after" / "model" / "fsdp_optim.json").exists())

    def test_a_package_that_is_not_there_is_named(self) -> None:
        refused(prime_rl.enable, MissingNameError, "prime-rl", "not installed")


if __name__ == "__main__":
    unittest.main()
