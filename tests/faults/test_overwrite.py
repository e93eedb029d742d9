"""Saves over what is there: only on request, beside leftovers, and of two jobs at once."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_format import (
    Buffered,
    all_bytes,
    check_folder,
)
from kit.compare import Differs, check_same, error_text
from kit.groups import Meeting
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.refused_checkpoints import PATIENCE, WORLD, DamageTest, Error, check_outcomes, save_errors
from kit.trained import Trained
from kit.wraps import in_fsdp2
from torch.distributed.device_mesh import DeviceMesh

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class OverwriteTest(DamageTest):
    def test_only_on_request(self) -> None:
        folder = self.copy()
        was = all_bytes(folder)
        by_rank = run_on_ranks(save_errors, WORLD, folder)
        check_outcomes("without", [saved for saved, _ in by_rank], str(folder), "overwrite=True")
        check_same("the old one", all_bytes(folder), was)
        check_same("what is there", [path.name for path in self.root.iterdir()], ["damaged"])
        by_rank = run_on_ranks(save_errors, WORLD, folder, True)
        check_same(
            "errors",
            [(saved.error, saved.changed, loaded) for saved, loaded in by_rank],
            [(("", ""), [], ("", ""))] * 2,
        )
        check_folder(folder)
        if all_bytes(folder) == was:
            raise Differs("it was not overwritten")
        check_same("what is there", [path.name for path in self.root.iterdir()], ["damaged"])

    def test_a_leftover_is_removed_and_a_save_that_runs_is_not(self) -> None:
        folder = self.copy(name="step")
        running, dead = (self.root / f"step.saving-{token}" for token in ("0123456789abcdef", "fedcba9876543210"))
        others = [self.root / name for name in ("step.txt", "step.saving", "step.saving-mine", "other")]
        for leftover in (running, dead):
            leftover.mkdir()
            (leftover / "owner.lock").touch()
            (leftover / "model.safetensors").write_bytes(b"half")
        for other in others:
            other.mkdir()
            (other / "file").write_bytes(b"mine")
        with open(running / "owner.lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            by_rank = run_on_ranks(save_errors, WORLD, folder, True)
            check_same("a save that runs", all_bytes(running), {"model.safetensors": b"half", "owner.lock": b""})
            if by_rank[0][0].error != ("", ""):  # it may refuse to begin
                check_outcomes("beside a save that runs", [saved for saved, _ in by_rank], str(folder))
            check_folder(folder)
        by_rank = run_on_ranks(save_errors, WORLD, folder, True)
        check_same("errors", [(saved.error, loaded) for saved, loaded in by_rank], [(("", ""), ("", ""))] * 2)
        names = sorted(path.name for path in self.root.iterdir())
        check_same("what is there", names, sorted(["step", *(other.name for other in others)]))
        for other in others:
            check_same(other.name, all_bytes(other), {"file": b"mine"})


def two_jobs(root: Path, overwrite: bool, rounds: int) -> list[tuple[Error, Any]]:
    """Ranks 0 and 1 are one job, ranks 2 and 3 the other; what each round gave, and which job's values were there then."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    job = dist.get_rank() // 2
    mesh = meshes[job]
    trained, target = (Trained(lambda model: in_fsdp2(model, mesh), adam, steps, Buffered) for steps in (1, 1))
    with torch.no_grad():
        for param in trained.params:
            local_of(param).fill_(job)
            for value in trained.optim.state[param].values():
                local_of(value).fill_(job + 1)
    meeting, outcomes, group = Meeting(), [], mesh.get_group()
    for number in range(rounds):
        path = root / ("step" if overwrite else f"step-{number}")
        meeting.tell(0)
        error = error_text(
            lambda: fsdp_optim.save(
                path,  # noqa: B023
                trained.model,
                trained.optim,
                state={"job": job, "number": number},  # noqa: B023
                overwrite=overwrite,
                options=fsdp_optim.SaveOptions(process_group=group, timeout=PATIENCE),
            )
        )
        meeting.tell(0)
        restored = fsdp_optim.load(
            path, target.model, target.optim, options=fsdp_optim.LoadOptions(process_group=group, timeout=PATIENCE)
        )
        values = {float(v) for param in target.params for v in local_of(param).detach().flatten()}
        state = {float(v) for p in target.params for t in target.optim.state[p].values() for v in local_of(t).flatten()}
        outcomes.append((error, (restored.state["job"], restored.state["number"], sorted(values), sorted(state))))
    return outcomes


class TwoJobsTest(DamageTest):
    def test_one_wins_and_the_other_raises(self) -> None:
        by_rank = run_on_ranks(two_jobs, 4, self.root, False, 4)
        for number, cases in enumerate(zip(*by_rank, strict=True)):
            errors = [error for error, _ in cases]
            check_same("both ranks of a job", (errors[0], errors[2]), (errors[1], errors[3]))
            check_same("jobs that raised", sorted(kind for kind, _ in errors[::2]), ["", "CheckpointError"])
            winner = 0 if not errors[0][0] else 1
            self.assertIn(str(self.root / f"step-{number}"), errors[2 - 2 * winner][1])
            wanted = (winner, number, [float(winner)], [float(winner + 1)])
            check_same("what is there", [there for _, there in cases], [wanted] * 4)
            check_folder(self.root / f"step-{number}")
        check_same("what lies beside it", sorted(p.name for p in self.root.iterdir()), [f"step-{i}" for i in range(4)])

    def test_overwriting(self) -> None:
        """One after the other both may win; what is there is all of one of them."""
        by_rank = run_on_ranks(two_jobs, 4, self.root, True, 4)
        for number, cases in enumerate(zip(*by_rank, strict=True)):
            errors = [error for error, _ in cases]
            check_same("both ranks of a job", (errors[0], errors[2]), (errors[1], errors[3]))
            winners = [job for job in (0, 1) if errors[2 * job] == ("", "")]
            if not winners or {kind for kind, _ in errors} - {"", "CheckpointError"}:
                raise Differs(f"round {number}: {errors}")
            winner = cases[0][1][0]
            self.assertIn(winner, winners)
            wanted = (winner, number, [float(winner)], [float(winner + 1)])
            check_same("what is there", [there for _, there in cases], [wanted] * 4)
        check_folder(self.root / "step")
