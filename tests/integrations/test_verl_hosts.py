"""verl's roles on several machines: each may see late what another one has done, and the last one names the step all the same."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.folders import InFolder
from kit.verl_cpu import import_verl
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.verl",)
PLUG_IN = "fsdp_optim.integrations.verl"
TRACKER = "latest_checkpointed_iteration.txt"


def plug_in() -> Any:
    import_verl()
    return importlib.import_module(PLUG_IN)


@contextlib.contextmanager
def on_a_network(verl: Any, seconds: float) -> Iterator[None]:
    """The folder is on a network file system, which shows everything within some seconds."""
    with (
        mock.patch.object(verl, "visible_within", return_value=seconds),
        mock.patch.object(verl, "_PATIENCE", 0.1),
    ):
        yield


def roles_of(root: Path, step: int, *roles: str) -> Path:
    """The folder of a step in which these roles are saved."""
    folder = root / f"global_step_{step}"
    for role in roles:
        fsdp_optim.save(folder / role / "huggingface", nn.Linear(2, 2), step=step)
    (folder / "data.pt").touch()
    return folder


def last_of_two(root: Path) -> None:
    """Each role has still a listing with the unfinished folder of the other when it is ready; both write."""
    verl = plug_in()
    folder = roles_of(root, 8, "actor", "critic")
    looks: dict[tuple[int, str], int] = {}
    is_being_saved = verl.is_being_saved

    def stale(path: str) -> bool:
        role, who = Path(path).parent.name, threading.get_ident()
        looks[who, role] = looks.get((who, role), 0) + 1
        return looks[who, role] <= 3 or is_being_saved(path)

    texts = mock.patch.object(verl, "replace_text", wraps=verl.replace_text)
    with on_a_network(verl, 30.0), mock.patch.object(verl, "is_being_saved", stale), texts as written:
        ends = [
            threading.Thread(target=verl.write_tracker, args=(f"{folder}/{role}", 8)) for role in ("actor", "critic")
        ]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        check_same("roles that write", written.call_count, 2)
    check_same("the tracker", (root / TRACKER).read_text(), "8")


def not_ready(root: Path) -> None:
    """What is seen of a critic that is still saved, or of another step, is not enough; what verl itself has saved is."""
    verl = plug_in()
    for step, name in ((1, "huggingface.saving-0123456789abcdef"), (2, "huggingface")):
        folder = roles_of(root, step, "actor")
        if step == 1:
            (folder / "critic" / name).mkdir(parents=True)
        else:
            fsdp_optim.save(folder / "critic" / name, nn.Linear(2, 2), step=1)
        with on_a_network(verl, 0.2):
            verl.write_tracker(f"{folder}/actor", step)
        check_same("the tracker", (root / TRACKER).exists(), False)
    folder = roles_of(root, 3, "actor")
    (folder / "critic").mkdir()
    (folder / "critic/model_world_size_2_rank_0.pt").touch()
    with on_a_network(verl, 0.2):
        verl.write_tracker(f"{folder}/actor", 3)
    check_same("the tracker", (root / TRACKER).read_text(), "3")


def manifest_comes_late(root: Path) -> None:
    """A critic whose manifest is not visible yet is waited for: its step could be an older one."""
    verl = plug_in()
    folder = roles_of(root, 4, "actor", "critic")
    looks, has_checkpoint = [0], verl.has_checkpoint

    def late(path: str) -> bool:
        looks[0] += "critic" in str(path)
        return has_checkpoint(path) and ("critic" not in str(path) or looks[0] > 3)

    with on_a_network(verl, 30.0), mock.patch.object(verl, "has_checkpoint", late):
        verl.write_tracker(f"{folder}/actor", 4)
    check_same("looks", looks[0], 4)
    check_same("the tracker", (root / TRACKER).read_text(), "4")


def whose(root: Path) -> list[str]:
    """Who loads a checkpoint of this library whose manifest rank 1 does not see yet."""
    verl, path, loads = plug_in(), root / "actor", []
    if dist.get_rank() == 0:
        (path / "huggingface").mkdir(parents=True)
        for name in ("fsdp_config.json", "huggingface/fsdp_optim.json"):
            (path / name).touch()
    dist.barrier()
    manager = object.__new__(verl.FsdpOptimCheckpointManager)
    manager._finisher, manager.checkpoint_load_contents, manager.model = None, ["model"], nn.Linear(2, 2)
    manager.rank, manager.optimizer, manager.lr_scheduler = dist.get_rank(), None, None
    stat = os.stat

    def load(*given: Any, **_: Any) -> Any:
        loads.append("this library" if len(given) > 1 else "the names")
        return SimpleNamespace(state={})

    def late(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith("fsdp_optim.json"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, *args, **kwargs)

    with (
        mock.patch.object(verl._Own, "load_checkpoint", side_effect=lambda *_: loads.append("verl")),
        mock.patch.object(fsdp_optim, "load", side_effect=load, create=True),
        mock.patch.object(os, "stat", late) if dist.get_rank() == 1 else contextlib.nullcontext(),
    ):
        manager.load_checkpoint(str(path))
    return loads


def of_an_older_version(root: Path) -> None:
    """The schedule and the random states are taken from a checkpoint in which these have the names of before."""
    verl, model = plug_in(), nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(optim, 1, 0.5) for _ in range(2)]
    optim.step()
    schedules[0].step()
    manager = fsdp_optim.CheckpointManager(root / "run", model, state={"lr_scheduler": schedules[0]})
    manager.save(1)
    manager.close()
    drawn = torch.rand(3)
    [saved] = fsdp_optim.checkpoints(root / "run")
    (root / "actor").mkdir()
    os.rename(str(saved.path), root / "actor/huggingface")
    loading = object.__new__(verl.FsdpOptimCheckpointManager)
    loading._finisher, loading.checkpoint_load_contents, loading.model = None, ["extra"], model
    loading.rank, loading.optimizer, loading.lr_scheduler = 0, None, schedules[1]
    loading.load_checkpoint(str(root / "actor"))
    check_same("the schedule", schedules[1].last_epoch, 1)
    check_same("the next numbers", torch.rand(3), drawn)


@unittest.skipIf(sys.version_info >= (3, 13), "verl needs a Python before 3.13")
class HostsTest(InFolder):
    def test_the_last_role_names_the_step_although_it_sees_the_others_late(self) -> None:
        run_on_ranks(last_of_two, 1, self.root)

    def test_a_role_that_is_not_ready_keeps_the_step_from_its_name(self) -> None:
        run_on_ranks(not_ready, 1, self.root)

    def test_a_role_counts_by_its_manifest(self) -> None:
        run_on_ranks(manifest_comes_late, 1, self.root)

    def test_a_checkpoint_of_an_older_version(self) -> None:
        run_on_ranks(of_an_older_version, 1, self.root)

    def test_all_ranks_load_by_the_manager_that_rank_0_finds(self) -> None:
        self.assertEqual(run_on_ranks(whose, 2, self.root), [["the names", "this library"], ["this library"]])


if __name__ == "__main__":
    unittest.main()
