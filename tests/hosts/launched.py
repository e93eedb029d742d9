"""A rank's own start in a host: its output goes to files of its run, and it says which process it is.

    python -m hosts.launched PROGRAM [ARGUMENT ...]      # torchrun, or the bench, sets RANK and BENCH_RUN

A rank that torchrun starts again writes on in the same files.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

RUN = "BENCH_RUN"
"""The variable with the folder of the run, as the hosts see it."""
HOST = "BENCH_HOST"
"""The variable with the number of the host in the bench."""


def main(program: str, arguments: Sequence[str]) -> None:
    """Run a program as a rank."""
    name = f"rank-{os.environ['RANK']}"
    redirect(name)
    announce(name)
    sys.argv[:] = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def redirect(name: str) -> None:
    """Have the output in the files `<name>.out` and `<name>.err`."""
    for number, ending in ((1, "out"), (2, "err")):
        path = Path(os.environ[RUN], f"{name}.{ending}")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)


def announce(name: str) -> None:
    """Say which process of which host this is."""
    path = Path(os.environ[RUN], f"{name}.json")
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"host": int(os.environ[HOST]), "pid": os.getpid()}))
    new.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
