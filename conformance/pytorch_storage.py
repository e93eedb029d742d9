"""PyTorch's own tests of torch.distributed.checkpoint, with this library's `Writer` and `Reader` in the place of FileSystemWriter
and FileSystemReader.

    python conformance/pytorch_storage.py CHECKOUT               # a checkout of pytorch; needs the package expecttest
    python conformance/pytorch_storage.py CHECKOUT --torch       # with torch's own classes, to compare
    python conformance/pytorch_storage.py CHECKOUT test_dtensor_checkpoint.py

Nothing is fetched or copied: each file is imported from the checkout, in processes of its own, and run on the CPU with gloo.
Tests that ask for several GPUs are run too, on the CPU, where they can be. It prints a line for each file, and one for each
failure.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

FOLDER = Path("test/distributed/checkpoint")
FILES = (
    "test_checkpoint.py",
    "test_compatibility.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_tp_checkpoint.py",
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_pipeline.py",
    "fsdp/test_fsdp_dsd.py",
)
OURS, TORCHS = "ours", "torch"
CLASSES = "FSDP_OPTIM_TESTED_CLASSES"
"""The variable that says in every process of a test file whose classes are tested; only there is anything replaced."""

_ARGUMENTS_OF_TORCH = (  # of FileSystemWriter, which say how it writes
    *("single_file_per_rank", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"),
    *("_extensions", "serialization_format"),
)


def replace_classes() -> None:
    """Put this library's classes in the place of torch's, in this process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem

    from fsdp_optim.dcp import Reader, Writer

    class ReplacedWriter(Writer):
        def __init__(self, path: Any, sync_files: bool = True, overwrite: bool = True, **others: Any) -> None:
            assert set(others) <= set(_ARGUMENTS_OF_TORCH), others
            super().__init__(path, overwrite=overwrite, durable=sync_files)

    class ReplacedReader(Reader):
        def __init__(self, path: Any, **others: Any) -> None:
            super().__init__(path)

    for module in (dcp, filesystem, _storage_utils):
        for name, made in (("FileSystemWriter", ReplacedWriter), ("FileSystemReader", ReplacedReader)):
            setattr(module, name, made)


def run_without_gpus() -> None:
    """Let tests run on the CPU that ask for GPUs; those that truly need one fail."""
    import torch
    from torch.testing._internal import common_distributed

    def stay(value: Any, *_: Any, **__: Any) -> Any:
        return value

    for kind in (torch.Tensor, torch.nn.Module):
        setattr(kind, "cuda", stay)  # noqa: B010
    setattr(torch.cuda, "set_device", stay)  # noqa: B010

    def any_number(*_: Any, **__: Any) -> Any:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = any_number
    common_distributed.requires_nccl = any_number
    common_distributed.requires_accelerator_dist_backend = any_number


def run_file(file: Path) -> None:
    """Run the tests of one file in this process; print the numbers, and the last line of each failure."""
    sys.path.insert(0, str(file.parent))
    loaded = importlib.import_module(file.stem)
    suite = unittest.defaultTestLoader.loadTestsFromModule(loaded)
    result = unittest.TextTestRunner(stream=io.StringIO() if not os.environ.get("VERBOSE") else None).run(suite)
    wrong = [*result.failures, *result.errors]
    passed = result.testsRun - len(wrong) - len(result.skipped)
    print(f"NUMBERS {passed} {len(wrong)} {len(result.skipped)}")
    for test, text in wrong:
        lines = [line for line in text.strip().splitlines() if "Error" in line or "Exception" in line]
        print(f"    {test.id()}: {lines[-1] if lines else text[-200:]}")
    for test, why in result.skipped:
        print(f"    {test.id()}: skipped: {why}")
    sys.stdout.flush()


if os.environ.get(CLASSES):  # also in the processes that the tests spawn, which import this file
    if os.environ[CLASSES] == OURS:
        replace_classes()
    run_without_gpus()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--torch", action="store_true", help="test torch's own classes")
    arguments = parser.parse_args()
    if os.environ.get(CLASSES):
        run_file(arguments.checkout)
        return
    total = [0, 0, 0]
    for name in arguments.files:
        environment = {**os.environ, CLASSES: TORCHS if arguments.torch else OURS, "CUDA_VISIBLE_DEVICES": ""}
        file = arguments.checkout / FOLDER / name
        try:
            done = subprocess.run(
                [sys.executable, __file__, file], env=environment, capture_output=True, text=True, timeout=900
            )
            output, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            output, errors = "", "took more than 15 minutes"
        numbers = next((line.split()[1:] for line in output.splitlines() if line.startswith("NUMBERS")), None)
        if numbers is None:
            print(f"{name}: did not run: {errors.strip()[-300:]}", flush=True)
            continue
        total = [a + int(b) for a, b in zip(total, numbers, strict=True)]
        print(f"{name}: {numbers[0]} passed, {numbers[1]} failed, {numbers[2]} skipped")
        print(output[output.index("NUMBERS") :].partition("\n")[2], end="", flush=True)
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")


if __name__ == "__main__":
    main()
