"""The lines of `inspect --ranks`: the bytes of each rank, and what was assumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fsdp_optim.api import PlacementResult
from fsdp_optim.cli.output import print_lines, print_table
from fsdp_optim.cli.units import counted, sized
from fsdp_optim.errors import shortened

_MOST_ROWS = 16
_MOST_EMPTY = 4
_COLUMNS = ("rank", "weights", "state", "padding", "total", "of the mean")


def print_placement(placement: PlacementResult, *, shows_all: bool) -> None:
    """Print the table. `shows_all`: a row for each rank; else equal neighbours are one row, and there are few rows."""
    print_lines(["", f"on {counted(placement.num_ranks, 'rank')} under {placement.wrapper}"])
    rows = list(_rows(placement, folds=not shows_all))
    most = len(rows) if shows_all else _MOST_ROWS
    print_table(_COLUMNS, rows[:most], right=_COLUMNS)
    print_lines([f"... and {len(rows) - most} more: --all shows them"] if len(rows) > most else [])
    print_lines(_figures(placement))


def _rows(placement: PlacementResult, *, folds: bool) -> Iterator[tuple[str, ...]]:
    columns = zip(placement.weights, placement.state, placement.padding, strict=True)
    nbytes = placement.nbytes
    for _, run in itertools.groupby(enumerate(columns), lambda pair: pair[1] if folds else pair):
        ranks = [rank for rank, _ in run]
        total = nbytes[ranks[0]]
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"
        parts = (each[ranks[0]] for each in (placement.weights, placement.state, placement.padding))
        share = f"{total / placement.mean:.1%}" if placement.mean else "-"
        yield label, *map(sized, parts), sized(total), share


def _figures(placement: PlacementResult) -> Iterator[str]:
    nbytes = placement.nbytes
    yield f"largest:   rank {placement.largest}, {sized(max(nbytes))}"
    yield f"smallest:  rank {placement.smallest}, {sized(min(nbytes))}"
    yield f"mean:      {sized(placement.mean)}"
    yield f"imbalance: {placement.imbalance:.4g} (largest / mean)"
    if placement.empty:
        yield f"empty:     {shortened((f'ranks {text}' for text in placement.describe_empty()), _MOST_EMPTY, '; ')}"
    yield from (f"assumed:   {rule}" for rule in placement.rules)
