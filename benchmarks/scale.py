"""Plan gather, save and load for thousands of simulated ranks, in one process: what one rank computes, and what it holds.

    python benchmarks/scale.py [--worlds 8 64 512 4096 16384] [--params 100 2000 10000] [--layouts flat rows grid layers]
        [--spacing consecutive even uneven]

Adam state of parameters whose shapes all differ, so that no two share a plan: `flat`, units of four parameters in one flat
parameter, cut into equal chunks (fairscale, FSDP1); `rows`, DTensors cut by rows (FSDP2); `grid`, by columns over 8 ranks and
by rows over the others (FSDP2 with tensor parallel); `layers`, the same with eight shapes, as models have them, where a call
plans once for all parameters that are cut alike. Plans are made and kept as in the first call of a process, and nothing is
moved. A recipient whose copies would take many gigabytes is left out. `--spacing`: the ranks of a stage of a pipeline are often
not consecutive: `even`, every eighth rank; `uneven`, the same but for the last, so that no range has them.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measure import table

from fsdp_optim.checkpoint.common.files import stored_on, written_cut
from fsdp_optim.checkpoint.load.reading import elements_of
from fsdp_optim.layout import STORAGE, FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.layout.once import once_each
from fsdp_optim.move import StateValue
from fsdp_optim.plan import Plans, RankPlan, Request

COLUMNS = 8
MOST_COPIES = 50_000_000
NAMES = ("exp_avg", "exp_avg_sq")


def shapes(num_params: int) -> Iterator[tuple[int, int]]:
    """Weights of 1 M elements and more, each of another shape."""
    return ((1024 + index, 1024) for index in range(num_params))


SPACINGS: dict[str, Callable[[int], Sequence[int]]] = {
    "consecutive": lambda world_size: range(world_size),
    "even": lambda world_size: range(0, 8 * world_size, 8),
    "uneven": lambda world_size: (*range(0, 8 * (world_size - 1), 8), 8 * world_size),
}


def flat(num_params: int, ranks: Sequence[int]) -> Iterator[Placement]:
    """Four parameters in one flat parameter."""
    unit: list[tuple[int, int]] = []
    for shape in shapes(num_params):
        unit.append(shape)
        if len(unit) == 4:
            yield from chunks_of(unit, ranks)
            unit = []
    yield from chunks_of(unit, ranks)


def chunks_of(unit: Sequence[tuple[int, int]], ranks: Sequence[int]) -> Iterator[Placement]:
    """The parameters of one flat parameter."""
    total = sum(rows * columns for rows, columns in unit)
    start = 0
    for rows, columns in unit:
        yield FlatChunks((rows, columns), start, -(-total // len(ranks)), (ranks,))
        start += rows * columns


def rows(num_params: int, ranks: Sequence[int]) -> Iterator[Placement]:
    """DTensors with Shard(0)."""
    return (MeshBoxes(shape, (len(ranks),), ((0, 0),), (ranks,)) for shape in shapes(num_params))


def grid(num_params: int, ranks: Sequence[int]) -> Iterator[Placement]:
    """DTensors with Shard(1) over eight ranks, then Shard(0) over the others."""
    mesh = (len(ranks) // COLUMNS, COLUMNS)
    return (MeshBoxes(shape, mesh, ((1, 1), (0, 0)), (ranks,)) for shape in shapes(num_params))


def layers(num_params: int, ranks: Sequence[int]) -> Iterator[Placement]:
    """The same for the parameters of equal layers, which share their placements."""
    return islice(cycle(list(grid(8, ranks))), num_params)


LAYOUTS: dict[str, Callable[[int, Sequence[int]], Iterator[Placement]]]
LAYOUTS = {"flat": flat, "rows": rows, "grid": grid, "layers": layers}


def gather(placements: Sequence[Placement], rank: int) -> list[object]:
    """One rank's plans of a gather to rank 0."""
    return list(planned(((placement, Whole(placement.shape, (0,))) for placement in placements), rank))


def save(placements: Sequence[Placement], rank: int) -> list[object]:
    """One rank's plans of a save: to the cut in which the ranks write, and from there to the file."""
    cuts = cuts_of(placements)
    moved = planned(((a, b) for a, b in zip(placements, cuts, strict=True) if a != b), rank)
    stored = once_each(lambda cut: stored_on(cut, 4 * cut.numel))
    return [*moved, *planned(((cut, stored(cut)) for cut in cuts), rank)]


def load(placements: Sequence[Placement], rank: int) -> list[object]:
    """The runs of a file that one rank reads, and its plans to where they belong."""
    cuts = cuts_of(placements)
    moved = planned(((b, a) for a, b in zip(placements, cuts, strict=True) if a != b), rank)
    whole = once_each(lambda cut: Whole(cut.shape, (STORAGE,)))
    stored = planned(((whole(cut), cut) for cut in cuts), rank, sends=False)
    read = [list(elements_of(plan, *local_part(cut, rank))) for cut, plan in zip(cuts, stored, strict=True)]
    return [*moved, *stored, *read]


def cuts_of(placements: Sequence[Placement]) -> list[Placement]:
    """The cuts in which the ranks write parameters: as in a call, asked once for those that share their placement."""

    def cut_of(placement: Placement) -> Placement:
        return written_cut(StateValue("weight", NAMES[0], torch.float32, placement), placement, None)

    return list(map(once_each(cut_of), placements))


def planned(pairs: Iterable[tuple[Placement, Placement]], rank: int, *, sends: bool = True) -> list[RankPlan]:
    """The plans of one rank between pairs of cuts, as in a call: those of parameters that are cut alike are one plan."""
    return list(Plans().each(Request(source, target, rank, sends=sends) for source, target in pairs))


def local_part(placement: Placement, rank: int) -> tuple[int, int]:
    """The offset of a rank's elements in its local tensor, and their number."""
    start, stop = placement.local_range(rank)
    return start, stop - start


def measured(plan: Callable[[], list[object]]) -> tuple[float, float]:
    """The seconds of CPU time of a plan, and the MiB by which the process grows while the plan is held."""
    gc.collect()
    before = resident_mib()
    began = time.process_time()
    planned = plan()
    seconds = time.process_time() - began
    grown = resident_mib() - before
    del planned
    return seconds, max(grown, 0.0)


def resident_mib() -> float:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def num_copies(layout: str, num_params: int, world_size: int) -> int:
    """The approximate number of copies on the recipient."""
    if layout == "layers":
        num_params = min(num_params, 8)
    columns = COLUMNS if layout in ("grid", "layers") else 1
    return num_params * min(world_size // columns, 1024) * columns // (4 if layout == "flat" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--params", type=int, nargs="+", default=[100, 2000, 10_000])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--spacing", default="consecutive", choices=list(SPACINGS))
    options = parser.parse_args()
    lines = []
    for layout in options.layouts:
        for world_size in options.worlds:
            for num_params in options.params:
                ranks = SPACINGS[options.spacing](world_size)
                placements = list(LAYOUTS[layout](num_params, ranks))
                middle = ranks[world_size // 2]
                cells: list[str] = []
                for plan in (
                    lambda: gather(placements, 0),  # noqa: B023
                    lambda: gather(placements, middle),  # noqa: B023
                    lambda: save(placements, middle),  # noqa: B023
                    lambda: load(placements, middle),  # noqa: B023
                ):
                    if not cells and num_copies(layout, num_params, world_size) > MOST_COPIES:
                        cells += ["-", "-"]
                        continue
                    seconds, mib = measured(plan)
                    cells += [f"{seconds:.3f}", f"{mib:.0f}"]
                lines.append((layout, f"{world_size:,}", f"{num_params:,}", *cells))
    headers = ["layout", "ranks", "parameters"]
    headers += [f"{what}, {unit}" for what in ("recipient", "gather", "save", "load") for unit in ("s", "MiB")]
    print(table(headers, lines))


if __name__ == "__main__":
    main()
