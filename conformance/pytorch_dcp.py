"""PyTorch's own tests of torch.distributed.checkpoint's state dicts, run against `fsdp_optim.dcp`.

    python -m conformance.pytorch_dcp CHECKOUT            # a checkout of pytorch; nothing is fetched
    python -m conformance.pytorch_dcp CHECKOUT --only shared_weight --errors

Each file is copied into a temporary folder, with the CPU and gloo in the place of GPUs, and runs twice: with torch's own
functions, which shows the cases that cannot pass here, and with this library's. Both runs use the torch that is installed. The
last lines are the table of docs/coming-from-dcp.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = (
    "test_state_dict.py",
    "fsdp/test_fsdp_dsd.py",
    "e2e/test_pipeline.py",
    "e2e/test_fsdp_ep.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_e2e_save_and_load.py",
)
"""The files of test/distributed/checkpoint that use these functions."""

NAMES = (
    *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
    *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
)
_SWITCH = "FSDP_OPTIM_CONFORMANCE"
_HERE = Path(__file__).resolve().parents[1]
_ON_THE_CPU = (
    (r"^ *@(skip_if_lt_x_gpu|requires_nccl|requires_accelerator\w*|skip_unless_torch_gpu)\b.*\n", ""),
    (r"torch\.cuda\.device_count\(\)", "NUM_RANKS"),
    (r"\.cuda\(\)", ""),
    (r'"cpu:gloo,cuda:nccl"|"cuda:nccl,cpu:gloo"|"nccl"', '"gloo"'),
    (r"torch\.cuda\.set_device\([^)]*\)", "None"),
    (r'"cuda(:\d)?"', '"cpu"'),
    (r"'cuda'", "'cpu'"),
    (r'f"cuda:\{[^}]*\}"', '"cpu"'),
)


def use_ours(namespace: dict[str, Any]) -> None:
    """Replace torch's functions in a test file, where the run asks for that. Called at the end of the copy of the file."""
    import torch.multiprocessing
    import torch.testing._internal.distributed.common_state_dict as mixin
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def forked(case: Any) -> None:
        """Start the ranks without importing torch in each of them."""
        case._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = forked  # type: ignore[method-assign]
    _let_fsdp1_be_on_the_cpu()
    if os.environ.get(_SWITCH) != "ours":
        return

    from fsdp_optim import dcp

    ours = {name: getattr(dcp, name) for name in NAMES}
    for name in NAMES:
        if name in namespace:
            namespace[name] = ours[name]
        if hasattr(mixin, name):
            setattr(mixin, name, ours[name])
    for name, value in list(namespace.items()):
        if isinstance(value, types.ModuleType) and value.__name__ == "torch.distributed.checkpoint.state_dict":
            namespace[name] = types.SimpleNamespace(**{**vars(value), **ours})


def _let_fsdp1_be_on_the_cpu() -> None:
    """Give FSDP1 the CPU as its device, without which it asks for an accelerator, and its tests as many devices as they need."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    made = FullyShardedDataParallel.__init__

    def on_cpu(unit: Any, *args: Any, **kwargs: Any) -> None:
        made(unit, *args, **{"device_id": torch.device("cpu"), **kwargs})

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    torch.accelerator.device_count = lambda: 64


def on_the_cpu(text: str, num_ranks: int) -> str:
    """Return a test file for the CPU, which asks `use_ours` when it is imported."""
    for pattern, replacement in _ON_THE_CPU:
        text = re.sub(pattern, replacement.replace("NUM_RANKS", str(num_ranks)), text, flags=re.MULTILINE)
    asks = "\nfrom conformance.pytorch_dcp import use_ours as _use_ours\n\n_use_ours(globals())\n\n\n"
    body, main, rest = text.partition('if __name__ == "__main__":')
    return body + asks + main + rest


@dataclass
class Outcomes:
    """The outcome of each case of a file: passed, failed or skipped; and the text of each failure."""

    of_case: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


_RUNNER = """
import json, sys, unittest
module, only, report = sys.argv[1:]
cases = [case for group in unittest.defaultTestLoader.loadTestsFromName(module) for case in group if only in case.id()]
found = {"of_case": {}, "texts": {}}
for case in cases:
    result = unittest.TestResult()
    case.run(result)
    name = case.id().split(".", 1)[1]
    wrong = [text for _, text in (*result.failures, *result.errors)]
    found["of_case"][name] = "failed" if wrong else "skipped" if result.skipped else "passed"
    if wrong:
        found["texts"][name] = wrong[0]
    with open(report, "w") as file:
        json.dump(found, file)
"""
"""Writes its report after each case, so that a case which hangs loses only the cases after it."""


def run(file: Path, ours: bool, only: str, seconds: int) -> Outcomes:
    """Run a copy of a test file in processes of its own."""
    report = file.with_suffix(".ours.json" if ours else ".torch.json")
    environment = {
        **os.environ,
        _SWITCH: "ours" if ours else "torch",
        "PYTHONPATH": os.pathsep.join([str(_HERE), str(file.parent)]),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
    }
    command = [sys.executable, "-c", _RUNNER, file.stem, only, str(report)]
    log, late = "", ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=environment, cwd=file.parent, capture_output=True, text=True, timeout=seconds, check=False
        )
        log = done.stdout + done.stderr
        late = "" if done.returncode == 0 else f"ended with {done.returncode}"
    if not report.exists():
        return Outcomes({"the file": "failed"}, {"the file": log or late or f"no case was through in {seconds} s"})
    return Outcomes(**json.loads(report.read_text()))


def main() -> None:
    """Run the files, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the root of a checkout of pytorch")
    parser.add_argument("--files", nargs="*", default=FILES, help="files below test/distributed/checkpoint")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument(
        "--errors", action="store_true", help="print the error of each case that fails with this library alone"
    )
    parser.add_argument("--ranks", type=int, default=4, help="the ranks of each case")
    parser.add_argument("--seconds", type=int, default=1800, help="the most time for a file")
    given = parser.parse_args()
    rows = [("file", "cases", "passed", "failed", "failed with torch too", "skipped")]
    for name in given.files:
        source = given.checkout / "test" / "distributed" / "checkpoint" / name
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / source.name
            copy.write_text(on_the_cpu(source.read_text(), given.ranks))
            theirs, ours = (run(copy, which, given.only, given.seconds) for which in (False, True))
        both = {case for case, outcome in theirs.of_case.items() if outcome == "failed"}
        alone = [case for case, outcome in ours.of_case.items() if outcome == "failed" and case not in both]
        for case, outcome in ours.of_case.items():
            print(f"{name}: {case}: {outcome} ({theirs.of_case.get(case)} with torch)", flush=True)
            if given.errors and case in alone:
                print(ours.texts[case][-3000:])
        counts = {word: sum(outcome == word for outcome in ours.of_case.values()) for word in ("passed", "skipped")}
        failed_too = sum(ours.of_case.get(case) == "failed" for case in both)
        rows.append((name, *map(str, (len(ours.of_case), counts["passed"], len(alone), failed_too, counts["skipped"]))))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
