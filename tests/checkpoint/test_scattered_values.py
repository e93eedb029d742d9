"""Many small sharded values: each is sent to one rank, which writes it, so that files are written in long runs."""

from __future__ import annotations

import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import error_text
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions, View
from fsdp_optim.buckets.objects.multipart import MultipartFile
from fsdp_optim.checkpoint.load import reading
from fsdp_optim.checkpoint.save import file_plan
from fsdp_optim.move import short_gather
from fsdp_optim.storage.posix import FolderWriter
from fsdp_optim.testing import run_on_ranks

NUM = 40  # modules, of three parameters each with three values in the optimizer
FILES = ("model.safetensors", "optim.safetensors", "model.safetensors.sums", "optim.safetensors.sums")


class Module(nn.Module):
    """Parameters that ranks have little of: even, uneven, fewer rows than ranks; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.gain = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(5))


def built() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Module() for _ in range(NUM)))
    model.append(nn.Linear(64, 512))  # larger: the ranks write it as they have it
    return model


def plain(model: nn.Sequential) -> nn.Module:
    return model


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in model)), mesh=mesh)


def replicated(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard"))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in model)), mesh=mesh)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Columns of the weights: the rows of a rank are scattered over each value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model[:-1]:
        parallelize_module(unit, mesh, {"linear": ColwiseParallel()})  # type: ignore[arg-type]
        weight = unit.linear.weight
        unit.linear.weight = nn.Parameter(distribute_tensor(weight.full_tensor().detach(), mesh, [Shard(1)]))
    return model


WRAPPERS: dict[str, tuple[int, Callable[[nn.Sequential], nn.Module]]] = {
    "FSDP2": (2, sharded),
    "FSDP2 of 4": (4, sharded),
    "HSDP": (4, replicated),
    "tensor parallel": (2, tensor_parallel),
}


def trained(wrap: Callable[[nn.Sequential], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step, with elements that follow from the full parameter alone."""
    model = wrap(built())
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = param.detach() * 0.5
    optim.step()
    return model, optim


Written = Counter[tuple[str, bool]]
"""The writes of a rank, by file and whether they are short."""


def save(
    folder: str, wrap: Callable[[nn.Sequential], nn.Module], options: dict[str, Any], how: str = "save"
) -> Written:
    model, optim = trained(wrap)
    writes: Written = Counter()
    write = FolderWriter.write

    def counted(self: FolderWriter, name: str, pieces: Any, offset: int) -> None:
        nbytes = sum(map(len, pieces))
        writes[name, nbytes < 1024] += 1
        write(self, name, pieces, offset)

    with mock.patch.object(FolderWriter, "write", counted):
        if how == "save":
            fsdp_optim.save(folder, model, optim, options=SaveOptions(**options))
        else:
            fsdp_optim.async_save(folder, model, optim, options=SaveOptions(**options)).wait()
    loaded, of_loaded = trained(wrap)
    for param in loaded.parameters():
        nn.init.zeros_(param)
    with mock.patch.object(reading, "_MOST_RANGES", 50):  # short ranges are read several times
        fsdp_optim.load(folder, loaded, of_loaded, options=LoadOptions(cast=True))
    for (name, wanted), (_, made) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        wanted, made = (getattr(p, "_local_tensor", p).detach() for p in (wanted, made))
        if options.get("weights_dtype"):
            wanted = wanted.to(options["weights_dtype"]).to(wanted.dtype)
        if not torch.equal(wanted, made):
            raise AssertionError(f"{name}: {made}, not {wanted}")
    return writes


def save_where_one_fails(folder: str, fails: int, how: str) -> tuple[str, str]:
    """The error of a save in which one rank cannot read its memory."""
    model, optim = trained(sharded)
    options = SaveOptions(timeout=60)
    if dist.get_rank() == fails:
        with mock.patch("fsdp_optim.move.short_gather.side_by_side", side_effect=OSError("the memory is gone")):
            return error_text(lambda: getattr(fsdp_optim, how)(folder, model, optim, options=options))
    return error_text(lambda: getattr(fsdp_optim, how)(folder, model, optim, options=options))


class Mixed(nn.Module):
    """Small parameters around a large one. An uploaded part of a file contains many of the small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(12))
        self.many = nn.Parameter(torch.randn(256, 64))


def parts_of_an_upload(url: str) -> int:
    """The most parts that this rank holds at once, because some of their bytes have not come."""
    model = fully_shard(nn.Sequential(*(fully_shard(Mixed()) for _ in range(16))))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    most, write = 0, MultipartFile.write

    def counted(self: MultipartFile, pieces: Any, offset: int) -> None:
        nonlocal most
        write(self, pieces, offset)
        most = max(most, len(self._open))

    options = {"storage_options": {"part_nbytes": 32 << 10}, "bucket_nbytes": 1 << 20}
    with mock.patch.object(MultipartFile, "write", counted):
        fsdp_optim.save(url, model, optim, options=SaveOptions(**options))
    return most


def copied_at_once(folder: str) -> int:
    """The most bytes that a save copies at once for messages, of parts whose elements lie between those of other parts."""
    model = fully_shard(nn.Linear(64, 2048, bias=False))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    most, copy = 0, short_gather.side_by_side

    def counted(parts: Any, nbytes: Any) -> Any:
        nonlocal most
        most = max(most, int(nbytes.sum()))
        return copy(parts, nbytes)

    views = [View("weight", "r e", {"{e}.weight": "r"})]
    with mock.patch.object(short_gather, "side_by_side", counted):
        fsdp_optim.save(folder, model, optim, options=SaveOptions(strategy="per_rank_files", views=views))
    fsdp_optim.verify(folder)
    return most


class ScatteredTest(unittest.TestCase):
    def contents(self, folder: str) -> dict[str, bytes]:
        return {name: (Path(folder) / name).read_bytes() for name in FILES}

    @parameterized.expand(
        [
            (f"{wrapper}, {how}, {options}", wrapper, how, options)
            for wrapper in WRAPPERS
            for how, options in (
                ("save", {}),
                ("async_save", {}),
                ("save", {"weights_dtype": torch.bfloat16}),
                ("save", {"bucket_nbytes": 4000}),
            )
        ]
    )
    def test_files_are_those_of_one_rank(self, _: str, wrapper: str, how: str, options: dict[str, Any]) -> None:
        world, wrap = WRAPPERS[wrapper]
        with tempfile.TemporaryDirectory() as top:
            alone, together = f"{top}/alone", f"{top}/together"
            run_on_ranks(save, 1, alone, plain, {k: v for k, v in options.items() if k != "bucket_nbytes"})
            by_rank = run_on_ranks(save, world, together, wrap, options, how)
            wanted, made = self.contents(alone), self.contents(together)
        for name in FILES[:2]:
            self.assertEqual(made[name], wanted[name], name)
        if "bucket_nbytes" in options:
            return
        for name in FILES[2:]:
            self.assertLessEqual(len(made[name]), len(wanted[name]) + 16 * 4 * world, name)
        num_short = sum(num for writes in by_rank for (_, is_short), num in writes.items() if is_short)
        self.assertLess(num_short, 4 * world)  # ends of long runs

    def test_few_values_are_written_as_they_are(self) -> None:
        """Messages would take longer: the ranks write what they have, and the file is the same."""
        with tempfile.TemporaryDirectory() as top, mock.patch.object(file_plan, "_LEAST_SCATTERED", 1 << 20):
            run_on_ranks(save, 1, f"{top}/alone", plain, {})
            by_rank = run_on_ranks(few, 2, f"{top}/together")
            wanted, made = self.contents(f"{top}/alone"), self.contents(f"{top}/together")
        for name in FILES[:2]:
            self.assertEqual(made[name], wanted[name], name)
        for writes in by_rank:
            self.assertGreater(sum(num for (_, is_short), num in writes.items() if is_short), NUM)

    def test_a_store_that_uploads_parts_gets_the_values_in_order(self) -> None:
        """Short values that came before the others would begin all parts of a file, and all of it would be held."""
        with tempfile.TemporaryDirectory() as top:
            most = max(run_on_ranks(parts_of_an_upload, 2, f"file://{top}/checkpoint"))
        self.assertGreater(most, 0)
        self.assertLess(most, 6)  # of some fifty

    def test_parts_of_fused_parameters_are_not_copied_with_what_lies_between(self) -> None:
        """Each part of a matrix is a column, and a copy of all that lies between its first and its last element the matrix."""
        with tempfile.TemporaryDirectory() as top:
            most = max(run_on_ranks(copied_at_once, 2, f"{top}/checkpoint"))
        self.assertLess(most, 2 * 2048 * 64 * 4)

    @parameterized.expand([(rank, how) for rank in range(2) for how in ("save", "async_save")])
    def test_a_rank_that_fails_ends_the_save_of_all(self, rank: int, how: str) -> None:
        with tempfile.TemporaryDirectory() as top:
            for error in run_on_ranks(save_where_one_fails, 2, f"{top}/checkpoint", rank, how):
                self.assertIn(
                    error,
                    [("RankError", f"rank {rank}: OSError: the memory is gone"), ("OSError", "the memory is gone")],
                )
            self.assertFalse((Path(top) / "checkpoint").exists())


def few(folder: str) -> Written:
    with mock.patch.object(file_plan, "_LEAST_SCATTERED", 1 << 20):
        return save(folder, sharded, {})
