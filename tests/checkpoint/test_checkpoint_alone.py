"""Ranks that each think that they are alone do not overwrite each other's checkpoint in silence."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.folders import InFolder
from kit.groups import Meeting
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import world_here
from fsdp_optim.transport.store_control import place_key

LOG = "fsdp_optim"


class Lines(logging.Handler):
    """The warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger(LOG).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(LOG).removeHandler(self)


def is_claimed(path: Path) -> bool:
    return world_here().board.check([place_key(str(path))])


def save_in_parts(root: Path, parts: list[list[int]], kind: str) -> dict[str, Any]:
    """Each part of the ranks has a model of its own, and all save to one path: at once, then one after the other."""
    meeting, me, outcomes = Meeting(), dist.get_rank(), {}
    meshes = [DeviceMesh("cpu", ranks) for ranks in parts]
    own_part = next(i for i, ranks in enumerate(parts) if me in ranks)
    with cpu(), Lines() as lines:
        trained = Trained(lambda model: in_fsdp2(model, meshes[own_part]), steps=1)

        def save(path: Path, **options: Any) -> tuple[str, str]:
            options = {"extra": own_part, "durable": False, "progress": False, "timeout": 30.0, **options}

            def call() -> None:
                if kind == "async_save":
                    fsdp_optim.async_save(
                        path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options)
                    ).wait(60)
                else:
                    fsdp_optim.save(path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options))

            return error_text(call)

        meeting.tell(0)
        outcomes["at once"] = save(root / "once", overwrite=True)
        meeting.tell(0)
        outcomes["after each other"] = ("", "")
        for number in range(len(parts)):
            if number == own_part:
                outcomes["after each other"] = save(root / "turns", overwrite=True)
            meeting.tell(0)
        outcomes["warnings"] = list(lines.found)
        own = [save(root / f"own-{own_part}-{number}", overwrite=number == 1) for number in (0, 1, 1, 2, 3)]
        outcomes["paths of their own"] = [text for _, text in own]
        meeting.tell(0)
        paths = [root / "once", root / "turns", *(root / f"own-{own_part}-{number}" for number in range(4))]
        outcomes["claims"] = [is_claimed(path) for path in paths]
        lines.found.clear()
        save(root / f"told-{own_part}", process_group=meshes[own_part].get_group())
        outcomes["warnings, told"] = list(lines.found)
        meeting.tell(0)
        taken = root / "taken" if own_part == 0 else root / "free"
        if own_part == 0 and me == parts[0][0]:
            taken.mkdir()
            (taken / "mine").touch()
        meeting.tell(0)
        save(taken)  # the claim of a save that fails is given back
        meeting.tell(0)
        outcomes["after a failure"] = save(root / "taken", overwrite=True)[1] if own_part == 1 else ""
        meeting.tell(0)
    return outcomes


class JobTest(InFolder):
    @parameterized.expand(
        [
            (name, parts, kind)
            for name, parts in (("alone", [[0], [1]]), ("stages", [[0, 1], [2, 3]]))
            for kind in ("save", "async_save")
        ]
    )
    def test_different_ranks_of_one_job(self, name: str, parts: list[list[int]], kind: str) -> None:
        by_rank = run_on_ranks(save_in_parts, 2 * len(parts[0]), self.root, parts, kind)
        leaders = [by_rank[ranks[0]] for ranks in parts]
        for ranks in parts:
            for rank in ranks[1:]:
                check_same("on both ranks", by_rank[rank]["at once"], by_rank[ranks[0]]["at once"])
        for what, place in (("at once", "once"), ("after each other", "turns")):
            errors = [leader[what] for leader in leaders]
            check_same(what, sorted(kind for kind, _ in errors), ["", "CheckpointError"])
            winner = [kind for kind, _ in errors].index("")
            text = errors[1 - winner][1]
            for word in (str(self.root / place), "process_group=", *(str(ranks) for ranks in parts)):
                self.assertIn(word, text)
            check_same("there", fsdp_optim.load(self.root / place).state["extra"], winner)
        for rank, outcomes in enumerate(by_rank):
            check_same("paths of their own", outcomes["paths of their own"], ["", "", "", "", ""])
            check_same("paths that are claimed", outcomes["claims"], [False] * 5 + [True])  # so that no keys add up
            check_same("warnings where it was told", outcomes["warnings, told"], [])
            check_same("warnings", bool(outcomes["warnings"]), name == "alone")
            for line in outcomes["warnings"]:
                for word in (f"rank {rank}", "process_group=", str(self.root)):
                    self.assertIn(word, line)
        self.assertIn("is not a checkpoint", leaders[1]["after a failure"])


class NotInitializedTest(InFolder):
    def save(self, **environment: str) -> list[str]:
        with mock.patch.dict(os.environ, environment), Lines() as lines:
            fsdp_optim.save(self.path, nn.Linear(3, 2), options=fsdp_optim.SaveOptions(durable=False), overwrite=True)
            fsdp_optim.async_save(
                self.path, nn.Linear(3, 2), options=fsdp_optim.SaveOptions(durable=False), overwrite=True
            ).wait(60)
        return lines.found

    def test_one_of_several_processes(self) -> None:
        lines = self.save(WORLD_SIZE="4", RANK="2")
        check_same("lines", len(lines), 2)
        for line in lines:
            for word in (str(self.path), "process 2", "4", "init_process_group", "process_group="):
                self.assertIn(word, line)

    def test_one_process(self) -> None:
        for world_size in ("1", "", "many"):
            check_same(f"WORLD_SIZE={world_size}", self.save(WORLD_SIZE=world_size), [])
        with mock.patch.dict(os.environ):
            os.environ.pop("WORLD_SIZE", None)
            check_same("without WORLD_SIZE", self.save(), [])


def one_by_one(path: Path) -> list[str]:
    """All ranks of the job: nobody is alone, and nothing is claimed."""
    with cpu(), Lines() as lines:
        trained = Trained("FSDP2", steps=1)
        fsdp_optim.save(path, trained.model, trained.optim, options=fsdp_optim.SaveOptions(durable=False))
    store = dist.distributed_c10d._get_default_store()
    if store.check(["fsdp_optim/claims/by/0, 1"]):
        raise Differs("a save of all ranks needs no claim")
    return lines.found


class AllRanksTest(InFolder):
    def test_no_warning(self) -> None:
        check_same("warnings", run_on_ranks(one_by_one, 2, self.path), [[], []])
