"""One gather, save, load and managed run of many ranks; all values are the oracle's.

many.py FOLDER
"""

from __future__ import annotations

import sys
import time
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

KWARGS: dict[str, Any] = {"model": Whole, "make": OfModel(two_groups)}
QUIET: dict[str, Any] = {"progress": False, "timeout": 200.0}


def say(what: str, begun: float) -> None:
    print(f"{what}: {time.monotonic() - begun:.2f} s", flush=True)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    root = Path(folder)
    with cpu():
        trained, other = (Trained("FSDP2", steps=steps, **KWARGS) for steps in (2, 0))
        wanted = mine(trained)

        begun = time.monotonic()
        full = trained.gather(None)
        say("gather", begun)
        other.optim.load_state_dict(other.shard(full))
        check_same("gathered", mine(other)["state"], wanted["state"])

        begun = time.monotonic()
        fsdp_optim.save(root / "saved", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        say("save", begun)
        scramble(other)
        begun = time.monotonic()
        fsdp_optim.load(root / "saved", other.model, other.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))
        say("load", begun)
        check_same("loaded", mine(other), wanted)

        begun = time.monotonic()
        options: dict[str, Any] = {"every": 2, "keep_last": 1, "signals": (), **QUIET}
        with fsdp_optim.CheckpointManager(
            root / "run", trained.model, trained.optim, **as_options(fsdp_optim.ManagerOptions, **options)
        ) as manager:
            check_same("fresh", manager.resume(), 0)
            for step in range(1, 5):
                manager.step(step)
        check_same("kept", [info.step for info in fsdp_optim.checkpoints(root / "run")], [4])
        scramble(other)
        with fsdp_optim.CheckpointManager(
            root / "run", other.model, other.optim, **as_options(fsdp_optim.ManagerOptions, **options)
        ) as manager:
            check_same("resumed at", manager.resume(), 4)
        say("manager", begun)
        check_same("resumed", mine(other), wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
