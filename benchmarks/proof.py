"""What proofs of resumes catch, and what a proven step costs.

    python benchmarks/proof.py faults [--saved 4] [--worlds 4 2 1]    # of the faults in tests/kit/proof_faults.py
    python benchmarks/proof.py cost [--width 1024]                    # of a step, by the state that the ranks have

"faults" prints a table for docs/reliability.md: for each fault, whether the proof of a step catches it, which cause it names, and
the largest difference of the losses of the next 20 steps from the honest resume's, at the number of ranks that saved: what a
tolerance on the curve sees.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.proof_faults import FAULTS, saved, verdicts
from kit.proof_jobs import NEVER
from kit.wraps import WRAPPERS
from measure import table

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

NUM_AFTER = 20
TOLERANCES = (0.01, 0.05)


def all_verdicts(root: Any, names: list[str], num_after: int) -> dict[str, Any]:
    """Runs on every rank."""
    logging.getLogger("fsdp_optim").disabled = True  # its lines would be among the table's
    return verdicts(root, names, num_after)


def faults(saved_by: int, worlds: list[int]) -> None:
    kinds = dict.fromkeys(replace(fault.kind, tied=True) for fault in FAULTS)
    results: dict[tuple[str, int], Any] = {}
    for kind in kinds:
        names = [fault.name for fault in FAULTS if replace(fault.kind, tied=True) == kind]
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(saved, saved_by, root, kind)
            for world in worlds:
                num_after = NUM_AFTER if world == saved_by else 0
                by_name = run_on_ranks(all_verdicts, world, root, ["", *names], num_after, timeout=1800.0)[0]
                for name in names:
                    proof, losses = by_name[name]
                    results[name, world] = proof, apart(losses, by_name[""][1])
    rows, caught, named, by_loss = [], dict.fromkeys(worlds, 0), dict.fromkeys(worlds, 0), dict.fromkeys(TOLERANCES, 0)
    injected = dict.fromkeys(worlds, 0)
    for fault in FAULTS:
        cells = []
        for world in worlds:
            proof, _ = results[fault.name, world]
            cause = fault.at_same if world == saved_by else fault.at_other if world >= fault.fewest else ""
            injected[world] += bool(cause)
            caught[world] += bool(cause) and proof.outcome == "different"
            named[world] += bool(cause) and proof.cause == cause
            cells.append(proof.cause or (f"({proof.outcome})" if cause else "no fault there"))
        largest = results[fault.name, saved_by][1]
        for tolerance in TOLERANCES:
            by_loss[tolerance] += largest > tolerance
        rows.append([fault.name, *cells, f"{largest:.2%}"])
    print(table(["fault", *(f"{saved_by} -> {world} ranks" for world in worlds), "loss, 20 steps"], rows))
    for world in worlds:
        print(f"{saved_by} -> {world}: {injected[world]} faults, {caught[world]} caught, cause named {named[world]}")
    for tolerance, number in by_loss.items():
        print(f"a tolerance of {tolerance:.0%} on the loss, {saved_by} -> {saved_by}: {number} of {len(FAULTS)} caught")


def apart(losses: list[float], honest: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, honest, strict=True))


class Layers(nn.Module):
    units = ("layers.0", "layers.1", "layers.2", "layers.3", "")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def times(root: str, width: int, prove: bool) -> tuple[list[float], list[float], int]:
    """Runs on every rank. Returns seconds of the steps that follow a save, of the others, and the bytes of the state."""
    logging.getLogger("fsdp_optim").disabled = True
    model: Any = WRAPPERS["FSDP2"](Layers(width))
    optim = torch.optim.AdamW(model.parameters())
    options = fsdp_optim.ManagerOptions(durable=False, signals=(), progress=False)
    proven, others = [], []
    with fsdp_optim.CheckpointManager(root, model, optim, every=NEVER, prove=prove, options=options) as manager:
        for number in range(1, 25):
            started = time.perf_counter()
            optim.zero_grad()
            model(torch.randn(64, width)).square().mean().backward()
            optim.step()
            manager.step(number)
            seconds = time.perf_counter() - started
            (proven if number % 6 == 1 and number > 6 else others if number > 6 else []).append(seconds)
            if number % 6 == 0:
                manager.save(number)
                manager.wait()
    return proven, others, 3 * 4 * sum(param.numel() for param in model.parameters())


def cost(world: int, width: int) -> None:
    rows = []
    for prove in (False, True):
        with tempfile.TemporaryDirectory() as root:
            proven, others, nbytes = run_on_ranks(times, world, root, width, prove, timeout=1800.0)[0]
        row = (statistics.median(others), statistics.median(proven), min(others), min(proven))
        rows.append([f"prove={prove}", f"{nbytes / 1e6:.0f} MB", *(f"{seconds * 1e3:.1f} ms" for seconds in row)])
    print(table(["", "state", "a step", "the step after a save", "fastest step", "fastest after a save"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "cost"))
    parser.add_argument("--saved", type=int, default=4)
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    if args.what == "faults":
        faults(args.saved, args.worlds)
    else:
        cost(args.saved, args.width)


if __name__ == "__main__":
    main()
