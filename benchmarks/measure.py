"""Time and extra peak memory of one call on every rank, and tables of medians."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from tabulate import tabulate

MIB = 1 << 20
_TOUCHED_NBYTES = 3 << 30  # by all ranks together, before each call


@dataclass
class Series:
    """Runs of one contestant on one rank: seconds until the last rank was done, extra peak memory in MiB."""

    seconds: list[float] = field(default_factory=list)
    extra_mib: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_mib(self) -> float:
        return statistics.median(self.extra_mib)


def run_in_turn(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], None] = lambda name: None,
    *,
    warm_up: bool = True,
) -> dict[str, Series]:
    """All contestants in turn, `rounds` times: a noisy minute hits them all.

    `before`: called before each of them, outside the measured time. `warm_up`: begin with a round that does not count.
    """
    series = {name: Series() for name in contestants}
    order = list(contestants.items())
    for index in range(0 if warm_up else 1, rounds + 1):
        random.Random(index).shuffle(order)  # alike on all ranks; nobody always comes after the same one
        for name, call in order:
            before(name)
            seconds, extra = _measure(call)
            if index:
                series[name].seconds.append(seconds)
                series[name].extra_mib.append(extra)
    return series


def _measure(call: Callable[[], object]) -> tuple[float, float]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # give back what the last contestant freed: each gets memory that nobody has touched
    touch(_TOUCHED_NBYTES // dist.get_world_size())
    before = reset_peak()
    dist.barrier()  # all ranks begin together
    start = time.perf_counter()
    kept = call()
    dist.barrier()  # and the call is over when the last one is done
    seconds = time.perf_counter() - start
    extra = (peak() - before) / MIB
    del kept
    return seconds, extra


def touch(nbytes: int) -> None:
    """Use some memory and free it.

    The host of a virtual machine takes free memory away after a while; who gets it next would pay for that.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def reset_peak() -> int:
    """Reset the kernel's record of this process's peak memory; return the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned."""
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)
