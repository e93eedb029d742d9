"""Runs the tortures one after the other, each in separate processes, and prints their figures."""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak.torture import PATIENCE, Torture

TESTS = Path(__file__).parents[1]
SHARES = {"mutations": 4.0, "kills": 4.0, "power_cuts": 2.0, "faults": 2.0, "races": 1.0, "rounds": 1.0}
"""The share of the time of each torture, by the name of its module in this package."""
_ALONE = {"rounds"}  # these start ranks themselves, and watch their memory
_GRACE = 300.0 * PATIENCE  # seconds that a torture may take to end


def main() -> int:
    """Run the tortures that the environment variables select. Returns the exit code, 1 after a failure."""
    if len(sys.argv) > 1:
        return _one(json.loads(sys.argv[1]))
    seconds = float(os.environ.get("SOAK_SECONDS") or 600)
    seed = int(os.environ.get("SEED") or random.SystemRandom().getrandbits(32))
    names = [name for name in os.environ.get("SOAK_ONLY", "").split(",") if name] or list(SHARES)
    case = os.environ.get("SOAK_CASE")
    cases = os.environ.get("SOAK_CASES")
    jobs = 1 if case else int(os.environ.get("SOAK_JOBS") or os.cpu_count() or 1)
    total = sum(SHARES[name] for name in names)
    most = f" or {cases} cases of each" if cases else ""
    print(f"{time.strftime('%Y-%m-%d')}, seed {seed}, {seconds:g} s{most}, {jobs} at once", flush=True)
    failures = 0
    for name in names:
        stride = 1 if name in _ALONE else jobs
        order = {"name": name, "seed": seed, "seconds": seconds * SHARES[name] / total, "stride": stride}
        order |= {"cases": int(cases)} if cases else {}
        orders = [{**order, "first": first} for first in range(stride)] if not case else [{**order, "only": int(case)}]
        failures += _report(name, *_in_processes(orders))
    print(f"{failures} failures, seed {seed}")
    return 1 if failures else 0


def _one(order: dict[str, Any]) -> int:
    """Run one torture in this process. The last line of the output has its figures."""
    logging.getLogger("fsdp_optim").setLevel(logging.ERROR)
    torture = Torture(**order)
    signal.signal(signal.SIGTERM, torture.stop)  # with the figures until then
    importlib.import_module(f"soak.{torture.name}").run(torture)
    print("\n" + json.dumps([torture.figures, torture.failures]), flush=True)
    return 0


def _in_processes(orders: Sequence[dict[str, Any]]) -> tuple[float, Counter[str], list[str]]:
    """The seconds, figures and failures of a torture."""
    began = time.monotonic()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    where = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    where |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    figures: Counter[str] = Counter()
    failures: list[str] = []
    started = []
    for order in orders:
        command = [sys.executable, "-m", "soak", json.dumps(order)]
        pipe = subprocess.PIPE
        started.append((order, subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=where)))
    for order, process in started:
        try:
            text, errors = process.communicate(timeout=order["seconds"] + _GRACE)
            done, wrong = json.loads(text.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            done, wrong = {}, [f"{order}: not over {_GRACE:g} s after its time\n{process.communicate()[1][-3000:]}"]
        except (ValueError, IndexError):
            done, wrong = {}, [f"{order}: ended with {process.returncode}:\n{errors[-3000:]}"]
        figures.update(done)
        failures += wrong
    return time.monotonic() - began, figures, failures


def _report(name: str, seconds: float, figures: Counter[str], failures: Sequence[str]) -> int:
    print(f"{name} {seconds:.0f} s")
    for what, count in figures.items():
        print(f"{count:>12,} {what}")
    print(f"{len(failures):>12,} failures", flush=True)
    for failure in failures:
        print(f"  {failure}", flush=True)
    return len(failures)
