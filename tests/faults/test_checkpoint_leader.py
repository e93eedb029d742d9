"""The end of a save in the background: a rank that dies is missed soon, and nobody needs the folder after it is done."""

from __future__ import annotations

import contextlib
import shutil
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.folders import InFolder
from kit.groups import Meeting
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save.job import Job
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import Completion

LONG, SOON = 600.0, 30.0  # seconds: the timeout of the saves, and what is much less
QUIET: dict[str, Any] = {"durable": False, "progress": False, "timeout": LONG}


class Dead(BaseException):
    """Ends the thread that writes: it announces nothing itself."""


@contextlib.contextmanager
def dies(where: str, begun: Path) -> Iterator[None]:
    """This rank's thread dies when it comes to a function of a save in the background; not before all have begun."""

    def die(*args: Any, **kwargs: Any) -> None:
        while not begun.exists():
            time.sleep(0.01)
        raise Dead

    owner = next(candidate for candidate in (Completion, Job, background) if hasattr(candidate, where))
    with mock.patch.object(owner, where, die):
        yield


def save_and_die(root: Path, cases: list[tuple[int, str]]) -> list[list[tuple[str, str]]]:
    """For each case what the ranks that live hear; and whether they heard it soon."""
    meeting, heard = Meeting(), []
    with cpu():
        trained = Trained("FSDP2", adam, steps=1)
        for dead, where in cases:
            folder = root / f"{dead} {where}"
            if dist.get_rank() == 0:
                folder.mkdir()
            meeting.tell(0)
            with dies(where, folder / "begun") if dist.get_rank() == dead else contextlib.nullcontext():
                handle = fsdp_optim.async_save(
                    folder / "step", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
                )
                meeting.tell(0)
                begun = time.monotonic()
                (folder / "begun").touch()
                with contextlib.suppress(Dead):
                    error = ("", "")
                    error = error_text(handle.wait)
                took = time.monotonic() - begun
            meeting.tell(0)  # the thread of the dead one is over, and its patches are gone
            heard.append(meeting.tell(("dead", "") if dist.get_rank() == dead else error))
            if took > SOON:
                raise Differs(f"{dead} {where}: {took:.1f} s")
        fsdp_optim.save(root / "after", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
    return heard


CASES = [(0, "_lead"), (0, "start"), (0, "finish"), (1, "start"), (2, "done")]


def take_away(root: Path, how: str) -> tuple[list[str], Any]:
    """Rank 0 takes the folder away as soon as it has waited; the others look only then."""
    meeting, taken = Meeting(), root / f"{how} taken"
    path = root / how / "step"
    real = Completion.wait_for_end

    def late(*args: Any) -> None:
        while not taken.exists():
            time.sleep(0.01)
        real(*args)

    no_grace = mock.patch("fsdp_optim.transport.completion._GRACE", 0.2)  # rank 0 does not wait until the others know
    with cpu(), no_grace, mock.patch.object(Completion, "wait_for_end", late):
        trained = Trained("FSDP2", adam, steps=1)
        handle = fsdp_optim.async_save(
            path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
        )
        if dist.get_rank() == 0:
            handle.wait()
            ways: dict[str, Callable[[], Any]] = {
                "moved": lambda: path.rename(root / how / "elsewhere"),
                "moved and removed": lambda: (shutil.move(path, root / how / "elsewhere"), shutil.rmtree(root / how)),
                "removed": lambda: shutil.rmtree(path),
                "all removed": lambda: shutil.rmtree(root / how),
                "emptied": lambda: [file.unlink() for file in path.rglob("*.*")],
            }
            ways[how]()
            taken.write_text("")
        error = error_text(lambda: handle.wait(timeout=SOON))
        saved = handle.wait() if not error[0] else None
        here = sorted(path.name for path in (root / how).glob("*/*")) if how == "moved" else []
    meeting.tell(0)
    return here, (error, str(saved.path) if saved is not None else "")


def take_away_all(root: Path, hows: list[str]) -> list[Any]:
    return [take_away(root / str(number), how) for number, how in enumerate(hows)]


class LeaderTest(InFolder):
    def test_a_rank_that_dies_is_missed_soon(self) -> None:
        by_rank = run_on_ranks(save_and_die, 3, self.root, CASES)
        for (dead, where), errors in zip(CASES, by_rank[0], strict=True):
            for rank, (kind, text) in enumerate(errors):
                if rank != dead:
                    self.assertEqual(kind, "CheckpointError", f"{dead} {where}: rank {rank}: {text}")
                    self.assertIn(f"rank {dead}", text)
                    self.assertIn("step", text)
            self.assertIsNone(fsdp_optim.latest(self.root / f"{dead} {where}"))
        self.assertEqual(fsdp_optim.latest(self.root), self.root / "after")

    def test_the_folder_is_taken_away(self) -> None:
        hows = ["moved", "moved and removed", "removed", "all removed", "emptied"]
        for number in range(len(hows)):
            (self.root / str(number)).mkdir()
        for rank, answers in enumerate(run_on_ranks(take_away_all, 2, self.root, hows)):
            for number, (how, (here, end)) in enumerate(zip(hows, answers, strict=True)):
                check_same(f"{how}, rank {rank}", end, (("", ""), str(self.root / str(number) / how / "step")))
                leftovers = [name for name in here if name.startswith(("outcome", "failed", "done", "seen", "owner"))]
                self.assertEqual(leftovers, [])


if __name__ == "__main__":
    unittest.main()
