"""A program on several ranks, each a process of its own with the variables that torchrun sets, in a tenth of torchrun's time.

    done = launched(2, "examples/pipeline.py", "--root", folder)
    assert not done.returncode, done.stderr

The processes are forked from a server that has torch (`kit.scripts`), which has imported what each would take seconds for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from kit.scripts import TRAINING, Started, start
from kit.servers import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
from kit.hidden import hide
for package in {hidden!r}:
    hide(package)
import torch
torch.set_num_threads(1)
sys.argv[:] = {words!r}
runpy.run_path({path!r}, run_name="__main__")
"""


def launched(
    num_ranks: int,
    program: str | Path,
    *arguments: str,
    preload: Sequence[str] = TRAINING,
    hidden: Sequence[str] = (),
    timeout: float = 300.0,
) -> Started:
    """Run a program of this repository on CPUs until all ranks have ended; the first of them that failed, or else rank 0.

    `hidden`: packages that the program cannot find, of which `preload` must load none.
    """
    path = str(ROOT / program)
    code = PROGRAM.format(words=[path, *arguments], path=path, hidden=list(hidden))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in map(str, range(num_ranks)):
        environment = {**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(start(code, preload=preload, environment=environment))
    end = time.monotonic() + timeout
    done = [one.wait(max(end - time.monotonic(), 0.0)) for one in ranks]
    return next((one for one in done if one.returncode), done[0])


def alone(program: str | Path, *arguments: str, preload: Sequence[str] = TRAINING, timeout: float = 300.0) -> Started:
    """Run a program of this repository in one process without a launcher."""
    path = str(ROOT / program)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return start(PROGRAM.format(words=[path, *arguments], path=path, hidden=[]), preload, environment=environment).wait(
        timeout
    )
