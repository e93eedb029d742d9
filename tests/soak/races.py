"""Readers beside writers: a load gives all values of one save, while writers replace checkpoints and remove older ones.

A load may raise that the checkpoint was replaced only if several saves ended during the load.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from kit.compare import Differs, check_same

from soak.ranks import LIMIT, Ranks, check_root, read_notes
from soak.torture import PATIENCE, Torture, temporary

SECONDS = 1.5 * PATIENCE  # of one race
READERS = 2


def run(torture: Torture) -> None:
    """Run short races, one after the other."""
    torch.set_num_threads(1)
    with temporary() as folder:
        ranks = Ranks(folder)
        try:
            for number in torture.numbers():
                rng = torture.rng(number)
                mode = rng.choice(("overwrite", "overwrite", "managed steps", "async overwrite"))
                options: dict[str, Any] = {"strategy": rng.choice(("in_place", "per_rank_files"))}
                options |= rng.choice(({}, {}, {"max_file_size": 20_000}, {"checksums": False}, {"durable": False}))
                verify = rng.random() < 0.6
                what = f"{mode}, {options}, verify={verify}"
                with torture.case(number, what):
                    _race(torture, ranks, folder / f"{number}", mode, options, verify)
        finally:
            ranks.close()


def _race(torture: Torture, ranks: Ranks, root: Path, mode: str, options: dict[str, Any], verify: bool) -> None:
    root.mkdir()
    ranks.run(root=str(root), mode=mode, ranks=1, first=1, count=1, options=options)
    writers, saver = ranks.start(root=str(root), mode=mode, ranks=1, first=2, options=options)
    reader = {
        "life": "load",
        "root": str(root),
        "mode": mode,
        "saver": str(saver),
        "seconds": SECONDS,
        "verify": verify,
    }
    pids, notes = ranks.start(**{**reader, "ranks": READERS})
    codes = ranks.collect(pids, LIMIT)
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
    check_same("the writer", ranks.collect(writers), [-signal.SIGKILL])
    noted = read_notes(notes)
    wrong = [what for _, what, number, _ in noted if number == -1]
    if wrong or codes != [0] * READERS:
        raise Differs(f"readers ended with {codes}: {wrong}")
    marks = read_notes(saver)
    torture.figures["races"] += 1
    torture.figures["saves"] += sum(what == "end" for _, what, *_ in marks)
    torture.figures["loads"] += sum(number for _, what, number, _ in noted if what == "loads")
    torture.figures["replaced too often"] += sum(what == "replaced" for _, what, *_ in noted)
    last = max(number for _, what, number, _ in marks if what == "begin")
    check_root(root, max((number for _, what, number, _ in marks if what == "end"), default=1), last)
