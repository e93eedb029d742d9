"""A window of a run has the elements of the run that lie in it, counted from the beginning of the window."""

from __future__ import annotations

import itertools

from fsdp_optim.plan import Copy, clip_to_source, clip_to_target, runs_of


def pairs(copy: Copy) -> list[tuple[int, int]]:
    """(source element, target element) of each element of a run."""
    return [(copy.source_offset + i, copy.target_offset + i) for i in range(copy.numel)]


def test_windows_of_runs() -> None:
    for numel, source, target, start, stop in itertools.product(range(4), (0, 2, 3), (0, 1, 4), range(6), range(8)):
        run = Copy(-1, 0, (numel,), source, (1,), target, (1,))
        window = range(start, stop)
        in_source = [pair for part in clip_to_source(run, start, stop) for pair in pairs(part)]
        assert in_source == [(s - start, t) for s, t in pairs(run) if s in window]
        in_target = [pair for part in clip_to_target(run, start, stop) for pair in pairs(part)]
        assert in_target == [(s, t - start) for s, t in pairs(run) if t in window]
        clipped = [*clip_to_source(run, start, stop), *clip_to_target(run, start, stop)]
        assert all(part.numel for part in clipped)
        assert all((part.source_rank, part.target_rank, part.is_run) == (-1, 0, True) for part in clipped)
        assert [*runs_of(run)] == [(source, target, numel)]
