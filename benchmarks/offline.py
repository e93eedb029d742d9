"""Conversions without ranks: fsdp_optim beside the usual tools that put a checkpoint together, and beside cp.

    python benchmarks/offline.py [--rounds 3] [--folder DIR]

12 blocks with 100 M parameters, weights and Adam state in fp32 (1.2 GB). Every contestant runs in a process of its own, in turn,
`rounds` times after one that does not count. The sources are in the page cache, and nothing is flushed to the disk. "Extra MiB":
the highest resident size of the process during the call, over that before it. `dcp_to_torch_save` is torch's own; "torch.load of
all shards" reads the files of four ranks, joins their slices and saves the result, as scripts of the field do.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tabulate import tabulate
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdp_optim

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.peaks import Peak

NUM_SHARDS = 4


def make_sources(folder: Path) -> None:
    """The same model and optimizer as every contestant reads it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1443, 2886), nn.Linear(2886, 1443)) for _ in range(12)))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    fsdp_optim.save(folder / "ours", model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
    names = [name for name, _ in model.named_parameters()]
    state = {name: optim.state[param] for name, param in model.named_parameters()}
    groups = [{**optim.state_dict()["param_groups"][0], "params": names}]
    full = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    torch.save(full, folder / "full.pt")
    dcp.save(full, checkpoint_id=folder / "dcp")
    (folder / "shards").mkdir()
    for rank in range(NUM_SHARDS):
        torch.save(_slices(full, rank), folder / "shards" / f"rank{rank}.pt")


def _slices(value: object, rank: int) -> object:
    """The part of one of four ranks: a slice of the rows of each tensor."""
    if isinstance(value, torch.Tensor) and value.dim():
        return (
            value.detach().chunk(NUM_SHARDS)[rank].clone() if rank < len(value.chunk(NUM_SHARDS)) else value[:0].clone()
        )
    if isinstance(value, dict):
        return {key: _slices(item, rank) for key, item in value.items()}
    return value


def _joined(values: list[object]) -> object:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(values)  # type: ignore[arg-type]
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values]) for key in first}  # type: ignore[index]
    return first


def load_all_shards(folder: Path, target: Path) -> None:
    shards = [torch.load(folder / "shards" / f"rank{rank}.pt", weights_only=True) for rank in range(NUM_SHARDS)]
    torch.save(_joined(shards), target)


def convert(source: Path, target: Path) -> None:
    fsdp_optim.convert(source, target, options=fsdp_optim.ConvertOptions(durable=False, progress=False))


CONTESTANTS: dict[str, Callable[[Path, Path], object]] = {
    "fsdp_optim.convert, ours": lambda folder, target: convert(folder / "ours", target),
    "fsdp_optim.convert, a torch file": lambda folder, target: convert(folder / "full.pt", target),
    "fsdp_optim.convert, DCP": lambda folder, target: convert(folder / "dcp", target),
    "fsdp_optim.verify, ours": lambda folder, target: fsdp_optim.verify(folder / "ours", progress=False),
    "cp -r": lambda folder, target: subprocess.run(["cp", "-r", folder / "ours", target], check=True),
    "dcp_to_torch_save": lambda folder, target: dcp_to_torch_save(folder / "dcp", target),
    "torch.load of all shards, torch.save": load_all_shards,
}


def run_one(name: str, folder: Path, target: Path) -> None:
    """One contestant in this process: prints its seconds and extra MiB."""
    with Peak() as peak:
        begin = time.perf_counter()
        CONTESTANTS[name](folder, target)
        seconds = time.perf_counter() - begin
    print(seconds, peak.mib)  # cp is a process of its own, which holds a few hundred KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--run", nargs=3, metavar=("NAME", "FOLDER", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        run_one(options.run[0], *map(Path, options.run[1:]))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, target = Path(name), Path(name) / "target"
        make_sources(folder)
        found: dict[str, list[tuple[float, float]]] = {one: [] for one in CONTESTANTS}
        for index in range(options.rounds + 1):
            for one, results in found.items():
                done = subprocess.run(
                    [sys.executable, __file__, "--run", one, folder, target],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode == 0 and index:
                    seconds, mib = map(float, done.stdout.split()[-2:])
                    results.append((seconds, mib))
                elif done.returncode and not index:
                    print(f"{one}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                shutil.rmtree(target, ignore_errors=True)
                target.unlink(missing_ok=True)
        _print(found)


def _print(found: dict[str, list[tuple[float, float]]]) -> None:
    rows = []
    floor = statistics.median(seconds for seconds, _ in found["cp -r"])
    for name, results in found.items():
        if results:
            seconds = sorted(one for one, _ in results)
            median = statistics.median(seconds)
            mib = statistics.median(one for _, one in results)
            rows.append(
                (name, f"{median:.2f}", f"{seconds[0]:.2f} to {seconds[-1]:.2f}", f"{median / floor:.2f}", f"{mib:.0f}")
            )
    header = ("who", "median s", "range s", "time / cp", "extra MiB")
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
