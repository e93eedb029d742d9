"""convert(format=FairscaleShards(flatten_parameters=False)): files for a stock fairscale job that flattens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.optimizers import GROUPED
from kit.options import state_for
from kit.rank_files import Buffered, save_fairscale
from kit.trained import STEPS, Oracle, Trained
from kit.units import UNITS
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.plugins import FairscaleShards
from fsdp_optim.testing import run_on_ranks


def save_all(root: Path) -> None:
    """By this library from a flat model, and by fairscale itself from one that is not flattened."""
    for name, make in GROUPED.items():
        with cpu():
            trained = Trained("fairscale flat", make, model=Buffered)
            own = {"own": {"rng": torch.arange(3) + dist.get_rank(), f"only {dist.get_rank()}": 1}}
            fsdp_optim.save(
                root / f"flat {name}",
                trained.model,
                trained.optim,
                state=state_for(None, own),
                options=fsdp_optim.SaveOptions(durable=False),
            )
            other = Trained("fairscale non-flat", make, model=Buffered)
            (root / f"own {name}").mkdir(exist_ok=True)
            dist.barrier()
            save_fairscale(str(root / f"own {name}"), "checkpoint_last", other.model, other.optim)


def check_resumed(folder: Path, name: str) -> None:
    """fairscale alone loads this rank's file, strictly, and trains on as the run that never stopped."""
    make = GROUPED[name]
    with cpu():
        target = Trained("fairscale non-flat", make, 0, model=Buffered)
        file = torch.load(folder / f"checkpoint_last-shard{dist.get_rank()}.pt", weights_only=True)
        said, its_own = file["shard_metadata"], target.model.local_metadata_dict()
        for metadata in (said, its_own):
            metadata["buffer_names"].sort()
        check_same("metadata", said, its_own, in_order=False)
        target.model.local_state_dict()  # so that FSDP makes what it needs
        target.model.load_local_state_dict(file["model"], strict=True)
        target.optim.load_state_dict(file["last_optimizer_state"])
        target.step(range(STEPS, STEPS + 2))
        wanted = Oracle(make, STEPS + 2, model=Buffered)
        full = target.gather(None, "name")
        state = {fqn: {key: full["state"][fqn][key] for key in values} for fqn, values in wanted.by_name().items()}
        check_same("state", state, wanted.by_name())
        weights, oracles = (
            target.model.state_dict(),
            {name: param.data for name, param in wanted.model.named_parameters()},
        )
        check_same("weights", {fqn: weights[fqn] for fqn in oracles}, oracles)


class UnflattenedTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    def convert(self, name: str, target: str, **options: Any) -> Path:
        fsdp_optim.convert(
            self.root / name,
            self.root / target,
            format=FairscaleShards(**options),
            options=fsdp_optim.ConvertOptions(durable=False),
        )
        return self.root / target

    @parameterized.expand([("one group", 3), ("two groups", 2)])
    def test_a_stock_job_resumes(self, name: str, world_size: int) -> None:
        """From a flattened run, which this library saved, and from files of one that is not, which say it themselves."""
        folder = self.convert(f"flat {name}", f"a {name}", world_size=world_size, units=UNITS, flatten_parameters=False)
        own = self.convert(f"own {name}", f"b {name}", world_size=world_size)
        run_on_ranks(check_resumed, world_size, folder, name)
        run_on_ranks(check_resumed, world_size, own, name)

    def test_the_way_back(self) -> None:
        """This library's reader, and its conversion of files that do not flatten to files that do, and to its own."""
        from safetensors.torch import load_file

        there = self.convert("flat one group", "there", world_size=3, units=UNITS, flatten_parameters=False)
        flat = self.convert("there", "flat again", world_size=2, units=UNITS)
        for source in (there, flat):
            back = self.root / f"back of {source.name}"
            fsdp_optim.convert(source, back, options=fsdp_optim.ConvertOptions(durable=False))
            for name in ("model.safetensors", "optim.safetensors"):
                check_same(name, load_file(back / name), load_file(self.root / "flat one group" / name), in_order=False)

    def test_values_of_ranks_that_go_are_named(self) -> None:
        """On one rank the values of rank 1 have no file: a warning says which. On two or three nothing is lost."""
        with self.assertLogs("fsdp_optim", "WARNING") as caught:
            folder = self.convert("flat one group", "one", world_size=1, units=UNITS)
        (line,) = [line for line in caught.output if "not written" in line]
        for word in ("for 1 rank,", "own", "of rank 1 of the source"):
            self.assertIn(word, line)
        file = torch.load(folder / "checkpoint_last-shard0.pt", weights_only=True)
        self.assertEqual({"only 0", "rng"}, set(file["own"]))
        for world_size in (2, 3):
            with self.assertNoLogs("fsdp_optim", "WARNING"):
                self.convert("flat one group", f"{world_size} ranks", world_size=world_size, units=UNITS)
