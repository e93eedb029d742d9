"""Each call that writes or reads, on a path behind which the hosts have different folders; and what each rank hears.

unshared.py ROOT CALL [CALL ...]     save, per_rank_files, async_save, manager, resume, load, load_saved, convert, rollback
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hosts.programs.numbered import QUIET, Numbered

import fsdp_optim


def calls(root: Path) -> dict[str, Callable[[], Any]]:
    """The calls by name. `root/step-1` is a checkpoint on those hosts where the test has saved one."""
    one = Numbered()
    live = {"model": one.model, "optim": one.optim, **QUIET}

    def manager() -> None:
        with fsdp_optim.CheckpointManager(root, one.model, one.optim, signals=(), **QUIET) as managed:
            managed.resume()

    return {
        "save": lambda: fsdp_optim.save(root / "new", **one.arguments(2)),
        "per_rank_files": lambda: fsdp_optim.save(root / "new", strategy="per_rank_files", **one.arguments(2)),
        "overwrite": lambda: fsdp_optim.save(root / "step-1", overwrite=True, **one.arguments(2)),
        "async_save": lambda: fsdp_optim.async_save(root / "new", **one.arguments(2)).wait(),
        "manager": manager,
        "resume": lambda: fsdp_optim.resume(root, **live),
        "load": lambda: fsdp_optim.load(root / "step-1", **live),
        "convert": lambda: fsdp_optim.convert(root / "step-1", root / "converted", format="dcp", **QUIET),
        "verify": lambda: fsdp_optim.verify(root / "step-1"),
    }


def main(root: str, *names: str) -> None:
    dist.init_process_group("gloo")
    made = calls(Path(root))
    for name in names:
        error, begun = "", time.monotonic()
        try:
            made[name]()
        except fsdp_optim.FsdpOptimError as caught:
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"call": name, "error": error, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
