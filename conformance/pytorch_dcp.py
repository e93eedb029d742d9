"""PyTorch's own tests of torch.distributed.checkpoint, run against `fsdp_optim.dcp`.

    python -m conformance.pytorch_dcp CHECKOUT            # a checkout of pytorch; nothing is fetched; needs expecttest
    python -m conformance.pytorch_dcp CHECKOUT --files test_state_dict.py --only shared_weight --errors

Each file is copied into a temporary folder, with the CPU and gloo in the place of GPUs (`on_the_cpu.py`), and runs three times,
with the torch that is installed (`replaced.py`): with torch's own functions, which shows the cases that cannot pass here; with
this library's functions; and with torch's calls and this library's storage. The last lines are the table of
docs/coming-from-dcp.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conformance.on_the_cpu import on_the_cpu
from conformance.replaced import LIBRARIES, LIBRARY

FILES = (
    "test_save_load_api.py",
    "test_checkpoint.py",
    "test_compatibility.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_format_utils.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py",
    "test_planner.py",
    "test_tp_checkpoint.py",
    "test_state_dict.py",
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_fsdp_ep.py",
    "e2e/test_pipeline.py",
    "fsdp/test_fsdp_dsd.py",
)
"""The files of test/distributed/checkpoint that save, load, or make state dicts."""

_EIGHT_RANKS = ("e2e/test_fsdp_ep.py",)
_HERE = Path(__file__).resolve().parents[1]


@dataclass
class Outcomes:
    """The outcome of each case of a file: passed, failed or skipped; and the text of each failure."""

    of_case: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


_RUNNER = """
import json, sys, unittest
module, only, report = sys.argv[1:]
groups, cases = [unittest.defaultTestLoader.loadTestsFromName(module)], []
while groups:
    each = groups.pop()
    (groups.extend if isinstance(each, unittest.TestSuite) else cases.append)(each)
found = {"of_case": {}, "texts": {}}
for case in sorted((case for case in cases if only in case.id()), key=lambda case: case.id()):
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


def run(file: Path, library: str, only: str, seconds: int) -> Outcomes:
    """Run a copy of a test file in processes of its own."""
    report = file.with_suffix(f".{library}.json")
    own = file.parent / f"files-with-{library}"
    own.mkdir()
    environment = {
        **os.environ,
        LIBRARY: library,
        "TMPDIR": str(own),
        "PYTHONPATH": os.pathsep.join([str(_HERE), str(file.parent), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(seconds),
    }
    command = [sys.executable, "-c", _RUNNER, file.stem, only, str(report)]
    log, late = "", f"no case was through in {seconds} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=environment, cwd=file.parent, capture_output=True, text=True, timeout=4 * seconds, check=False
        )
        log, late = done.stdout + done.stderr, f"ended with {done.returncode}"
    if not report.exists():
        return Outcomes({"the file": "failed"}, {"the file": log[-3000:] or late})
    return Outcomes(**json.loads(report.read_text()))


def _has_storage(text: str) -> bool:
    """Return whether a test file saves or loads: otherwise "storage" would be the run with torch again."""
    return any(word in text for word in ("FileSystemWriter", "FileSystemReader", "checkpoint_id"))


def counted(outcomes: Outcomes | None, of_torch: Outcomes | None) -> str:
    """Return how many cases of a file passed, and how many of the others fail with torch too, or were skipped."""
    if outcomes is None:
        return ""
    words = list(outcomes.of_case.values())
    text = f"{words.count('passed')} of {len(words)}"
    failed = [case for case, word in outcomes.of_case.items() if word == "failed"]
    too = sum(of_torch.of_case.get(case) != "passed" for case in failed) if of_torch is not None else 0
    notes = (
        f"{too} fail with torch too" if too else "",
        f"{words.count('skipped')} skipped" if "skipped" in words else "",
    )
    return text + "".join(f", {note}" for note in notes if note)


def show(name: str, outcomes: Mapping[str, Outcomes], errors: bool) -> None:
    """Print the outcome of each case, and why it failed where torch's passes."""
    cases = dict.fromkeys(case for each in outcomes.values() for case in each.of_case)
    for case in cases:
        each = {library: outcome.of_case.get(case, "not run") for library, outcome in outcomes.items()}
        print(f"{name}: {case}: {', '.join(f'{library} {word}' for library, word in each.items())}", flush=True)
        for library, outcome in outcomes.items():
            if errors and case in outcome.texts and (library != "torch" or set(each.values()) == {"failed"}):
                print(f"--- {library}\n{outcome.texts[case][-3000:]}", flush=True)


def main() -> None:
    """Run the files, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the root of a checkout of pytorch")
    parser.add_argument("--files", nargs="*", default=FILES, help="files below test/distributed/checkpoint")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--libraries", nargs="*", default=LIBRARIES, choices=LIBRARIES, help="what to run them with")
    parser.add_argument("--errors", action="store_true", help="print the errors")
    parser.add_argument(
        "--ranks", type=int, default=4, help="the ranks of the cases that take as many as there are GPUs"
    )
    parser.add_argument("--seconds", type=int, default=900, help="the most time for a case")
    parser.add_argument("--report", type=Path, help="a JSON file for all outcomes")
    given = parser.parse_args()
    rows = [("file", *given.libraries), *[("---",) * (1 + len(given.libraries))]]
    report: dict[str, dict[str, object]] = {}
    for name in given.files:
        source = given.checkout / "test" / "distributed" / "checkpoint" / name
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / source.name
            copy.write_text(on_the_cpu(source.read_text(), 8 if name in _EIGHT_RANKS else given.ranks))
            asked = [library for library in given.libraries if library != "storage" or _has_storage(copy.read_text())]
            outcomes = {library: run(copy, library, given.only, given.seconds) for library in asked}
        show(name, outcomes, given.errors)
        of_torch = outcomes.get("torch")
        rows.append(
            (name.removesuffix(".py"), *(counted(outcomes.get(library), of_torch) for library in given.libraries))
        )
        report[name] = {library: asdict(each) for library, each in outcomes.items()}
        if given.report:
            given.report.write_text(json.dumps(report, indent=1))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
