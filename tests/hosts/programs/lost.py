"""A job that stops in the middle of a save, so that a test can take a host from it just there; and the job after it.

lost.py save CALL PHASE RANKS FOLDER     RANKS (as 0,1) stop in the second save until the file `go` is in the run's folder
lost.py resume FOLDER [FOLDER ...]       continues from what is there, and saves number 9
lost.py look FOLDER [FOLDER ...]         loads every checkpoint
lost.py train FOLDER STEPS               continues from the newest checkpoint, and saves each step in the background

The variable LOST_AFTER has the seconds after which a silent rank or store counts as lost; other waits are shorter then too. Each
rank tells what it finds as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts.programs.numbered import QUIET, Numbered
from kit.options import as_options

import fsdp_optim
from fsdp_optim.checkpoint.save import background, foreground, save_contents
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.storage.posix import FolderStaging
from fsdp_optim.transport import completion
from fsdp_optim.transport.job import job_store, pulse

LAST = 9
"""The number of the save of a job that continues."""


def say(text: str) -> None:
    print(text, flush=True)


def tell(**facts: Any) -> None:
    """Tell the test something, as JSON with the time."""
    say(json.dumps({"at": time.time(), **facts}))


def hold(phase: str) -> None:
    """Stop this thread until the test lets it continue."""
    say(f"at {phase}")
    wait_for_file("go")
    say("continues")


def wait_for_file(name: str) -> None:
    """Wait until the test has put a file into the folder of the run."""
    while not Path(os.environ["BENCH_RUN"], name).exists():
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------- the phases


def around(owner: Any, name: str, phase: str, *, after: bool, when: Callable[..., bool] = lambda *_: True) -> None:
    """Have this process stop once, before or after a function is called (for arguments for which `when` is true)."""
    original = vars(owner)[name]
    function = original.__func__ if isinstance(original, classmethod) else original
    held = []

    def called(*args: Any, **kwargs: Any) -> Any:
        is_here = not held and when(*args)
        if is_here:
            held.append(phase)
        if is_here and not after:
            hold(phase)
        result = function(*args, **kwargs)
        if is_here and after:
            hold(phase)
        return result

    setattr(owner, name, classmethod(called) if isinstance(original, classmethod) else called)


def arm(phase: str) -> None:
    """Have this process stop in a phase of the next save."""
    if phase == "begun":  # the values are read, and no file is made
        around(save_contents.SaveContents, "read", phase, after=True)
    elif phase == "writing":
        around(RankWriter, "write", phase, after=True)
    elif phase == "written":  # and not reported yet
        around(RankWriter, "finish", phase, after=True)
    elif phase == "finishing":  # on the leader, which has all reports
        around(foreground, "finish", phase, after=False)
        around(background, "finish", phase, after=False)
    elif phase == "commit":  # the leader has decided that the save ends well
        around(FolderStaging, "commit", phase, after=False)
    elif phase == "manifest":  # it is written, and the folder has not its name yet
        around(FolderStaging, "take_place", phase, after=False)
    elif phase == "renames":  # the earlier checkpoint has lost its name, and the new one has it not yet
        around(Path, "rename", phase, after=True, when=lambda _, target: ".old-" in str(target))
    elif phase == "committed":  # and the others do not know it
        around(foreground, "finish", phase, after=True)
        around(background, "finish", phase, after=True)
    elif phase != "before":
        raise ValueError(phase)


# ---------------------------------------------------------------------------------------------------- the programs


def save(call: str, phase: str, ranks: str, folder: str) -> None:
    """Save twice, and stop in the second save; what each rank hears of it."""
    root, numbered = Path(folder), Numbered()
    fsdp_optim.save(root / "step-1", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(1)))
    say("saved 1")
    wait_for_file("armed")
    if str(dist.get_rank()) in ranks.split(","):
        arm(phase)
    if phase == "before" and str(dist.get_rank()) in ranks.split(","):
        hold(phase)
    path = root / ("step-1" if phase == "renames" else "step-2")
    try:
        if call == "save":
            fsdp_optim.save(
                path, overwrite=phase == "renames", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2))
            )
        else:
            handle = fsdp_optim.async_save(
                path, overwrite=phase == "renames", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2))
            )
            numbered.set(3)  # the training continues
            handle.wait()
    except Exception as error:
        tell(error=type(error).__name__, ours=isinstance(error, fsdp_optim.FsdpOptimError), text=str(error))
    else:
        tell(error="", ours=True, text="")
    wait_for_file("over")


def resume(*folders: str) -> None:
    """What a job on the hosts that are left does: it continues from the newest checkpoint, and saves."""
    for root in map(Path, folders):
        numbered = Numbered()
        newest = fsdp_optim.latest(root)
        restored = fsdp_optim.resume(
            root, numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET)
        )
        numbers = numbered.numbers() if restored is not None else []
        before = sorted(os.listdir(root))
        fsdp_optim.save(root / f"step-{LAST}", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(LAST)))
        tell(folder=root.name, newest=str(newest), numbers=numbers, before=before, after=sorted(os.listdir(root)))


def look(*folders: str) -> None:
    """Load every checkpoint that is listed as complete."""
    for root in map(Path, folders):
        numbered = Numbered()
        listed = fsdp_optim.checkpoints(root)
        numbers = {Path(info.path).name: numbered.load(info.path) for info in listed if info.complete}
        incomplete = [str(info.path) for info in listed if not info.complete]
        newest = str(fsdp_optim.latest(root))
        tell(folder=root.name, numbers=numbers, incomplete=incomplete, newest=newest, names=sorted(os.listdir(root)))


def train(folder: str, steps: str) -> None:
    """A job that its launcher starts again and again, until it has made all steps."""
    root, numbered = Path(folder), Numbered()
    restored = fsdp_optim.resume(root, numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))
    first = int(restored.state["number"]) + 1 if restored is not None else 1
    if restored is not None and numbered.numbers() != [first - 1]:
        raise AssertionError(f"{first - 1} is a mixture of {numbered.numbers()}")
    tell(first=first, ranks=dist.get_world_size())
    for step in range(first, int(steps) + 1):
        fsdp_optim.async_save(root / f"step-{step}", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(step)))
        dist.all_reduce(torch.ones(1))  # as a training step does, which fails where a host is gone
        time.sleep(0.05)
        say(f"step {step}")
    fsdp_optim.wait_for_saves()
    say("done")


PROGRAMS = {program.__name__: program for program in (save, resume, look, train)}


def main(program: str, *arguments: str) -> None:
    if "LOST_AFTER" in os.environ:
        pulse.LOST_AFTER = job_store.GIVE_UP_AFTER = float(os.environ["LOST_AFTER"])
        background.SEEN_WITHIN = completion._GRACE = 3.0
    dist.init_process_group("gloo")
    PROGRAMS[program](*arguments)
    if program != "save":  # where ranks are lost, there is nobody to say goodbye to
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
