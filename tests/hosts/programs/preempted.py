"""A managed run that trains until a signal comes to a rank; or, with `only-resume`, one that continues from there."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from kit.checkpoints import Whole, mine
from kit.compare import check_same
from kit.optimizers import OfModel, two_groups
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim


def main(root: str, *words: str) -> None:
    dist.init_process_group("gloo")
    with cpu():
        trained = Trained("FSDP2", steps=0, model=Whole, make=OfModel(two_groups))
        with fsdp_optim.CheckpointManager(
            root, trained.model, trained.optim, every=50, options=fsdp_optim.ManagerOptions(progress=False, timeout=60)
        ) as manager:
            step = manager.resume()
            print(f"resumed at {step}", flush=True)
            while not words and not manager.should_stop:
                trained.step(range(step, step + 1))
                step += 1
                manager.step(step)
                print(f"step {step}", flush=True)
                time.sleep(0.1)
        wanted = Trained("FSDP2", steps=step, model=Whole, make=OfModel(two_groups))
        check_same("values", mine(trained), mine(wanted))
        print(f"stopped at {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
