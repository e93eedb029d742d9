"""Train on 4 ranks without a stop; resume from a checkpoint on 4, 2, 3 and 1 ranks and without FSDP; compare.

Exits non-zero when a resumed run is not the run that was never stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from demo.compare import Comparison, compare
from demo.report import draw, table
from demo.train import Plan, Run, resume_plain, train_sharded
from fsdp_optim.testing import run_on_ranks

WORLD_SIZE = 4
RESUMED_WORLD_SIZES = (4, 2, 3, 1)  # 3 does not divide the units' sizes: its shards are uneven


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # as the ranks: one more or less must not change what is compared
    start = time.perf_counter()
    plan = Plan(options.steps, options.save_after, options.out / "checkpoint.pt")
    whole = on_rank_0(WORLD_SIZE, plan, resume=False)
    resumed = {names_of(size): on_rank_0(size, plan, resume=True) for size in RESUMED_WORLD_SIZES}
    resumed["without FSDP"] = resume_plain(plan)

    saved_state = torch.load(plan.checkpoint, weights_only=True)["optim"]
    comparisons = [
        compare(name, run, whole, saved_state, must_be_bit_exact=name == names_of(WORLD_SIZE))
        for name, run in resumed.items()
    ]
    draw(options.out / "loss.png", whole, resumed, plan.save_after)
    print(f"\nSaved after step {plan.save_after} on {WORLD_SIZE} ranks, resumed up to step {plan.steps}:\n")
    print(table(comparisons))
    print(f"\nLoss curves: {options.out / 'loss.png'}   {time.perf_counter() - start:.0f} s in all\n")
    return report_failures(comparisons)


def on_rank_0(world_size: int, plan: Plan, resume: bool) -> Run:
    run = run_on_ranks(train_sharded, world_size, plan, resume, timeout=600.0)[0]
    assert run is not None  # rank 0 is the recipient
    return run


def names_of(world_size: int) -> str:
    return f"{world_size} rank" + ("s" if world_size > 1 else "")


def report_failures(comparisons: list[Comparison]) -> int:
    """Print the failures; return the exit status."""
    failures = [f"{c.name}: {failure}" for c in comparisons for failure in c.failures()]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="length of the run (default: %(default)s)")
    parser.add_argument("--save-after", type=int, default=120, help="the resume point (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.save_after < options.steps:
        parser.error(f"--save-after must lie between 0 and --steps {options.steps}, not {options.save_after}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
