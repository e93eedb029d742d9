"""A save that the file system fails on any rank: all ranks raise one CheckpointError, and the old checkpoint stays."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_damage import (
    MAKING,
    MOVING,
    WRITING,
    failing,
    nth_call,
)
from kit.checkpoint_format import (
    all_bytes,
)
from kit.compare import Differs, check_same, error_text
from kit.groups import Meeting
from kit.local_parts import local_of
from kit.options import as_options
from kit.refused_checkpoints import (
    PATIENCE,
    WORLD,
    DamageTest,
    Outcome,
    check_outcomes,
    load_both_ways,
    outcome_of,
    save_errors,
    save_good,
    trained,
)
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Saver:
    """Saves to one path again and again, and sees what came of it. The same on all ranks."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.model, self.target = trained(3), trained(1)
        self.meeting = Meeting()
        self.number = 0
        self.found: list[str] = []
        self.tried: list[str] = []
        self.save(overwrite=False)
        self.complete = 0

    def save(self, overwrite: bool = True) -> None:
        fsdp_optim.save(
            self.path,
            self.model.model,
            self.model.optim,
            state={"number": self.number},
            overwrite=overwrite,
            **as_options(fsdp_optim.SaveOptions, **self.options, timeout=PATIENCE),
        )

    def attempt(self) -> Outcome:
        """One save over the old one, of other values, on this rank."""
        self.number += 1
        with torch.no_grad():
            for param in self.model.params:
                local_of(param).fill_(self.number)
        return outcome_of(self.save, self.model)

    def probe(self, what: str, own_outcome: Outcome, *words: str, must_fail: bool = True) -> list[Outcome]:
        """What is wrong is noted. Unless it must fail, it may also have succeeded, or failed after the new one stood."""
        outcomes = self.meeting.tell(own_outcome)
        self.tried.append(what)
        try:
            if must_fail or any(outcome.error[0] for outcome in outcomes):
                check_outcomes(what, outcomes, *words)
            numbers = self.meeting.tell(self.number_there())
            allowed = {self.complete}
            if not must_fail:
                allowed = {self.complete, self.number} if outcomes[0].error[0] else {self.number}
            if len(set(numbers)) != 1 or numbers[0] not in allowed:
                raise Differs(f"{what}: {outcomes[0].error}: the path then has save {numbers}, not {allowed}")
            self.complete = numbers[0]
        except Differs as error:
            self.found.append(str(error))
        return outcomes

    def judge_success(self, what: str, outcome: Outcome) -> None:
        """Nothing came in the way of this one."""
        errors = self.meeting.tell(outcome.error)
        if any(kind for kind, _ in errors):
            self.found.append(f"{what}: {errors}")
        else:
            self.complete = self.number

    def number_there(self) -> Any:
        """Which save the path has, all of it; or what is wrong."""
        try:
            restored = fsdp_optim.load(
                self.path, self.target.model, self.target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE)
            )
            number = restored.state["number"]
            wanted = None if number == 0 else float(number)
            values = {float(v) for param in self.target.params for v in local_of(param).detach().flatten()}
            if wanted is not None and values - {wanted}:
                return f"save {number} with values of {sorted(values)[:5]}"
            return number
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def finish(self) -> tuple[list[str], list[str]]:
        """Now nothing fails: the next save works, and no leftover is there. (tried, wrong)."""
        outcome = self.attempt()
        errors = self.meeting.tell(outcome.error)
        if any(kind for kind, _ in errors):
            self.found.append(f"afterwards: {errors}")
        elif self.number_there() != self.number:
            self.found.append(f"afterwards: {self.number_there()}, not {self.number}")
        self.meeting.tell(0)
        names = sorted(path.name for path in self.path.parent.iterdir() if path.name.startswith(self.path.name))
        if names != [self.path.name]:
            self.found.append(f"leftovers: {names}")
        return self.tried, self.found


def writing_fails(root: Path, group: str, number: int) -> tuple[list[str], list[str]]:
    """Every call of some kind fails once, on each rank in turn."""
    functions = {"writing": WRITING, "making": MAKING, "moving": MOVING}[group]
    saver = Saver(root / "step")
    for rank in range(WORLD):
        for nth in (*range(6), *range(6, 60, 9)):
            own_functions = functions if rank == dist.get_rank() else []
            with nth_call(own_functions, nth, failing(number)) as calls:
                outcome = saver.attempt()
            if not saver.meeting.tell(calls.reached)[rank]:
                saver.judge_success(f"nothing failed on rank {rank}", outcome)
                break
            what = f"call {nth} on rank {rank}"
            saver.probe(what, outcome, os.strerror(number), must_fail=group == "writing")
            if len(saver.found) > 5:
                return saver.tried, saver.found
    return saver.finish()


def files_may_not_grow(root: Path, in_background: bool) -> tuple[list[str], list[str]]:
    """The system itself lets one rank write no byte behind the first ones of a file."""
    saver = Saver(root / "step")
    if in_background:

        def save(overwrite: bool = True) -> None:
            handle = fsdp_optim.async_save(
                saver.path,
                saver.model.model,
                saver.model.optim,
                state={"number": saver.number},
                overwrite=overwrite,
                options=fsdp_optim.SaveOptions(timeout=PATIENCE),
            )
            handle.wait(PATIENCE)

        saver.save = save  # type: ignore[method-assign]
    for rank in range(WORLD):
        for most in (0, 9, 200):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if dist.get_rank() == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                outcome = saver.attempt()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            saver.probe(f"{most} bytes on rank {rank}", outcome, os.strerror(errno.EFBIG))
    return saver.finish()


PAGE = 4096


def filled_up(root: Path) -> tuple[list[str], list[str]]:
    """A small disk that is full, and has a page more each time, until a save fits."""
    saver = Saver(root / "step")
    filler = root / "filler"
    for pages in (*range(8), *range(8, 400, 5)):
        if dist.get_rank() == 0:
            filler.unlink(missing_ok=True)
            for leftover in root.glob("step.*"):
                shutil.rmtree(leftover)
            free = os.statvfs(root).f_bavail
            filler.write_bytes(bytes(max(0, free - pages) * PAGE))
        saver.meeting.tell(0)
        outcome = saver.attempt()
        if not any(kind for kind, _ in saver.meeting.tell(outcome.error)):
            saver.judge_success(f"{pages} pages", outcome)
            break
        saver.probe(f"{pages} pages", outcome, os.strerror(errno.ENOSPC))
    else:
        saver.found.append("no save fitted")
    saver.meeting.tell(0)
    if dist.get_rank() == 0:
        filler.unlink()
    saver.meeting.tell(0)
    return saver.finish()


def vanishing(root: Path, what: str) -> tuple[list[str], list[str]]:
    """The folder that is written to is removed in the middle, by each rank in turn."""
    saver = Saver(root / "step")

    def vanish() -> None:
        saving = list(root.glob("step.saving-*"))
        for folder in [root] if saving and what == "all" else saving:
            while folder.exists():  # another rank may make a file in it just then
                shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)

    for rank in range(WORLD):
        for nth in (0, 1, 2, 5, 9, 14):
            gone: list[Path] = []
            functions = [*WRITING, *MAKING] if rank == dist.get_rank() else []
            with nth_call(functions, nth, vanish):
                outcome = saver.attempt()
            if not saver.meeting.tell(bool(gone))[rank]:
                saver.judge_success(f"nothing vanished at call {nth} of rank {rank}", outcome)
                continue
            if what == "saving":
                saver.probe(f"at call {nth} of rank {rank}", outcome, str(saver.path))
            else:
                saver.tried.append(f"at call {nth} of rank {rank}")
                try:
                    check_outcomes(saver.tried[-1], saver.meeting.tell(outcome), str(saver.path))
                except Differs as error:
                    saver.found.append(str(error))
                saver.meeting.tell(0)
                if dist.get_rank() == 0:
                    shutil.rmtree(root, ignore_errors=True)
                    root.mkdir()
                saver.meeting.tell(0)
                saver.number = 0
                saver.save()
                saver.complete = 0
    return saver.finish()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs; gives what mounts it again with other options."""

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise unittest.SkipTest(f"mounting is not permitted here: {done.stderr.strip()}")

    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise unittest.SkipTest("mounting is not permitted here")
    mount(f"size={size}")
    try:
        yield lambda option: mount(f"remount,{option},size={size}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def save_by_some_ranks_then_by_others(path: Path) -> tuple[str, str]:
    """Ranks 0 and 1 are refused, because something is there; then rank 2 may replace it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    has_failed = Meeting()
    is_second = dist.get_rank() == 2
    options = fsdp_optim.SaveOptions(durable=False, progress=False, process_group=groups[is_second])
    if is_second:
        has_failed.tell(0)
    error = error_text(lambda: fsdp_optim.save(path, torch.nn.Linear(2, 2), options=options, overwrite=is_second))
    if not is_second:
        has_failed.tell(0)
    return error


class OtherRanksTest(unittest.TestCase):
    def test_ranks_that_were_refused_keep_no_path_from_others(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step"
            fsdp_optim.save(path, torch.nn.Linear(2, 2), options=fsdp_optim.SaveOptions(durable=False, progress=False))
            first, second, third = run_on_ranks(save_by_some_ranks_then_by_others, 3, path)
        self.assertEqual([first, third], [second, ("", "")])
        self.assertIn("already exists", first[1])


class SavingFailsTest(DamageTest):
    def check_tried(self, by_rank: list[tuple[list[str], list[str]]], at_least: int) -> None:
        for rank, (tried, wrong) in enumerate(by_rank):
            if wrong:
                raise Differs(f"rank {rank}, {len(wrong)} of {len(tried)}:\n" + "\n".join(wrong))
        tried = by_rank[0][0]
        if len(tried) < at_least:
            raise Differs(f"only {len(tried)} failures were tried: {tried}")

    @parameterized.expand([("writing", errno.ENOSPC, 4), ("making", errno.EACCES, 4), ("moving", errno.EROFS, 2)])
    def test_each_call_on_each_rank_in_turn(self, group: str, number: int, at_least: int) -> None:
        self.check_tried(run_on_ranks(writing_fails, WORLD, self.root, group, number), at_least)

    @parameterized.expand([("save", False), ("async_save", True)])
    def test_files_may_not_grow_on_each_rank_in_turn(self, _: str, in_background: bool) -> None:
        self.check_tried(run_on_ranks(files_may_not_grow, WORLD, self.root, in_background), 3 * WORLD)

    def test_a_full_disk(self) -> None:
        with small_disk(self.root / "disk", "1m"):
            self.check_tried(run_on_ranks(filled_up, WORLD, self.root / "disk"), 5)

    @parameterized.expand([("saving",), ("all",)])
    def test_a_folder_vanishes(self, what: str) -> None:
        root = self.root / "run"
        root.mkdir()
        self.check_tried(run_on_ranks(vanishing, WORLD, root, what), WORLD + 1)

    def test_a_read_only_disk(self) -> None:
        with small_disk(self.root / "disk", "1m") as remount:
            folder = self.root / "disk" / "step"
            run_on_ranks(save_good, WORLD, folder)
            was = all_bytes(folder)
            remount("ro")
            for path, overwrite in ((folder, True), (self.root / "disk" / "new", False)):
                by_rank = run_on_ranks(save_errors, WORLD, path, overwrite)
                check_outcomes(path.name, [saved for saved, _ in by_rank], os.strerror(errno.EROFS), str(path))
            check_same("the old one", all_bytes(folder), was)
            run_on_ranks(load_both_ways, WORLD, [], folder, "whole", [True])  # reading writes nothing

    def test_a_file_where_a_folder_should_be(self) -> None:
        (self.root / "file").write_bytes(b"mine")
        for name in ("file", "file/step", "file/run/step"):
            by_rank = run_on_ranks(save_errors, WORLD, self.root / name)
            check_outcomes(name, [saved for saved, _ in by_rank], str(self.root / "file"))
        check_same("the file", all_bytes(self.root), {"file": b"mine"})
        check_same("what is there", [path.name for path in self.root.iterdir()], ["file"])

    def test_an_immutable_folder(self) -> None:
        folder = self.root / "run"
        folder.mkdir()
        if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", str(folder)], check=False).returncode:
            self.skipTest("chattr +i does nothing here")
        try:
            by_rank = run_on_ranks(save_errors, WORLD, folder / "step")
        finally:
            subprocess.run(["chattr", "-i", str(folder)], check=True)
        check_outcomes("immutable", [saved for saved, _ in by_rank], os.strerror(errno.EPERM), str(folder))
