"""Calls on checkpoints without ranks: fsdp_optim beside the usual tools, a script with numpy, and a plain copy of the same bytes.

    python benchmarks/offline.py [--rounds 3] [--folder DIR] [--only diff copy thin]

12 blocks with 100 M parameters, weights and Adam state in fp32 (1.2 GB). Every contestant runs in a process of its own, in
turn, `rounds` times after one that does not count, so that a busy minute falls on all of them, and each after a run on tiny
sources that imports what it needs. "convert": the sources are in the page cache, and nothing is flushed to the disk;
`dcp_to_torch_save` is torch's own, and "torch.load of all shards" reads the files of four ranks, joins their slices and saves
the result, as scripts of the field do. All others read from the disk, and flush what they write. The last row of each table is
its floor, by which the times of the others are divided. "cpu s": the processor time of the call, on all cores. "Extra MiB": the
highest resident size of the process during the call, over that before it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
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
WIDTH, TINY = 1443, 8


def make_sources(folder: Path, width: int) -> None:
    """The same model and optimizer as every contestant reads it."""
    blocks = (nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(12))
    model = nn.Sequential(*blocks)
    optim = torch.optim.Adam(model.parameters())
    _step(model, optim)
    fsdp_optim.save(folder / "ours", model, optim, options=fsdp_optim.SaveOptions(progress=False))
    _step(model, optim)
    fsdp_optim.save(folder / "later", model, optim, options=fsdp_optim.SaveOptions(progress=False))
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


def _step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Change every weight, and every value of the optimizer."""
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()


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


def numpy_diff(folder: Path, target: Path) -> None:
    """A script of the field: each tensor of both files, in memory, in float64."""
    for file in sorted((folder / "ours").glob("*.safetensors")):
        with safe_open(file, "numpy") as one, safe_open(folder / "later" / file.name, "numpy") as other:
            for key in one.keys():  # noqa: SIM118  # it is no dict
                a, b = one.get_tensor(key), other.get_tensor(key)
                differing = numpy.count_nonzero(a != b)
                a, b = a.astype(numpy.float64), b.astype(numpy.float64)
                apart = numpy.abs(a - b)
                norm = numpy.sqrt(numpy.square(a).sum())
                print(key, differing, apart.max(), numpy.sqrt(numpy.square(apart).sum()) / norm, file=sys.stderr)


def plain_copy(folder: Path, target: Path) -> None:
    """`cp`, and a flush of each file."""
    subprocess.run(["cp", "-r", folder / "ours", target], check=True)
    for path in _files_in(target):
        flush(path)


def script_copy(folder: Path, target: Path) -> None:
    """A script of the field: reads each file, writes and flushes it, reads both again and compares their sums."""
    for path in _files_in(folder / "ours"):
        copied = target / path.relative_to(folder / "ours")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
        flush(copied)
        if _sum_of(path) != _sum_of(copied):
            raise SystemExit(f"{copied}: differs")


def _sum_of(path: Path) -> int:
    value, piece = 0, memoryview(bytearray(_PIECE_NBYTES))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(piece):
            value = zlib.crc32(piece[:num], value)
    return value


def numpy_thin(folder: Path, target: Path) -> None:
    """A script of the field: the weights in memory, a new file of them, and the complete checkpoint removed."""
    for path in sorted(target.glob("model*.safetensors")):
        new = target.with_name("weights.safetensors")
        save_file(load_file(path), new)
        flush(new)
        shutil.rmtree(target)
        target.mkdir()
        new.rename(target / "model.safetensors")


def copied_weights(folder: Path, target: Path) -> None:
    """`cp` of the weights, flushed, and the complete checkpoint removed."""
    new = target.with_name("weights.safetensors")
    subprocess.run(["cp", target / "model.safetensors", new], check=True)
    flush(new)
    shutil.rmtree(target)
    target.mkdir()
    new.rename(target / "model.safetensors")


def reads_of(*names: str) -> Callable[[Path, Path], None]:
    """Return a floor: each file of some checkpoints once, in one thread."""

    def read(folder: Path, target: Path) -> None:
        piece = bytearray(_PIECE_NBYTES)
        for path in _files_in(*(folder / name for name in names)):
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    return read


def reads_and_a_write(folder: Path, target: Path) -> None:
    """What an average cannot do without: three reads and one flushed write of the same bytes, in one thread."""
    reads_of(*AVERAGED)(folder, target)
    piece = bytes(_PIECE_NBYTES)
    left = (folder / AVERAGED[0] / "model.safetensors").stat().st_size
    with target.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(memoryview(piece)[: min(left, _PIECE_NBYTES)])
        os.fsync(file.fileno())


def _files_in(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*") if path.is_file())


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def evict(*folders: Path) -> None:
    """Drop checkpoints, which are on the disk, from the page cache."""
    for path in _files_in(*folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied_first(folder: Path, target: Path) -> None:
    """Make a checkpoint at the target, for those that change one in place."""
    shutil.copytree(folder / "ours", target)
    for path in _files_in(target):
        flush(path)
    evict(target)


@dataclass(frozen=True)
class Contestant:
    """A call from the sources to a target. `cold`: sources that are not in the page cache; `before`: what is not measured."""

    run: Callable[[Path, Path], object]
    cold: Sequence[str] = ()
    before: Callable[[Path, Path], None] | None = None


TWO = ("ours", "later")
TABLES: dict[str, dict[str, Contestant]] = {
    "convert": {
        "fsdp_optim.convert, ours": Contestant(lambda folder, target: convert(folder / "ours", target)),
        "fsdp_optim.convert, a torch file": Contestant(lambda folder, target: convert(folder / "full.pt", target)),
        "fsdp_optim.convert, DCP": Contestant(lambda folder, target: convert(folder / "dcp", target)),
        "fsdp_optim.verify, ours": Contestant(lambda folder, _: fsdp_optim.verify(folder / "ours", progress=False)),
        "dcp_to_torch_save": Contestant(lambda folder, target: dcp_to_torch_save(folder / "dcp", target)),
        "torch.load of all shards, torch.save": Contestant(load_all_shards),
        "cp -r": Contestant(lambda folder, target: subprocess.run(["cp", "-r", folder / "ours", target], check=True)),
    },
    "average": {
        "fsdp_optim.average of 3": Contestant(average, AVERAGED),
        "numpy, the mean of 3": Contestant(numpy_average, AVERAGED),
        "3 plain reads, one write": Contestant(reads_and_a_write, AVERAGED),
    },
    "diff": {
        "fsdp_optim.diff, all differ": Contestant(
            lambda folder, _: fsdp_optim.diff(*(folder / name for name in TWO), progress=False), TWO
        ),
        "numpy, all differ": Contestant(numpy_diff, TWO),
        "plain reads of both": Contestant(reads_of(*TWO), TWO),
    },
    "copy": {
        "fsdp_optim.copy": Contestant(
            lambda folder, target: fsdp_optim.copy(folder / "ours", target, progress=False), ("ours",)
        ),
        "shutil and CRC32 of both": Contestant(script_copy, ("ours",)),
        "cp -r": Contestant(plain_copy, ("ours",)),
    },
    "thin": {
        "fsdp_optim.thin": Contestant(lambda _, target: fsdp_optim.thin(target), before=copied_first),
        "numpy, the weights again": Contestant(numpy_thin, before=copied_first),
        "cp of the weights": Contestant(copied_weights, before=copied_first),
    },
}
"""By the name of a table, its rows; the last one is the floor."""


@dataclass(frozen=True)
class Measured:
    """One call: seconds by the clock, seconds of processors, and memory."""

    seconds: float
    cpu: float
    mib: float


def _cpu() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run_one(table: str, name: str, folder: Path, target: Path) -> None:
    """Run one contestant in this process, and print its figures. A first run on tiny sources imports what it needs."""
    contestant = TABLES[table][name]
    for sources, to in ((folder / "tiny", folder / "tiny" / "target"), (folder, target)):
        if contestant.before is not None:
            contestant.before(sources, to)
        if sources != folder:
            contestant.run(sources, to)
            _remove(to)
    evict(*(folder / source for source in contestant.cold))
    with Peak() as peak:
        cpu, begin = _cpu(), time.perf_counter()
        contestant.run(folder, target)
        seconds, cpu = time.perf_counter() - begin, _cpu() - cpu
    print(seconds, cpu, peak.mib)  # cp is a process of its own, which holds a few hundred KiB


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def measured(table: str, name: str, folder: Path, target: Path) -> Measured:
    """Run one contestant in a process of its own."""
    call = [sys.executable, __file__, "--run", table, name, folder, target]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    finally:
        _remove(target)
    if done.returncode:
        raise SystemExit(f"{table}, {name}: {done.stderr.strip().splitlines()[-1]}")
    return Measured(*map(float, done.stdout.split()[-3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        table, name, folder, target = options.run
        run_one(table, name, Path(folder), Path(target))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder, target = Path(place), Path(place) / "target"
        make_sources(folder, WIDTH)
        (folder / "tiny").mkdir()
        make_sources(folder / "tiny", TINY)
        rows = [(table, name) for table in options.only for name in TABLES[table]]
        results: dict[tuple[str, str], list[Measured]] = {row: [] for row in rows}
        for index in range(options.rounds + 1):
            for row in rows:
                got = measured(*row, folder, target)
                results[row] += [got] if index else []
        for table in options.only:
            _print({name: results[table, name] for name in TABLES[table]})


def _print(results: dict[str, list[Measured]]) -> None:
    floor = statistics.median(got.seconds for got in list(results.values())[-1])
    rows = []
    for name, all_got in results.items():
        seconds = sorted(got.seconds for got in all_got)
        median = statistics.median(seconds)
        cpu, mib = (statistics.median(getattr(got, key) for got in all_got) for key in ("cpu", "mib"))
        between = f"{seconds[0]:.2f} to {seconds[-1]:.2f}"
        rows.append((name, f"{median:.2f}", between, f"{median / floor:.2f}", f"{cpu:.2f}", f"{mib:.0f}"))
    header = ("who", "median s", "range s", "time / floor", "cpu s", "extra MiB")
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
