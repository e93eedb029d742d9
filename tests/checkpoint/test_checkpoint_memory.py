"""Extra memory of a save, an async_save and a load: a bucket beyond the rank's own shard, and no more.

Measured as the operating system sees it, so that nothing hides. What malloc keeps of freed memory is not counted: in these
processes it gives blocks of more than 64 KiB back at once, which its own rules would do for larger ones only.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import itertools
import tempfile
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from kit.cases import case_name
from kit.compare import Differs
from kit.local_parts import local_of
from kit.options import as_options
from kit.peaks import MIB, Peak
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fairscale, in_fsdp2, in_fsdp2_over_tp
from parameterized import parameterized
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

import fsdp_optim
from fsdp_optim.testing import RankPool

SLACK = 3.0  # MiB: what the interpreter needs, and whole pages
M_MMAP_THRESHOLD = -3  # of mallopt(3)
VERBS = ("save", "async_save", "afterwards", "load", "load, checked")


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers with one weight each, in float32, their Adam state, and how they are saved."""

    wrap: Callable[[nn.Module], Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contiguous: bool = True
    num_layers: int = 12
    shape: tuple[int, int] = (1024, 512)
    bucket_mib: float = 8.0


def of_large(case: Case) -> Case:
    """The same with two tensors, of which a part of one rank is larger than a bucket."""
    return dataclasses.replace(case, num_layers=2, shape=(1536, 2048), bucket_mib=2.0)


def over_tensor_parallel(model: nn.Module) -> Any:
    return in_fsdp2_over_tp(model, (1, 2))  # rows of 1 KiB on each rank


CASES = {
    "FSDP2": Case(in_fsdp2),
    "fairscale": Case(in_fairscale),
    "DDP": Case(in_ddp),
    "FSDP2 x TP": Case(over_tensor_parallel),
    "FSDP2, per_rank_files": Case(in_fsdp2, {"strategy": "per_rank_files"}),
    "DDP, not contiguous": Case(in_ddp, contiguous=False),
}
CASES |= {f"{name}, large": of_large(case) for name, case in CASES.items() if name not in ("FSDP2", "fairscale")}


class Layers(nn.Module):
    def __init__(self, case: Case, num_layers: int, shape: tuple[int, int]) -> None:
        super().__init__()
        layers = [nn.Linear(shape[1], shape[0], bias=False) for _ in range(num_layers)]
        for layer in () if case.contiguous else layers:
            layer.weight = nn.Parameter(layer.weight.detach().t())
        self.layers = nn.ModuleList(layers)
        names = [f"layers.{number}" for number in range(num_layers)]
        self.units = (*names, "")
        self.tensor_parallel = {name: RowwiseParallel() for name in names}


def built(case: Case, *, small: bool = False, step: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    """The wrapped model and its optimizer, with state if `step`. `small`: of a few KiB."""
    model = case.wrap(Layers(case, 2, (16, 16)) if small else Layers(case, case.num_layers, case.shape))
    for module in model.modules():
        if hasattr(module, "_lazy_init"):
            module._lazy_init()  # fairscale's FSDP, as after its first forward pass
    optim = torch.optim.Adam(model.parameters(), foreach=False)
    for param in model.parameters() if step else ():
        param.grad = torch.ones_like(param)
    optim.step()
    optim.zero_grad()
    return model, optim


def mib_of(model: Any, optim: torch.optim.Optimizer) -> float:
    """This rank's shard."""
    tensors = [*model.parameters(), *(value for state in optim.state.values() for value in state.values())]
    return sum(local_of(tensor).nbytes for tensor in tensors) / MIB


class Now(Peak):
    """Also what there is before the end of the context."""

    def now(self) -> float:
        """The memory of this process beyond that at the beginning of the context, in MiB."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return (self._read("VmRSS") - self._before) / 1024


class Found(NamedTuple):
    """MiB on one rank; less than `at_least` would say that nothing was measured."""

    extra: float
    at_most: float
    at_least: float


def measured(case: Case, root: Path) -> dict[str, Found]:
    """By verb, on this rank.

    A small save and load come first, which start what stays: threads, connections, modules.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    peaks = {}
    save = functools.partial(_saved, case, root)
    with cpu():
        save(fsdp_optim.save, *built(case, small=True))
        save(fsdp_optim.async_save, *built(case, small=True))
        _loaded(case, root, *built(case, small=True), compare=True)

        bucket = case.bucket_mib + SLACK
        model, optim = built(case)
        shard = mib_of(model, optim)
        with Peak() as peak:
            written = save(fsdp_optim.save, model, optim).nbytes_written / MIB
        peaks["save"] = Found(peak.mib, bucket, 0.0)
        both = Now()
        with both:
            handle = save(fsdp_optim.async_save, model, optim)
            handle.wait()
            peaks["afterwards"] = Found(both.now(), SLACK, -SLACK)
        peaks["async_save"] = Found(both.mib, written + bucket, 0.9 * written)
        del model, optim

        for verb, check in (("load", False), ("load, checked", True)):
            model, optim = built(case, step=False)
            dist.barrier()
            with Peak() as peak:
                _loaded(case, root, model, optim, compare=check)
            peaks[verb] = Found(peak.mib, shard + bucket, 0.9 * shard)
    return peaks


def _saved(case: Case, root: Path, verb: Callable[..., Any], model: Any, optim: torch.optim.Optimizer) -> Any:
    dist.barrier()
    options = {"overwrite": True, "durable": False, "progress": False, **case.options}
    given = as_options(fsdp_optim.SaveOptions, bucket_nbytes=_bucket(case), **options)
    return verb(root / "now", model, optim, **given)


def _loaded(case: Case, root: Path, model: Any, optim: torch.optim.Optimizer, **options: Any) -> None:
    fsdp_optim.load(
        root / "now",
        model,
        optim,
        **as_options(fsdp_optim.LoadOptions, **options, bucket_nbytes=_bucket(case), progress=False),
    )


def _bucket(case: Case) -> int:
    return int(case.bucket_mib * MIB)


class Measured(unittest.TestCase):
    pool: RankPool
    found: dict[str, list[dict[str, Found]]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        cls.pool = RankPool()  # of its own: what mallopt says, it says for good
        cls.addClassCleanup(cls.pool.close)

    def by_rank(self, name: str) -> list[dict[str, Found]]:
        if name not in self.found:
            with tempfile.TemporaryDirectory() as folder:
                self.found[name] = self.pool.run(measured, 2, CASES[name], Path(folder))
        return self.found[name]

    def check(self, name: str, verb: str) -> None:
        told = [peaks[verb] for peaks in self.by_rank(name)]
        if not all(peak.at_least <= peak.extra <= peak.at_most for peak in told):
            raise Differs(f"{name}, {verb}, MiB on each rank: {told}")


LATER = {
    *("DDP", "FSDP2 x TP", "FSDP2, per_rank_files", "FSDP2, per_rank_files, large"),
    *("DDP, not contiguous", "DDP, not contiguous, large"),
}
"""In `make test-long` only: the others have the same wrappers with tensors that are larger than a bucket."""


class MemoryTest(Measured):
    @parameterized.expand(
        list(itertools.product([name for name in CASES if name not in LATER], VERBS)), name_func=case_name
    )
    def test_extra_memory(self, name: str, verb: str) -> None:
        self.check(name, verb)


@pytest.mark.slow
class MoreMemoryTest(Measured):
    @parameterized.expand(list(itertools.product(sorted(LATER), VERBS)), name_func=case_name)
    def test_extra_memory(self, name: str, verb: str) -> None:
        self.check(name, verb)
