"""Conversions without ranks: fsdp_optim beside the usual tools that put a checkpoint together, and beside cp.

    python benchmarks/offline.py [--rounds 3] [--folder DIR]

12 blocks with 100 M parameters, weights and Adam state in fp32 (1.2 GB). Every contestant runs in a process of its own, in turn,
`rounds` times after one that does not count. The sources are in the page cache, and nothing is flushed to the disk. Contestants
that average the weights of three checkpoints (0.4 GB each) read them from the disk, flush what they write, and are measured by
"3 plain reads, one flushed write"; the script with numpy holds all three in memory. "Extra MiB":
the highest resident size of the process during the call, over that before it. `dcp_to_torch_save` is torch's own; "torch.load of
all shards" reads the files of four ranks, joins their slices and saves the result, as scripts of the field do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from tabulate import tabulate
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdp_optim

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.peaks import Peak

NUM_SHARDS = 4
AVERAGED = ("average-0", "average-1", "average-2")
_PIECE_NBYTES = 8 << 20


def make_sources(folder: Path) -> None:
    """The same model and optimizer as every contestant reads it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1443, 2886), nn.Linear(2886, 1443)) for _ in range(12)))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    fsdp_optim.save(folder / "ours", model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
    for name in AVERAGED:
        fsdp_optim.save(folder / name, model, options=fsdp_optim.SaveOptions(progress=False))
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


def average(folder: Path, target: Path) -> None:
    sources = [folder / name for name in AVERAGED]
    fsdp_optim.average(sources, target, options=fsdp_optim.ConvertOptions(progress=False))


def numpy_average(folder: Path, target: Path) -> None:
    """A script of the field: all files in memory, the mean of each tensor, one file."""
    loaded = [load_file(folder / name / "model.safetensors") for name in AVERAGED]
    means = {
        key: numpy.mean([tensors[key] for tensors in loaded], axis=0, dtype=numpy.float64).astype(numpy.float32)
        for key in loaded[0]
    }
    save_file(means, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def plain_reads(folder: Path, target: Path) -> None:
    """What an average cannot do without: three reads and one flushed write of the same bytes, in one thread."""
    piece = bytearray(_PIECE_NBYTES)
    for name in AVERAGED:
        with (folder / name / "model.safetensors").open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    left = (folder / AVERAGED[0] / "model.safetensors").stat().st_size
    with target.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(memoryview(piece)[: min(left, _PIECE_NBYTES)])
        os.fsync(file.fileno())


def evict(folder: Path) -> None:
    """Drop the sources of the averages from the page cache."""
    for name in AVERAGED:
        for path in (folder / name).iterdir():
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


COLD: dict[str, Callable[[Path, Path], object]] = {
    "fsdp_optim.average of 3, cold and flushed": average,
    "numpy, the mean of 3, cold and flushed": numpy_average,
    "3 plain reads, one flushed write, cold": plain_reads,
}

CONTESTANTS: dict[str, Callable[[Path, Path], object]] = {
    "fsdp_optim.convert, ours": lambda folder, target: convert(folder / "ours", target),
    "fsdp_optim.convert, a torch file": lambda folder, target: convert(folder / "full.pt", target),
    "fsdp_optim.convert, DCP": lambda folder, target: convert(folder / "dcp", target),
    "fsdp_optim.verify, ours": lambda folder, target: fsdp_optim.verify(folder / "ours", progress=False),
    "cp -r": lambda folder, target: subprocess.run(["cp", "-r", folder / "ours", target], check=True),
    "dcp_to_torch_save": lambda folder, target: dcp_to_torch_save(folder / "dcp", target),
    "torch.load of all shards, torch.save": load_all_shards,
    **COLD,
}


def run_one(name: str, folder: Path, target: Path) -> None:
    """One contestant in this process: prints its seconds and extra MiB."""
    if name in COLD:
        evict(folder)
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
    floors = {True: "3 plain reads, one flushed write, cold", False: "cp -r"}
    for name, results in found.items():
        if results:
            floor = statistics.median(seconds for seconds, _ in found[floors[name in COLD]])
            seconds = sorted(one for one, _ in results)
            median = statistics.median(seconds)
            mib = statistics.median(one for _, one in results)
            rows.append(
                (name, f"{median:.2f}", f"{seconds[0]:.2f} to {seconds[-1]:.2f}", f"{median / floor:.2f}", f"{mib:.0f}")
            )
    header = ("who", "median s", "range s", "time / floor", "extra MiB")
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
