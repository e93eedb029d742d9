"""Conversions into the formats of other libraries, and back: bit for bit, by ranks, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from kit.checkpoint_format import all_bytes, tensors_of
from kit.compare import check_same
from kit.conversions import MEMORY, save_some
from kit.folders import SharedFolder
from kit.options import as_options
from parameterized import parameterized
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.formats.own import OURS
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.convert import convert
from fsdp_optim.testing import run_on_threads

FORMATS = [("dcp",), ("torchtitan",)]


def data_of(path: Path) -> dict[str, bytes]:
    """The files with tensors."""
    return {name: data for name, data in all_bytes(path).items() if name.startswith(("model", "optim"))}


def convert_on_ranks(source: Path, target: Path, format: str) -> int:
    return fsdp_optim.convert(
        source, target, format=format, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
    ).nbytes_written


def save_optimizer(target: Path) -> None:
    """An optimizer without the weights, and values of each rank that could be taken for weights."""
    model = torch.nn.Linear(2, 2)
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    own = fsdp_optim.per_rank({"weight": torch.ones(2, 2)})
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    options = fsdp_optim.SaveOptions(durable=False)
    fsdp_optim.save(target, model, optim, state={"own": own}, weights="none", options=options)


class ConvertFormatsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.source = cls.root / "source"
        save_some(cls.source)
        for (format,) in FORMATS:
            fsdp_optim.convert(
                cls.source,
                cls.root / format,
                format=format,
                options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False),
            )

    def setUp(self) -> None:
        self.target = self.own_folder() / "to"

    def convert(self, source: Path, **options: Any) -> int:
        return fsdp_optim.convert(
            source, self.target, **as_options(fsdp_optim.ConvertOptions, **options, bucket_nbytes=MEMORY, durable=False)
        ).nbytes_written

    def test_dcp_is_read_by_torchs_own_calls(self) -> None:
        dcp_to_torch_save(self.root / "dcp", self.target)
        stored = torch.load(self.target, weights_only=False)
        for name, value in tensors_of(self.source, "model").items():
            check_same(name, stored["model"][name], value)
        for name, value in tensors_of(self.source, "optim").items():
            fqn, key = name.removeprefix("state.").rsplit(".", 1)
            check_same(name, stored["optimizer" if "optimizer" in stored else "optim"]["state"][fqn][key], value)

    @parameterized.expand(FORMATS)
    def test_and_back(self, format: str) -> None:
        self.convert(self.root / format)
        check_same("state", tensors_of(self.target, "optim"), tensors_of(self.source, "optim"))
        weights, wanted = tensors_of(self.target, "model"), tensors_of(self.source, "model")
        check_same("weights", {name: weights[name] for name in wanted}, wanted)
        self.assertEqual(
            fsdp_optim.verify(self.target).num_tensors, len(weights) + 24 + (format in ("dcp", "torchtitan"))
        )

    @parameterized.expand(FORMATS)
    def test_ranks_write_the_same_files(self, format: str) -> None:
        written = run_on_threads(convert_on_ranks, 2, self.source, self.target, format)
        self.assertTrue(all(written), written)
        check_same("files", data_of(self.target), data_of(self.root / format))

    @parameterized.expand([("safetensors",), ("dcp",), ("torch",)])
    def test_parts_of_a_bucket_end_anywhere(self, format: str) -> None:
        """In the middle of an element, of the head, and of the bytes between two tensors: the files are the same."""
        source = self.own_folder() / "source"
        save_some(source, num_layers=2, width=64)

        def files(part_nbytes: int) -> dict[str, bytes]:
            bucket = MemoryBucket()
            store = ObjectStore(bucket, "run/to", OURS.probe, part_nbytes=part_nbytes)
            convert(source, store, ConvertArguments(bucket_nbytes=MEMORY, format=format))
            data = {info.key: bucket.read(info.key)[0] for info in bucket.list("run/to/")}
            return {key: content for key, content in data.items() if key.endswith((".safetensors", ".distcp", ".pt"))}

        wanted = files(1 << 30)
        self.assertGreater(max(map(len, wanted.values())), 50_000)
        for part_nbytes in (4096, 4093, 1001, 333):
            check_same(f"parts of {part_nbytes} bytes", files(part_nbytes), wanted)

    def test_dcp_keeps_the_values_of_the_trainer(self) -> None:
        self.convert(self.root / "dcp")
        restored = fsdp_optim.load(self.target)
        check_same("extra", dict(sorted(restored.state.items())), {"history": torch.arange(3), "seed": 0})
        metadata = dcp.FileSystemReader(self.root / "dcp").read_metadata()
        self.assertTrue(metadata.state_dict_metadata)

    @parameterized.expand([(1,), (2,)])
    def test_torch_files_of_an_optimizer_and_values_of_ranks(self, world: int) -> None:
        """No file of a rank is taken for that of the model, which is not there."""
        source = self.target.with_name("source")
        run_on_threads(save_optimizer, world, source)
        self.convert(source, format="torch")
        fsdp_optim.verify(self.target)
        model = torch.nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        restored = fsdp_optim.load(self.target, model, optim, weights="none")
        check_same(
            "values", (restored.state, optim.param_groups[0]["lr"]), ({"own": {"weight": torch.ones(2, 2)}}, 0.25)
        )
