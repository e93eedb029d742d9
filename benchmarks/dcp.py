"""`dcp.save` and `dcp.load` of this library beside torch's, with the same state dicts.

    python benchmarks/dcp.py [--rounds 3] [--worlds 2 4] [--models big small] [--folder DIR]

The models are those of benchmarks/gather.py, with weights and Adam state in fp32 in FSDP2. Every contestant saves and loads
`{"model": ..., "optim": ...}` as torch's get_state_dict gives it, into a folder that is not there. "into a fresh optimizer":
get_state_dict, load and set_state_dict, each as the library has them, with an optimizer that has not stepped. Extra memory is the
highest resident size during the call, over that before it; the most on a rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import state_dict as torch_state_dict

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint import Subject, fresh, in_fsdp2
from measure import Series, run_in_turn, table

from fsdp_optim import SaveOptions, dcp
from fsdp_optim.testing import run_on_ranks

QUICK = SaveOptions(durable=False, on_replica_mismatch="lowest_rank")


def dicts_of(subject: Subject, module: Any = torch_state_dict) -> dict[str, Any]:
    return dict(zip(("model", "optim"), module.get_state_dict(subject.model, subject.optim), strict=True))


def saves(folder: Path, kind: str, rounds: int) -> dict[str, Series]:
    """Runs on every rank. Leaves what each contestant has saved."""
    subject = Subject(in_fsdp2, kind)
    saved = dicts_of(subject)
    contestants: dict[str, Callable[[], object]] = {
        "fsdp_optim": lambda: dcp.save(saved, checkpoint_id=folder / "fsdp_optim", options=QUICK),
        "fsdp_optim, torch's files": lambda: dcp.save(
            saved, checkpoint_id=folder / "files", format="dcp", options=QUICK
        ),
        "fsdp_optim, async_save's stall": lambda: pending.append(
            dcp.async_save(saved, checkpoint_id=folder / "async", options=QUICK)
        ),
        "torch": lambda: torch_dcp.save(
            saved, storage_writer=torch_dcp.FileSystemWriter(folder / "torch", sync_files=False)
        ),
        "torch, our Writer": lambda: torch_dcp.save(
            saved, storage_writer=dcp.Writer(folder / "planned", durable=False)
        ),
    }
    pending: list[Any] = []
    paths = {
        "fsdp_optim": "fsdp_optim",
        "fsdp_optim, torch's files": "files",
        "fsdp_optim, async_save's stall": "async",
        "torch": "torch",
        "torch, our Writer": "planned",
    }

    def before(name: str) -> None:
        while pending:
            pending.pop().result()
        if name in paths:
            fresh(folder, paths[name])

    series = run_in_turn(contestants, rounds, before)
    before("")
    return series


def loads(folder: Path, kind: str, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    subject = Subject(in_fsdp2, kind)
    into = dicts_of(subject)

    new_subjects: list[Subject] = []

    def before(name: str) -> None:
        new_subjects.clear()
        if name.endswith("fresh optimizer"):
            new_subjects.append(Subject(in_fsdp2, kind, step=False))
            dist.barrier()

    def into_fresh(load: Callable[[dict[str, Any]], None], module: Any) -> None:
        new = new_subjects[0]
        tree = dicts_of(new, module)
        load(tree)
        module.set_state_dict(new.model, new.optim, model_state_dict=tree["model"], optim_state_dict=tree["optim"])

    ours, torchs = (
        partial(dcp.load, checkpoint_id=folder / "fsdp_optim"),
        partial(torch_dcp.load, checkpoint_id=folder / "torch"),
    )
    return run_in_turn(
        {
            "fsdp_optim": lambda: ours(into),
            "fsdp_optim, torch's files": lambda: dcp.load(into, checkpoint_id=folder / "torch"),
            "torch": lambda: torchs(into),
            "fsdp_optim, into a fresh optimizer": lambda: into_fresh(ours, dcp),
            "torch, into a fresh optimizer": lambda: into_fresh(torchs, torch_state_dict),
        },
        rounds,
        before,
    )


def rows_of(call: str, by_rank: list[dict[str, Series]], floor: str) -> list[list[str]]:
    first = by_rank[0]
    return [
        [
            call,
            name,
            f"{series.median:.3f}",
            f"{min(series.seconds):.3f} to {max(series.seconds):.3f}",
            f"{series.median / first[floor].median:.2f}",
            f"{max(ranks[name].median_mib for ranks in by_rank):.0f}",
        ]
        for name, series in first.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["big", "small"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    for kind in options.models:
        for world in options.worlds:
            with tempfile.TemporaryDirectory(dir=options.folder) as root:
                folder = Path(root)
                of_saves = run_on_ranks(saves, world, folder, kind, options.rounds, timeout=3000)
                rows += rows_of(f"{kind}, save, {world} ranks", of_saves, "torch")
                of_loads = run_on_ranks(loads, world, folder, kind, options.rounds, timeout=3000)
                rows += rows_of(f"{kind}, load, {world} ranks", of_loads, "torch")
    print(table(["call", "who", "median s", "range s", "time / torch", "most extra MiB on a rank"], rows))


if __name__ == "__main__":
    main()
