"""Ranks on several machines, whose file system shows late, or never, what another machine has done.

There is one machine here. What tells the library of machines is replaced on each rank, and so is what a rank sees: other files at
its first looks than at the later ones, as clients of network file systems have it that keep names for seconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.catalogs import sequence_of
from kit.checkpoints import Whole, check_files, load, mine, oracle_after, save, scramble
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.managed import Run, closing_all, steps_in
from kit.optimizers import OfModel, two_groups
from kit.options import as_options
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common import seen_by_all as sharing
from fsdp_optim.checkpoint.load import opening
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import Folder, claim, folder, store, writer
from fsdp_optim.storage.posix import directory as directory
from fsdp_optim.testing import run_on_ranks

KWARGS: dict[str, Any] = {"model": Whole, "make": OfModel(two_groups)}
LOOKS = 4  # in which a rank sees nothing, or what was there before
SHORT = 0.3  # seconds, in the place of those for which ranks look
BACKGROUND = ((False,), (True,))


@contextlib.contextmanager
def machines(kind: str = "nfs4") -> Iterator[None]:
    """Each rank is on a machine of its own, and all of them have the same file system."""
    host = f"machine {dist.get_rank()} 0:42"
    with contextlib.ExitStack() as stack:
        for module in (store, claim):
            stack.enter_context(mock.patch.object(module, "this_host", return_value=host))
        for module in (claim, writer, directory):
            stack.enter_context(mock.patch.object(module, "is_of_one_machine", return_value=False))
        stack.enter_context(mock.patch.object(folder, "filesystem_type", return_value=kind))
        yield


@contextlib.contextmanager
def impatient(*modules: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            name = "SEEN_WITHIN" if module is sharing else "VISIBLE_WITHIN"
            stack.enter_context(mock.patch.object(module, name, SHORT))
        yield


def sees_late(real: Callable[..., Any], instead: Callable[..., Any], looks: int | None = LOOKS) -> Callable[..., Any]:
    """`instead` at the first looks of rank 1, or at all of them (None); else `real`."""
    left = [looks]

    def look(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != 1 or left[0] == 0:
            return real(*args, **kwargs)
        if left[0] is not None:
            left[0] -= 1
        return instead(*args, **kwargs)

    return look


def missing(self: Folder) -> Any:
    """Opens nothing, as where the checkpoint is not there."""
    raise CheckpointError(f"{self.where}: there is no such folder")


def save_here(path: Path, in_background: bool, trained: Trained | None = None, **options: Any) -> Any:
    trained = trained or Trained("FSDP2", **KWARGS)
    if in_background:
        options = {"durable": False, "progress": False, **options}
        return fsdp_optim.async_save(
            path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options)
        ).wait(60)
    return save(path, trained, **options)


# ------------------------------------------------------------------------------------------ load


def loads(path: Path, older: Path | None, looks: int | None) -> tuple[str, str]:
    """Load what rank 1 sees late, or never: it sees nothing, or an older checkpoint."""

    def instead(self: Folder) -> Any:
        return missing(self) if older is None else opened(Folder(older, PROBE))

    opened = Folder.open

    with cpu(), machines(), impatient(opening) if looks is None else contextlib.nullcontext():
        target = Trained("FSDP2", **{**KWARGS, "steps": 0})
        scramble(target)
        with mock.patch.object(Folder, "open", sees_late(Folder.open, instead, looks)):
            error = error_text(lambda: load(path, target))
        if not error[0]:
            check_same("loaded", mine(target), mine(Trained("FSDP2", **KWARGS)))
    return error


def loads_at_once(path: Path) -> tuple[str, str]:
    with mock.patch.object(opening, "check_shared", side_effect=CheckpointError("the ranks look again")):
        return loads(path, None, 0)


def saves(path: Path, steps: int = STEPS, **options: Any) -> None:
    with cpu():
        save(path, Trained("FSDP2", **{**KWARGS, "steps": steps}), **options)


def elsewhere(path: Path) -> tuple[str, str]:
    """Rank 1 has another folder at the path: neither the checkpoint, nor anything that rank 0 makes."""
    with cpu(), machines(), impatient(sharing):
        target = Trained("FSDP2", **KWARGS)
        with (
            mock.patch.object(Folder, "open", sees_late(Folder.open, missing, None)),
            mock.patch.object(store, "sees", sees_late(store.sees, lambda path: False, None)),
        ):
            return error_text(lambda: load(path, target))


class LoadTest(InFolder):
    @parameterized.expand([("nothing",), ("the one before",)])
    def test_a_checkpoint_that_is_seen_late(self, sees: str) -> None:
        run_on_ranks(saves, 2, self.path)
        older = self.root / "older"
        run_on_ranks(saves, 2, older, 1)
        errors = run_on_ranks(loads, 2, self.path, older if sees == "the one before" else None, LOOKS)
        self.assertEqual(errors, [("", "")] * 2)
        self.check_only("older", "step-1")

    def test_one_that_a_rank_never_sees(self) -> None:
        run_on_ranks(saves, 2, self.path)
        errors = run_on_ranks(loads, 3, self.path, None, None)
        check_refused(
            "never", errors, "CheckpointError", "rank 1", "not visible here after", "step-1", "there is no such folder"
        )

    def test_a_rank_that_sees_the_one_before_for_ever(self) -> None:
        run_on_ranks(saves, 2, self.path)
        older = self.root / "older"
        run_on_ranks(saves, 2, older, 1)
        errors = run_on_ranks(loads, 2, self.path, older, None)
        check_refused("never", errors, "CheckpointError", "step-1", "the ranks see different checkpoints", "share")

    def test_a_folder_that_is_not_shared_is_known_at_once(self) -> None:
        """Long before a checkpoint that is seen late would be there."""
        run_on_ranks(saves, 2, self.path)
        errors = run_on_ranks(elsewhere, 3, self.path)
        check_refused(
            "elsewhere", errors, "CheckpointError", "rank 1", "step-1", "not visible", "another folder", "rank 0"
        )
        self.check_only("step-1")

    def test_where_no_rank_sees_one_nobody_waits(self) -> None:
        errors = run_on_ranks(loads_at_once, 2, self.path)
        check_refused("nowhere", errors, "CheckpointError", "step-1", "there is no such folder")
        self.check_only()


# ------------------------------------------------------------------------------------------ save


def saves_unseen(path: Path, in_background: bool, looks: int | None) -> list[tuple[str, str]]:
    """Save where rank 1 sees the folder of the save late, or never; then save again."""
    with cpu(), machines():
        with (
            impatient(sharing) if looks is None else contextlib.nullcontext(),
            mock.patch.object(store, "sees", sees_late(store.sees, lambda path: False, looks)),
        ):
            errors = [error_text(lambda: save_here(path, in_background))]
        return [*errors, error_text(lambda: save_here(path, in_background, overwrite=True))]


def saves_as(path: Path, in_background: bool, kind: str, strategy: str = "auto") -> None:
    with cpu(), machines(kind):
        save_here(path, in_background, strategy=strategy)


def warned_of(path: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fsdp_optim")
    log.addHandler(handler)
    try:
        saves_as(path, False, "nfs4", "in_place")
    finally:
        log.removeHandler(handler)
    return lines


@contextlib.contextmanager
def opens_late(number: int, looks: int | None) -> Iterator[None]:
    """Rank 1 sees the files into which it writes late; `number`: how opening them fails before."""

    def is_data(path: Any, flags: int, *args: Any, **kwargs: Any) -> bool:
        return dist.get_rank() == 1 and flags & os.O_ACCMODE == os.O_WRONLY and Path(path).suffix == ".safetensors"

    real, left = os.open, [looks]

    def late(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if left[0] != 0 and is_data(path, flags):
            left[0] = None if left[0] is None else left[0] - 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *args, **kwargs)

    with mock.patch.object(os, "open", late):
        yield


def writes_late(path: Path, in_background: bool, number: int, looks: int | None) -> tuple[str, str]:
    patience = impatient(writer) if looks is None else contextlib.nullcontext()
    with cpu(), machines("lustre"), opens_late(number, looks), patience:
        return error_text(lambda: save_here(path, in_background))


class SaveTest(InFolder):
    @parameterized.expand(BACKGROUND)
    def test_the_folder_of_the_save_is_seen_late(self, in_background: bool) -> None:
        for first, second in run_on_ranks(saves_unseen, 2, self.path, in_background, LOOKS):
            self.assertEqual([first, second], [("", "")] * 2)
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")

    @parameterized.expand(BACKGROUND)
    def test_a_rank_that_never_sees_it_is_named_on_all(self, in_background: bool) -> None:
        by_rank = run_on_ranks(saves_unseen, 3, self.path, in_background, None)
        first, second = zip(*by_rank, strict=True)
        check_refused("never", first, "CheckpointError", "rank 1", "step-1", "not visible", f"{SHORT:g} s", "rank 0")
        self.assertEqual(second, (("", ""),) * 3, "the claim on the path was not released")
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")

    @parameterized.expand([(errno.ENOENT, False), (errno.ESTALE, False), (errno.ENOENT, True)])
    def test_a_file_that_is_seen_late(self, number: int, in_background: bool) -> None:
        errors = run_on_ranks(writes_late, 2, self.path, in_background, number, LOOKS)
        self.assertEqual(errors, [("", "")] * 2)
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")

    @parameterized.expand(BACKGROUND)
    def test_a_file_that_is_never_seen(self, in_background: bool) -> None:
        errors = run_on_ranks(writes_late, 2, self.path, in_background, errno.ENOENT, None)
        check_refused("never", errors, "CheckpointError", "rank 1", "cannot open", ".safetensors", "all ranks share")
        self.check_only()

    @parameterized.expand(
        [("nfs4", False), ("beegfs", False), ("fuse.juicefs", False), ("lustre", True), ("ceph", True)]
    )
    def test_files_of_one_rank_where_a_client_writes_pages_as_it_knows_them(self, kind: str, in_place: bool) -> None:
        for in_background in (False, True):
            path = self.root / f"{in_background}"
            run_on_ranks(saves_as, 2, path, in_background, kind)
            check_files(path, oracle_after(STEPS))
            self.assertEqual((path / "model.safetensors").exists(), in_place)

    def test_in_place_where_the_caller_says_so_is_warned_of(self) -> None:
        by_rank = run_on_ranks(warned_of, 2, self.path)
        [line] = by_rank[0]
        self.assertIn('strategy="in_place"', line)
        self.assertIn("bytes are lost", line)
        self.assertEqual(by_rank[1], [])
        self.assertTrue((self.path / "model.safetensors").exists())


# ------------------------------------------------------------------------------------------ managers


def makes_a_manager(root: Path, looks: int | None) -> list[Any]:
    with cpu(), machines():
        runs: list[Run] = []
        with (
            impatient(sharing) if looks is None else contextlib.nullcontext(),
            mock.patch.object(store, "sees", sees_late(store.sees, lambda path: False, looks)),
        ):
            error = error_text(lambda: runs.append(Run(root, "FSDP2")))
        with closing_all(*runs):
            return [error, sorted(os.listdir(root)) if root.exists() else None]


@contextlib.contextmanager
def sees_nothing_new(root: Path) -> Iterator[None]:
    """Every listing of a folder is as it was in the beginning."""
    kept, real = sorted(os.listdir(root)), os.listdir

    def listed(path: Any = ".") -> list[str]:
        return list(kept) if str(path) == str(root) else real(path)

    with mock.patch.object(os, "listdir", listed):
        yield


def manages_with_old_listings(root: Path) -> None:
    """A run whose rank 0 sees, from the second save on, no checkpoint that it has made."""
    with cpu(), machines():
        run = Run(root, "FSDP2", keep_last=None)
        with run.manager:
            run.manager.resume()
            with sees_nothing_new(root):
                run.steps(range(1, 9))
                run.manager.wait()


class ManagerTest(InFolder):
    def test_a_folder_that_is_not_shared(self) -> None:
        by_rank = run_on_ranks(makes_a_manager, 3, self.root / "run", None)
        check_refused(
            "unshared",
            [outcome[0] for outcome in by_rank],
            "CheckpointError",
            "rank 1",
            "not visible",
            "another folder",
        )
        self.check_only()

    def test_a_folder_that_is_seen_late(self) -> None:
        by_rank = run_on_ranks(makes_a_manager, 2, self.root / "run", LOOKS)
        self.assertEqual([outcome[0] for outcome in by_rank], [("", "")] * 2)

    def test_numbers_grow_though_listings_are_old(self) -> None:
        """So that the newest is the newest for `latest`, and for the rules by which checkpoints stay."""
        run_on_ranks(manages_with_old_listings, 2, self.root)
        self.assertEqual(steps_in(self.root), [8, 6, 4, 2])
        numbers = [sequence_of(self.root / f"step-{step:08}") for step in (2, 4, 6, 8)]
        self.assertEqual(sorted(set(numbers)), numbers)
        self.assertEqual(fsdp_optim.latest(self.root), self.root / "step-00000008")


if __name__ == "__main__":
    unittest.main()
