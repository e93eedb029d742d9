"""Folders of many small checkpoints with arbitrary save times and clocks."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import fsdp_optim
from kit.checkpoint_format import read_manifest
from kit.compare import check_same
from kit.folders import InFolder
from kit.options import as_options
from kit.retention import name_of_step, save_managed

HOUR = 3600 * 10**9

LOG = "fsdp_optim"


def save(path: Path, model: nn.Module | None = None, weights_only: bool = False, **options: Any) -> None:
    model = model or nn.Linear(3, 2)
    optim = None if weights_only else torch.optim.SGD(model.parameters())
    fsdp_optim.save(
        path, model, optim, **as_options(fsdp_optim.SaveOptions, **{"durable": False, "progress": False, **options})
    )


def load(path: Path) -> Any:
    return fsdp_optim.load(path, nn.Linear(3, 2))


@contextmanager
def clock(hours: float) -> Iterator[None]:
    """A context in which the machine's clock is wrong by this much."""
    real = time.time_ns
    with mock.patch.object(time, "time_ns", side_effect=lambda: real() + int(hours * HOUR)):
        yield


def sequence_of(folder: Path) -> int:
    return int(read_manifest(folder)["brief"]["sequence"])


class CatalogTest(InFolder):
    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())

    def keep(
        self, step: int, keep_last: int, model: nn.Module | None = None, weights_only: bool = False, **options: Any
    ) -> None:
        """Save a step as a manager that keeps so many."""
        model = model or nn.Linear(3, 2)
        optim = None if weights_only else torch.optim.SGD(model.parameters())
        save_managed(self.root, step, model, optim, keep_last=keep_last, **options)

    def check_steps(self, *steps: int) -> None:
        self.check_only(*map(name_of_step, steps))

    def check_latest(self, name: str) -> None:
        newest = fsdp_optim.latest(self.root)
        check_same("latest", newest.name if newest is not None else None, name)


def failing(function: Any, names: Sequence[str], number: int) -> Any:
    """A function of `os` that fails for paths with one of these names in them."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and any(name in Path(path).parts for name in names):
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *args, **kwargs)

    return call


@contextmanager
def unreadable(*names: str, number: int = errno.EACCES) -> Iterator[None]:
    """A context in which every function of `os` fails for some paths."""
    with (
        mock.patch.object(os, "stat", failing(os.stat, names, number)),
        mock.patch.object(os, "lstat", failing(os.lstat, names, number)),
        mock.patch.object(os, "open", failing(os.open, names, number)),
        mock.patch.object(os, "listdir", failing(os.listdir, names, number)),
        mock.patch.object(os, "scandir", failing(os.scandir, names, number)),
    ):
        yield


@contextmanager
def failing_reads(end: str, number: int = errno.EIO) -> Iterator[None]:
    """A context in which reads of open files whose paths end so fail."""

    def reading(function: Any) -> Any:
        def call(fd: int, *args: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(end):
                raise OSError(number, os.strerror(number))
            return function(fd, *args)

        return call

    with ExitStack() as stack:
        for name in ("read", "pread", "preadv"):
            stack.enter_context(mock.patch.object(os, name, reading(getattr(os, name))))
        yield
