"""The rate of a fingerprint on one core, beside a copy and XXH3 of the same bytes, and what it adds to a save and a load.

    python benchmarks/fingerprint.py [--mib 64] [--folder DIR]

Rates are bytes per second of processor time of one thread, the best of several rounds, so that other work on the machine counts
little. The save and the load are those of a plain model with Adam on one rank, into `--folder`; their seconds are the processor
time of the process, with all its threads.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from tabulate import tabulate
from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions

_ROUNDS = 5


def best(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """The seconds of the quickest of several calls."""
    call()
    seconds = []
    for _ in range(_ROUNDS):
        begun = clock()
        call()
        seconds.append(clock() - begun)
    return min(seconds)


def holding(*tensors: torch.Tensor) -> nn.Module:
    """A model with these parameters."""
    model = nn.Module()
    for index, tensor in enumerate(tensors):
        model.register_parameter(f"w{index}", nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return model


def rates(nbytes: int) -> list[list[object]]:
    """A row of GB/s for each kind of value."""
    rows: list[list[object]] = []
    for name, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ):
        value = torch.randn(nbytes // dtype.itemsize).to(dtype)
        other, data = torch.empty_like(value), value.view(torch.uint8).numpy()
        model = holding(value)
        calls: list[Callable[[], object]] = [
            lambda other=other, value=value: other.copy_(value),
            lambda data=data: xxhash.xxh3_128(data).digest(),
            lambda model=model: fsdp_optim.fingerprint(model),
            lambda model=model: fsdp_optim.fingerprint(model, projections=16),
        ]
        rows.append([f"one value, {name}", *(f"{nbytes / best(call) / 1e9:.1f}" for call in calls)])
    return rows


def per_value(num: int) -> float:
    """The microseconds of a value of 1,000 elements, of many."""
    model = holding(*(torch.randn(1000) for _ in range(num)))
    return best(lambda: fsdp_optim.fingerprint(model)) / num * 1e6


def saves(nbytes: int, folder: Path) -> list[list[object]]:
    """Seconds of processor time of a save and of a load, without and with a fingerprint."""
    model = holding(*(torch.randn(1 << 20) for _ in range(max(nbytes // (12 << 20), 1))))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    path, rows = folder / "fingerprint", list[list[object]]()
    for is_on in (False, True):
        saving = SaveOptions(fingerprint=is_on, durable=False, progress=False)
        loading = LoadOptions(progress=False, silent=True)
        seconds = [
            best(
                lambda saving=saving: fsdp_optim.save(path, model, optim, overwrite=True, options=saving),
                time.process_time,
            ),
            best(lambda loading=loading: fsdp_optim.load(path, model, optim, options=loading), time.process_time),
        ]
        rows.append(["with a fingerprint" if is_on else "without", *(f"{number:.3f}" for number in seconds)])
    shutil.rmtree(path)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        tabulate(rates(args.mib << 20), ["GB/s of one core", "copy", "XXH3-128", "fingerprint", "and 16 projections"])
    )
    print(f"\na value of 1,000 float32, of 2,000: {per_value(2000):.0f} us\n")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        mib = max(args.mib // 12, 1) * 12
        print(tabulate(saves(mib << 20, Path(folder)), [f"processor s, {mib} MiB", "save", "load"]))


if __name__ == "__main__":
    main()
