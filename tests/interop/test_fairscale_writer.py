"""convert(format=FairscaleShards(...)): files of each rank, from which a stock fairscale job of that world size resumes."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.forked import TRAINING, run
from kit.optimizers import GROUPED, adam
from kit.options import state_for
from kit.rank_files import Buffered, save_fairscale
from kit.trained import STEPS, Oracle, Trained
from kit.units import UNITS
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.plugins import FairscaleShards
from fsdp_optim.testing import run_on_ranks


def save_all(root: Path) -> None:
    """By this library and in fairseq's way, for each optimizer."""
    for name, make in GROUPED.items():
        with cpu():
            trained = Trained("fairscale flat", make, model=Buffered)
            own = {"rng": torch.arange(3) + dist.get_rank()}
            extra = {"cfg": {"lr": [0.01]}, "steps": STEPS}
            fsdp_optim.save(
                root / f"ours {name}",
                trained.model,
                trained.optim,
                state=state_for(extra, own),
                options=fsdp_optim.SaveOptions(durable=False),
            )
            folder = root / f"fairseq {name}"
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            save_fairscale(str(folder), "checkpoint_last", trained.model, trained.optim)


def resumed_by_fairscale(folder: Path, name: str) -> dict[str, Any]:
    """fairscale alone loads this rank's file, and trains on as the run that never stopped. Returns what else is in the file."""
    make, rank = GROUPED[name], dist.get_rank()
    with cpu():
        target = Trained("fairscale flat", make, 0, model=Buffered)
        file = torch.load(folder / f"checkpoint_last-shard{rank}.pt", weights_only=True)
        mapped = torch.load(folder / f"checkpoint_last-shard{rank}.pt", weights_only=True, mmap=True)
        check_same("mapped", mapped, file)
        said, wanted_metadata = file.pop("shard_metadata"), target.model.local_metadata_dict()
        for metadata in (said, wanted_metadata):
            metadata["buffer_names"].sort()
        check_same("metadata", said, wanted_metadata)
        there = target.model.local_state_dict()
        shapes = {key: tuple(value.shape) for key, value in there.items() if isinstance(value, torch.Tensor)}
        if {key: tuple(file["model"][key].shape) for key in shapes} != shapes:
            raise AssertionError(f"{shapes}")
        target.model.load_local_state_dict(file.pop("model"), strict=True)
        target.optim.load_state_dict(file.pop("last_optimizer_state"))
        target.step(range(STEPS, STEPS + 2))
        wanted = Oracle(make, STEPS + 2, model=Buffered)
        full = target.gather(None, "name")
        state = {fqn: {key: full["state"][fqn][key] for key in values} for fqn, values in wanted.by_name().items()}
        check_same("state", state, wanted.by_name())
        weights = target.model.state_dict()
        check_same(
            "weights",
            {fqn: weights[fqn] for fqn in wanted.names},
            {f: dict(wanted.model.named_parameters())[f].data for f in wanted.names},
        )
        buffers = dict(Buffered().named_buffers())
        check_same("buffers", {fqn: weights[fqn] for fqn in buffers}, buffers)
    return dict(file)


class FairscaleWriterTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    def convert(self, name: str, target: str, **options: Any) -> Path:
        format = FairscaleShards(**{"world_size": 3, "units": UNITS, **options})
        fsdp_optim.convert(self.root / name, self.root / target, format=format, overwrite=True)
        return self.root / target

    @parameterized.expand([("one group", 3), ("two groups", 4), ("one group", 1)])
    def test_a_stock_job_resumes(self, name: str, world_size: int) -> None:
        folder = self.convert(f"ours {name}", f"for {world_size}", world_size=world_size)
        others = run_on_ranks(resumed_by_fairscale, world_size, folder, name)
        for rank, other in enumerate(others):
            rng = {"rng": torch.arange(3) + rank} if rank < 2 else {}
            check_same("extras", other, {"cfg": {"lr": [0.01]}, "steps": STEPS, **rng})

    def test_units_of_fairscales_own_files_are_known(self) -> None:
        folder = self.convert("fairseq two groups", "of fairseq", world_size=4, units=None)
        run_on_ranks(resumed_by_fairscale, 4, folder, "two groups")

    @parameterized.expand([(2,), (3,), (64,)])
    def test_fairscales_own_consolidation(self, world_size: int) -> None:
        """More ranks than some units have elements: their files are padding."""
        folder = self.convert("ours one group", f"of {world_size}", world_size=world_size)
        files = [torch.load(folder / f"checkpoint_last-shard{rank}.pt") for rank in range(world_size)]
        whole = FullyShardedDataParallel.consolidate_shard_weights(
            [file["model"] for file in files], [file["shard_metadata"] for file in files]
        )
        weights = {name: param.data for name, param in Oracle(adam, STEPS, model=Buffered).model.named_parameters()}
        check_same("weights", {name: whole[name] for name in weights}, weights)

    def test_the_way_back(self) -> None:
        """This library's reader finds the converted content in the files."""
        folder = self.convert("ours two groups", "there")
        self.assertEqual(fsdp_optim.verify(folder).format, "fairscale shards")
        back = self.root / "back"
        fsdp_optim.convert(folder, back, overwrite=True)
        for name in ("model.safetensors", "optim.safetensors"):
            from safetensors.torch import load_file

            check_same(name, load_file(back / name), load_file(self.root / "ours two groups" / name), in_order=False)
        restored = fsdp_optim.load(back)
        self.assertEqual((restored.state["cfg"], restored.state["steps"]), ({"lr": [0.01]}, STEPS))
        self.assertEqual(fsdp_optim.load(folder, Buffered(), strict=False).missing_keys, ())

    def test_small_units_of_bytes(self) -> None:
        """The same files whatever the memory, and by several ranks."""
        folder = self.convert("ours two groups", "at once")
        run_on_ranks(convert_on_ranks, 2, self.root)
        for rank in range(3):
            name = f"checkpoint_last-shard{rank}.pt"
            self.assertEqual((folder / name).read_bytes(), (self.root / "by ranks" / name).read_bytes())

    def test_the_command_line(self) -> None:
        import json

        units = self.root / "units.json"
        units.write_text(json.dumps(UNITS))
        args = ["--format", "fairscale_shards", "--world-size", "3", "--units", str(units)]
        words = ["fsdp_optim", "convert", str(self.root / "ours one group"), str(self.root / "cli"), *args]
        code = f"import runpy, sys\nsys.argv[:] = {words!r}\nrunpy.run_module('fsdp_optim', run_name='__main__')\n"
        done = run(code, preload=TRAINING)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(list((self.root / "cli").glob("*-shard*.pt"))), 3)


def convert_on_ranks(root: Path) -> None:
    fsdp_optim.convert(
        root / "ours two groups",
        root / "by ranks",
        format=FairscaleShards(3, UNITS),
        options=fsdp_optim.ConvertOptions(bucket_nbytes=16 << 20),
    )


class Mixed(nn.Module):
    """A unit with two dtypes, one with a parameter that has no state, and steps that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(3, 2)
        self.b.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.c = nn.Linear(2, 2)


class RefusedTest(unittest.TestCase):
    """Errors that name the parameter, before anything is written."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.model = Mixed()
        self.optim = torch.optim.Adam(self.model.parameters())
        for name, param in self.model.named_parameters():
            param.grad = None if name == "c.bias" else torch.ones_like(param)
        self.optim.step()
        self.model.a.weight.grad = None
        self.optim.step()
        fsdp_optim.save(self.root / "src", self.model, self.optim, options=fsdp_optim.SaveOptions(durable=False))

    def refused(self, error: type[Exception], *words: str, **options: Any) -> None:
        with self.assertRaises(error) as caught:
            format = FairscaleShards(2, **options) if options else "fairscale_shards"
            fsdp_optim.convert(self.root / "src", self.root / "dst", format=format)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertEqual([path.name for path in self.root.iterdir()], ["src"])

    def test_refused(self) -> None:
        a, b, c = (["weight", "bias"],) * 3
        full = {path: [f"{path}.{name}" for name in names] for path, names in (("a", a), ("b", b), ("c", c))}
        self.refused(CheckpointError, "FairscaleShards(...)", "world_size")
        self.refused(StateError, "units=", units=None)
        self.refused(StateError, "'step'", "a.weight and a.bias", units=full)
        apart = {"a": ["a.weight"], "a.bias": ["a.bias"]}
        self.refused(StateError, "a.bias", "in the module", units=apart)
        rest = {"a": ["a.weight"], "": ["a.bias", "c.weight"], "c": ["c.bias"]}
        self.refused(StateError, "float32", "float64", units={**rest, "b": full["b"]})
        self.refused(StateError, "c.weight has state and c.bias has none", units={"c": full["c"]})
        self.refused(StateError, "b.weight", "does not have", units={**rest, "b": ["b.bias"]})
        self.refused(StateError, "e.weight", units={"e": ["e.weight"]})
        self.refused(StateError, "twice", units={"": ["a.weight", "a.weight"]})
        self.refused(StateError, "units must be", units={"": "a.weight"})

    @parameterized.expand(["model", "last_optimizer_state", "shard_metadata", "fsdp_metadata"])
    def test_values_by_the_names_of_parts_of_the_files(self, name: str) -> None:
        """A rank's own value as well as one of all ranks: beside the part of the file it would be lost."""
        units = {"": ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]}
        self.model.double()  # one dtype, which fairscale needs
        for value, whose in ((fsdp_optim.per_rank({"x": 5}), " of rank 0"), ({"x": 5}, "")):
            fsdp_optim.save(
                self.root / "src",
                self.model,
                state={name: value, "other": fsdp_optim.per_rank(6)},
                overwrite=True,
                options=fsdp_optim.SaveOptions(durable=False),
            )
            words = f"the trainer's value {name!r}{whose} has the name of a part of fairscale's files: save it under another"
            self.refused(CheckpointError, words, units=units)
