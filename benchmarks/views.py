"""What Views cost: a fused model saved, loaded and gathered with Views, as it is, and unfused; processor time and seconds.

    python benchmarks/views.py [--models big rows small] [--worlds 2 4] [--wrappers FSDP2] [--rounds 5] [--folder DIR]

`big`: two `wqkv` of interleaved heads, stacked experts, and stacked, transposed and alternating ones, 1 GiB with Adam's state.
`rows`: stacked and transposed experts alone, whose elements are side by side in the file and come from far rows of memory.
`small`: 2,000 `wqkv` of three parts. "as it is": the same fused model without Views. "unfused": the same elements in a model
whose parameters are the parts. All three run in turn in the same processes. Processor time is user and system time of the rank
that takes most; ratios are medians of the ratios of each round. A load is of the save before, into an optimizer without state.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import itertools
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from many import in_fsdp1, in_fsdp2, processor_seconds
from measure import MIB, peak, reset_peak, table, touch

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View
from fsdp_optim.testing import run_on_ranks

UNIT = 20  # layers in a unit of the wrapper
HOW = ("Views", "as it is", "unfused")

Shapes = dict[str, tuple[int, ...]]
Measured = dict[tuple[str, str], list[tuple[float, float, float]]]


def heads(prefix: str, groups: int, size: int, width: int) -> tuple[View, Shapes]:
    """A `wqkv` of groups with 4 query heads each."""
    parts = {f"{prefix}.w{part}": f"(g {part} d) c" for part in "qkv"}
    view = View(f"{prefix}.wqkv", "(g (q + k + v) d) c", parts, q=4, k=1, v=1, d=size)
    return view, {f"{prefix}.wqkv": (groups * 6 * size, width)}


def kinds_of(model: str) -> list[list[tuple[View, Shapes]]]:
    """Return units of fused parameters, each with its View."""
    stacked = View("experts.gate_up", "e (a + b) c", {"experts.{e}.gate": "a c", "experts.{e}.up": "b c"})
    pairs = View("oss.gate_up", "e c (f (a + b))", {"oss.{e}.gate": "(f a) c", "oss.{e}.up": "(f b) c"}, a=1, b=1)
    rows = View("rows.down", "e c f", {"rows.{e}.down": "f c"})
    if model == "big":
        return [
            [heads("0", 8, 128, 2048)],
            [heads("1", 8, 128, 2048)],
            [(stacked, {"experts.gate_up": (8, 2048, 2048)})],
            [(pairs, {"oss.gate_up": (8, 2048, 2048)})],
        ]
    if model == "rows":
        return [[(rows, {"rows.down": (16, 2048, 1024)})]]
    layers = [heads(f"{number}", 2, 4, 8) for number in range(2000)]
    return [layers[first : first + UNIT] for first in range(0, len(layers), UNIT)]


class Unit(nn.Module):
    """Parameters under names with dots, which are modules and attributes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, attribute = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(attribute, nn.Parameter(torch.rand(shape)))


WRAPPERS = {"FSDP2": in_fsdp2, "FSDP1": in_fsdp1}


class Subject:
    """A model after a step of Adam, one of `HOW`, and the calls about it."""

    def __init__(self, how: str, model: str, wrapper: str, folder: Path) -> None:
        torch.manual_seed(0)
        units = []
        self.views: list[View] = []
        for unit in kinds_of(model):
            shapes: Shapes = {}
            for view, fused in unit:
                ((name, shape),) = fused.items()
                shapes |= view.bind(name, shape).shapes if how == "unfused" else fused
            units.append(Unit(shapes))
        if how == "Views":
            self.views = views_of(model)
        self.model = WRAPPERS[wrapper](units)
        self.optim = torch.optim.Adam(self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optim.step()
        self.optim.zero_grad()
        self.path = folder / how.replace(" ", "-")

    def save(self) -> None:
        options = SaveOptions(durable=False, views=self.views)
        fsdp_optim.save(self.path, self.model, self.optim, overwrite=True, options=options)

    def load(self) -> None:
        fsdp_optim.load(self.path, self.model, self.optim, options=LoadOptions(views=self.views))

    def gather(self) -> object:
        return fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, options=CallOptions(views=self.views))

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        return {"save": self.save, "load": self.load, "gather": self.gather}


def views_of(model: str) -> list[View]:
    """Return the Views of a model whose units are in a Sequential: one for all layers, where they are alike."""
    if model == "small":
        parts = {f"{{u}}.{{i}}.w{part}": f"(g {part} d) c" for part in "qkv"}
        return [View("{u}.{i}.wqkv", "(g (q + k + v) d) c", parts, q=4, k=1, v=1, d=4)]
    return [
        View(
            f"{number}.{view.name}",
            view.axes,
            {f"{number}.{name}": axes for name, axes in view.parts},
            **dict(view.sizes),
        )
        for number, unit in enumerate(kinds_of(model))
        for view, _ in unit
    ]


def measure(folder: Path, model: str, wrapper: str, rounds: int, hows: Sequence[str] = HOW) -> Measured:
    """Runs on every rank. Returns (processor seconds, seconds, growth of the peak in MiB) of each round, by call and `HOW`."""
    subjects = {how: Subject(how, model, wrapper, folder) for how in hows}
    results: Measured = {}
    for index in range(rounds + 1):
        for name in ("save", "load", "gather"):
            order = list(subjects)
            random.Random(index).shuffle(order)
            for how in order:
                subject = subjects[how]
                if name == "load":
                    subject.optim.state.clear()
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # so that each gets memory that nobody has touched
                if model != "small":
                    touch((1 << 30) // dist.get_world_size())
                resident = reset_peak()
                dist.barrier()
                clock, begin = time.perf_counter(), processor_seconds()
                kept = subject.calls[name]()
                used, seconds = processor_seconds() - begin, time.perf_counter() - clock
                growth = (peak() - resident) / MIB
                del kept
                dist.barrier()
                if index:  # the first round warms up
                    results.setdefault((name, how), []).append((used, seconds, growth))
    return results


def profiled(folder: Path, model: str, wrapper: str, how: str, name: str, order: str) -> None:
    """Runs on every rank: rank 0 prints a profile of the second round of one call."""
    subject = Subject(how, model, wrapper, folder)
    subject.save()
    for index in range(2):
        if name == "load":
            subject.optim.state.clear()
        profile = cProfile.Profile()
        if index:
            profile.enable()
        subject.calls[name]()
        profile.disable()
        if index and dist.get_rank() == 0:
            pstats.Stats(profile).sort_stats(order).print_stats(70)


def rows_of(about: str, by_rank: list[Measured]) -> list[list[str]]:
    rows = []
    most = {
        key: [tuple(max(rank[key][index][n] for rank in by_rank) for n in range(3)) for index in range(len(series))]
        for key, series in by_rank[0].items()
    }

    def ratio(name: str, how: str, n: int) -> str:
        pairs = zip(most[name, "Views"], most[name, how], strict=True)
        return f"{statistics.median(views[n] / other[n] for views, other in pairs):.2f}"

    for name in ("save", "load", "gather"):
        row = [about, name]
        for how in HOW:
            used, seconds, growth = (statistics.median(each[n] for each in most[name, how]) for n in range(3))
            row.append(f"{used:.3f}, {seconds:.3f}, {growth:.0f}")
        rows.append([*row, *(f"{ratio(name, how, 0)}, {ratio(name, how, 1)}" for how in HOW[1:])])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["big", "rows", "small"], choices=["big", "rows", "small"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wrappers", nargs="+", default=["FSDP2"], choices=list(WRAPPERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--profile", default=None, help="print a profile of this call instead: save, load or gather")
    parser.add_argument("--how", default="Views", choices=HOW, help="which of them to profile")
    parser.add_argument("--order", default="tottime")
    options = parser.parse_args()
    os.environ["FSDP_OPTIM_QUIET"] = "1"
    header = (
        "model",
        "call",
        *(f"{how}: processor s, s, MiB" for how in HOW),
        *(f"Views / {how}: processor, clock" for how in HOW[1:]),
    )
    for wrapper, model, world_size in itertools.product(options.wrappers, options.models, options.worlds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            place = Path(folder)
            if options.profile:
                run_on_ranks(
                    profiled,
                    world_size,
                    place,
                    model,
                    wrapper,
                    options.how,
                    options.profile,
                    options.order,
                    timeout=1800.0,
                )
                continue
            by_rank = run_on_ranks(measure, world_size, place, model, wrapper, options.rounds, timeout=3000.0)
            print(table(header, rows_of(f"{model}, {wrapper}, {world_size} ranks", by_rank)), flush=True)


if __name__ == "__main__":
    main()
