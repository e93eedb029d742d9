"""Everything that saves and loads, on ranks of several hosts that share a folder; each value is compared with the oracle's.

checkpoints.py FOLDER PART [PART ...]      parts: save, background, manager, offline, load, rounds
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.checkpoints import Whole, mine, scramble
from kit.compare import check_same
from kit.optimizers import OfModel, two_groups
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim.storage.base import VISIBLE_WITHIN

KWARGS: dict[str, Any] = {"model": Whole, "make": OfModel(two_groups)}
TIMEOUT = float(os.environ.get("TIMEOUT", "120"))
QUIET: dict[str, Any] = {"progress": False, "timeout": TIMEOUT}


def say(text: str) -> None:
    print(text, flush=True)


def trained(steps: int = 3) -> Trained:
    return Trained("FSDP2", steps=steps, **KWARGS)


def check_loads(path: Path | str, steps: int) -> None:
    """Load at once into a model of other values, on all ranks; the values are those after so many steps."""
    fresh = trained(0)
    scramble(fresh)
    fsdp_optim.load(path, fresh.model, fresh.optim, **as_options(fsdp_optim.LoadOptions, **QUIET, compare=True))
    check_same(f"{path}", mine(fresh), mine(trained(steps)))


def check_listed(root: Path, steps: list[int]) -> None:
    """This host lists the checkpoints of these steps, at the latest some seconds after another host has made them."""
    end = time.monotonic() + VISIBLE_WITHIN
    while sorted(info.step or 0 for info in fsdp_optim.checkpoints(root)) != steps and time.monotonic() < end:
        time.sleep(0.2)
    listed = fsdp_optim.checkpoints(root)
    check_same(f"listed {listed}", sorted(info.step or 0 for info in listed), steps)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        say(f"{what}: {time.monotonic() - begun:.2f} s")


def save(root: Path) -> None:
    """Each strategy, and again over what is there."""
    for strategy in ("auto", "per_rank_files", "in_place"):
        for steps in (1, 2):
            with timed(f"save {strategy} {steps}"):
                training = trained(steps)
                fsdp_optim.save(
                    root / strategy,
                    training.model,
                    training.optim,
                    overwrite=True,
                    step=steps,
                    **as_options(fsdp_optim.SaveOptions, **QUIET, strategy=strategy),
                )
            check_loads(root / strategy, steps)


def background(root: Path) -> None:
    """Several saves in the background, and one to a URL."""
    training = trained(1)
    for number in range(3):
        with timed(f"async_save {number}"):
            fsdp_optim.async_save(
                root / f"step-{number}",
                training.model,
                training.optim,
                step=number,
                **as_options(fsdp_optim.SaveOptions, **QUIET),
            ).wait()
        check_loads(root / f"step-{number}", 1)
    with timed("async_save over"):
        longer = trained(2)
        fsdp_optim.async_save(
            root / "step-0",
            longer.model,
            longer.optim,
            overwrite=True,
            step=9,
            **as_options(fsdp_optim.SaveOptions, **QUIET),
        ).wait()
    check_loads(root / "step-0", 2)
    check_listed(root, [1, 2, 9])
    check_same("latest", str(fsdp_optim.latest(root)), str(root / "step-0"))
    with timed("async_save to a URL"):
        url = f"file://{root}/by-url"
        fsdp_optim.async_save(
            url, training.model, training.optim, step=10, **as_options(fsdp_optim.SaveOptions, **QUIET)
        ).wait()
    check_loads(url, 1)


def manager(root: Path) -> None:
    """A managed run: saves, keeps, goes back, is closed, and resumes."""
    training = trained(0)
    options: dict[str, Any] = {"every": 2, "keep_last": 2, "signals": (), **QUIET}
    with fsdp_optim.CheckpointManager(
        root, training.model, training.optim, **as_options(fsdp_optim.ManagerOptions, **options)
    ) as managed:
        check_same("fresh", managed.resume(), 0)
        for step in range(1, 8):
            training.step(range(step - 1, step))
            managed.step(step)
        managed.wait()
        check_listed(root, [4, 6])
        check_same("back", managed.rollback(to=4), 4)
        check_same("values", mine(training)["state"], mine(trained(4))["state"])
        training.step(range(4, 5))
        managed.save(5)
    check_listed(root, [4, 5])
    again = trained(0)
    with fsdp_optim.CheckpointManager(
        root, again.model, again.optim, **as_options(fsdp_optim.ManagerOptions, **options)
    ) as managed:
        check_same("resumed", managed.resume(), 5)
    check_same("values", mine(again), mine(trained(5)))


def offline(root: Path) -> None:
    """verify and convert, by all ranks together."""
    training = trained(2)
    fsdp_optim.save(root / "saved", training.model, training.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
    with timed("convert"):
        fsdp_optim.convert(
            root / "saved",
            root / "converted",
            format="dcp",
            options=fsdp_optim.ConvertOptions(progress=False, timeout=TIMEOUT),
        )
    check_loads(root / "converted", 2)
    fsdp_optim.verify(root / "converted")


def load(root: Path) -> None:
    """What another number of hosts has saved."""
    check_loads(root / "auto", 2)
    again = trained(0)
    resumed = fsdp_optim.resume(
        root / "background", again.model, again.optim, **as_options(fsdp_optim.LoadOptions, **QUIET)
    )
    check_same("resumed", resumed is not None, True)


def rounds(root: Path) -> None:
    """Save in the background again and again, until the test ends it."""
    training = trained(1)
    root.mkdir(exist_ok=True)
    for number in range(10_000):
        fsdp_optim.async_save(
            root / f"step-{number % 3}",
            training.model,
            training.optim,
            overwrite=True,
            step=number,
            **as_options(fsdp_optim.SaveOptions, **QUIET),
        ).wait()
        say(f"round {number}")


PARTS = {part.__name__: part for part in (save, background, manager, offline, load, rounds)}


def main(folder: str, *parts: str) -> None:
    dist.init_process_group("gloo")
    root = Path(folder)
    with cpu():
        for part in parts:
            place = root if part in ("load", "save") else root / part
            if part != "load" and dist.get_rank() == 0:
                place.mkdir(parents=True, exist_ok=True)
            with timed(part):
                PARTS[part](place)
            say(f"done {part}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
