"""Extra memory of a save that casts the weights: a bucket, whatever they are cast to, and the snapshot of an async_save."""

from __future__ import annotations

import ctypes
import itertools
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import case_name
from kit.compare import Differs
from kit.options import as_options
from kit.peaks import MIB, Peak
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fsdp2
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import RankPool

BUCKET, SLACK = 8.0, 4.0  # MiB; the slack is what the interpreter needs, and whole pages
M_MMAP_THRESHOLD = -3  # of mallopt(3): so that freed memory goes back at once
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

DTYPES = [(F32, BF16), (BF16, F32), (F32, F64)]
SHAPES = {"large": (1, (2048, 3072)), "many": (12, (1024, 512))}
WRAPPERS = {"DDP": (in_ddp, True), "DDP, not contiguous": (in_ddp, False), "FSDP2": (in_fsdp2, True)}


CASES = [("DDP", "many"), ("DDP, not contiguous", "large"), ("DDP, not contiguous", "many"), ("FSDP2", "many")]


class Layers(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self, num: int, shape: tuple[int, int], dtype: torch.dtype, contiguous: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) for _ in range(num))
        for layer in () if contiguous else self.layers:
            layer.weight = nn.Parameter(layer.weight.detach().t())


def measured(root: Path, wrapper: str, size: str) -> dict[str, tuple[float, float]]:
    """By the dtypes and the call: the MiB that it took at most on this rank, and the MiB that it wrote."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    wrap, contiguous = WRAPPERS[wrapper]
    peaks = {}
    with cpu():
        for (before, after), verb in itertools.product(DTYPES, ("save", "async_save")):

            def call(
                num: int, shape: tuple[int, int], dtypes: Any = (before, after), verb: str = verb
            ) -> tuple[float, float]:
                model = wrap(Layers(num, shape, dtypes[0], contiguous))
                options = {"overwrite": True, "durable": False, "progress": False, "weights_dtype": dtypes[1]}
                dist.barrier()
                with Peak() as peak:
                    given = as_options(fsdp_optim.SaveOptions, bucket_nbytes=int(BUCKET * MIB), **options)
                    done = getattr(fsdp_optim, verb)(root / "now", model, **given)
                    saved = done.wait() if verb == "async_save" else done
                return peak.mib, saved.nbytes_written / MIB

            call(2, (16, 16))  # which starts what stays: threads, connections, modules
            peaks[f"{before} -> {after}, {verb}"] = call(*SHAPES[size])
    return peaks


class CastMemoryTest(unittest.TestCase):
    pool: RankPool

    @classmethod
    def setUpClass(cls) -> None:
        cls.pool = RankPool()  # of its own: what mallopt says, it says for good
        cls.addClassCleanup(cls.pool.close)

    @parameterized.expand(CASES, name_func=case_name)
    def test_a_bucket(self, wrapper: str, size: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = self.pool.run(measured, 2, Path(folder), wrapper, size)
        wrong = []
        for rank, peaks in enumerate(by_rank):
            for name, (mib, written) in peaks.items():
                at_most = BUCKET + SLACK + (written if name.endswith("async_save") else 0)
                wrong += [f"rank {rank}, {name}: {mib:.1f} of {at_most:.1f} MiB"] if mib > at_most else []
        if wrong:
            raise Differs("; ".join(wrong))
