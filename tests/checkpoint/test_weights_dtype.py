"""save(..., weights_dtype=): weights are cast as they are written, in bounded memory; the optimizer's state is not."""

from __future__ import annotations

import copy
import json
import tempfile
import unittest
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoint_format import in_order
from kit.compare import check_same, error_text
from kit.optimizers import adam
from kit.options import as_options
from kit.store_calls import url_of
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import fsdp_optim
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectStore
from fsdp_optim.checkpoint.common.casting import cast_part
from fsdp_optim.formats.own import OURS
from fsdp_optim.testing import run_on_ranks

LOADERS = dict(zip(WRAPPERS, [*list(WRAPPERS)[1:], next(iter(WRAPPERS))], strict=True))
BF16 = torch.bfloat16


def state_file(oracle: Oracle) -> dict[str, torch.Tensor]:
    return {f"state.{name}.{key}": value for name, values in oracle.by_name().items() for key, value in values.items()}


def save_all(folder: str, wrappers: Sequence[str]) -> None:
    with cpu():
        for wrapper in wrappers:
            trained = Trained(wrapper, adam)
            before = trained.gather(None, "name")
            given: dict[str, Any] = {"weights_dtype": BF16, "process_group": trained.process_group}
            for at, options in (
                ("at once", {}),
                ("in windows", {"bucket_nbytes": 64}),
                ("by rank", {"strategy": "per_rank_files"}),
                ("by rank in windows", {"strategy": "per_rank_files", "bucket_nbytes": 64}),
            ):
                fsdp_optim.save(
                    f"{folder}/{wrapper} {at}",
                    trained.model,
                    trained.optim,
                    **as_options(fsdp_optim.SaveOptions, **given, **options),
                )
            fsdp_optim.async_save(
                f"{folder}/{wrapper} async", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **given)
            ).wait()
            check_same("the live optimizer", trained.gather(None, "name"), before)
            weights = fsdp_optim.gather_full_model_state_dict(
                trained.model, None, options=fsdp_optim.CallOptions(process_group=trained.process_group)
            )
            check_same("the live model", in_order(weights or {}), in_order(Oracle(adam).model.state_dict()))


def load_all(folder: str, wrappers: Sequence[str]) -> None:
    with cpu():
        oracle = Oracle(adam)
        wanted = {name: value.to(BF16).to(torch.float32) for name, value in oracle.model.state_dict().items()}
        for saver, loader in [(saver, LOADERS[saver]) for saver in wrappers]:
            target = Trained(loader, adam, 0)
            group, path = target.process_group, f"{folder}/{saver} async"
            fsdp_optim.load(
                path,
                target.model,
                target.optim,
                options=fsdp_optim.LoadOptions(cast=True, compare=True, process_group=group),
            )
            check_same(f"{saver} into {loader}", in_order(target.gather_model()), in_order(wanted))
            check_same(f"{saver} into {loader}: state", target.gather(None, "name")["state"], oracle.by_name())


class WrappersTest(unittest.TestCase):
    @expand(soon=[("some", tuple(WRAPPERS)[::2])], later=[("all", tuple(WRAPPERS))])
    def test_every_wrapper_saves_and_another_loads_on_more_ranks(self, _: str, wrappers: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_all, 2, folder, wrappers)
            oracle = Oracle(adam)
            weights = {name: value.to(BF16) for name, value in oracle.model.state_dict().items()}
            for path in Path(folder).iterdir():
                for half, wanted in (("model", weights), ("optim", state_file(oracle))):
                    stored: dict[str, torch.Tensor] = {}
                    for file in path.glob(f"{half}*.safetensors"):
                        stored |= load_file(file)
                    check_same(f"{path.name}, {half}", dict(sorted(stored.items())), dict(sorted(wanted.items())))
            run_on_ranks(load_all, 3, folder, wrappers)


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.low = nn.Linear(3, 2, dtype=BF16)
        self.eighth = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("mask", torch.tensor([True, False]))


def stepped() -> tuple[Mixed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed()
    optim = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optim.step()
    return model, optim


class OneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    @parameterized.expand([(torch.float16,), (BF16,), (torch.float32,), (torch.float64,)])
    def test_floating_weights_are_cast_as_the_model_would_be(self, dtype: torch.dtype) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=dtype))
        wanted = copy.deepcopy(model).to(dtype).state_dict() | {"eighth": model.eighth.detach()}
        check_same("weights", in_order(load_file(self.folder / "a" / "model.safetensors")), in_order(wanted))
        state = load_file(self.folder / "a" / "optim.safetensors")
        check_same("state", state["state.layer.weight.exp_avg"], optim.state[model.layer.weight]["exp_avg"])
        self.assertEqual(state["state.low.weight.exp_avg"].dtype, BF16)
        fsdp_optim.verify(self.folder / "a")

    def test_a_load_names_the_way_out(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=BF16))
        text = error_text(partial(fsdp_optim.load, self.folder / "a", *stepped()))[1]
        self.assertIn("layer.weight: bfloat16 in the checkpoint, float32 in the model", text)
        self.assertIn("it was saved with weights_dtype=torch.bfloat16: cast=True converts floating dtypes", text)

    def test_a_number_that_would_become_infinite(self) -> None:
        model, optim = stepped()
        with torch.no_grad():
            model.layer.weight[0, :2] = 70000.0
            model.layer.bias[0] = float("inf")  # as it was
        for call in (fsdp_optim.save, fsdp_optim.async_save):
            text = error_text(
                partial(
                    call, self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=torch.float16)
                )
            )[1]
            self.assertIn("layer.weight: 2 elements of its float32 elements would become infinite in float16", text)
            self.assertEqual(list(self.folder.iterdir()), [])
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=BF16))

    @parameterized.expand([(torch.int8,), (torch.float8_e4m3fn,), ("bfloat16",)])
    def test_other_dtypes_are_refused(self, dtype: Any) -> None:
        model, optim = stepped()
        text = error_text(
            partial(
                fsdp_optim.save, self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=dtype)
            )
        )[1]
        self.assertIn("weights_dtype must be torch.float16, torch.bfloat16, torch.float32, torch.float64 or None", text)

    def test_it_is_recorded_and_kept_by_a_conversion(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=BF16))
        self.assertEqual(json.loads((self.folder / "a/fsdp_optim.json").read_text())["checkpoint"]["version"], 3)
        fsdp_optim.convert(self.folder / "a", self.folder / "dcp", format="dcp")
        fsdp_optim.convert(self.folder / "dcp", self.folder / "back")
        for at in ("a", "dcp", "back"):
            self.assertEqual(fsdp_optim.inspect(self.folder / at).weights_dtype, "bfloat16")
        fsdp_optim.save(self.folder / "b", model, optim)
        self.assertIsNone(fsdp_optim.inspect(self.folder / "b").weights_dtype)

    def test_a_folder_of_torch(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(
            self.folder / "a", model, optim, options=fsdp_optim.SaveOptions(weights_dtype=BF16), format="dcp"
        )
        metadata = FileSystemReader(self.folder / "a").read_metadata().state_dict_metadata
        self.assertEqual(metadata["model.layer.weight"].properties.dtype, BF16)
        self.assertEqual(metadata["optimizer.state.layer.weight.exp_avg"].properties.dtype, torch.float32)
        target, target_optim = stepped()
        fsdp_optim.load(
            self.folder / "a", target, target_optim, options=fsdp_optim.LoadOptions(cast=True, compare=True)
        )
        check_same("weights", target.layer.weight, model.layer.weight.to(BF16).to(torch.float32))

    @parameterized.expand([(True,), (False,)])
    def test_no_more_than_a_bucket_is_cast_at_once(self, is_contiguous: bool) -> None:
        model = nn.Linear(256, 512, bias=False)
        if not is_contiguous:
            model.weight = nn.Parameter(torch.randn(256, 512).t())
        nbytes = []

        def watched(value: Any, part: Any) -> Any:
            nbytes.append(part.flat.nbytes)
            return cast_part(value, part)

        with mock.patch("fsdp_optim.checkpoint.save.file_plan.cast_part", watched):
            fsdp_optim.save(
                self.folder / "a", model, options=fsdp_optim.SaveOptions(weights_dtype=BF16, bucket_nbytes=64 << 10)
            )
        self.assertEqual(sum(nbytes), model.weight.nbytes)
        self.assertLessEqual(max(nbytes), 16 << 10)
        stored = load_file(self.folder / "a" / "model.safetensors")
        check_same("weights", stored["weight"], model.weight.detach().to(BF16))


class PartsTest(unittest.TestCase):
    @parameterized.expand([(1000,), (333,)])
    def test_files_in_parts(self, part_nbytes: int) -> None:
        """Parts that begin in the middle of an element."""
        store = ObjectStore(MemoryBucket(Memory()), "run/step-1", OURS.probe, part_nbytes=part_nbytes)
        model, optim = stepped()
        target, target_optim = stepped()
        with url_of(store) as url:
            fsdp_optim.save(url, model, optim, options=fsdp_optim.SaveOptions(weights_dtype=BF16, durable=False))
            fsdp_optim.load(url, target, target_optim, options=fsdp_optim.LoadOptions(cast=True, compare=True))
        check_same("weights", target.layer.weight, model.layer.weight.to(BF16).to(torch.float32))


def overflow(folder: str) -> list[tuple[str, str]]:
    """The error on each rank where one of them has a number that is too large."""
    heard = []
    for odd in range(dist.get_world_size()):
        trained = Trained("FSDP2", adam)
        with torch.no_grad():
            if dist.get_rank() == odd:
                trained.params[-1].to_local().view(-1)[:1] = 1e6
        heard.append(
            error_text(
                partial(
                    fsdp_optim.save,
                    folder,
                    trained.model,
                    trained.optim,
                    options=fsdp_optim.SaveOptions(weights_dtype=torch.float16),
                )
            )
        )
    return heard


class RanksTest(unittest.TestCase):
    def test_one_rank_has_a_number_that_is_too_large(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_on_ranks(overflow, 2, f"{folder}/step")
            for odd in range(2):
                self.assertIn("head.bias: 1 element of its float32 elements would become", ranks[odd][odd][1])
                for heard in ranks:
                    self.assertIn(f"rank {odd}", heard[odd][1] if heard is not ranks[odd] else f"rank {odd}")
                    self.assertIn("infinite in float16", heard[odd][1])
            self.assertFalse(Path(folder, "step").exists())
