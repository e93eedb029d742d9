"""convert(format="torch"): plain files that stock torch.load reads, mapped and plain, for the unwrapped model."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from fairscale.nn import FullyShardedDataParallel
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.models import Net
from kit.optimizers import adam, adamw_tensor_lr
from kit.options import state_for
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.foreign.torch.writer import TorchFilesProbe
from fsdp_optim.offline.conversion import convert as conversion
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.plugins import TorchFiles
from fsdp_optim.testing import run_on_ranks

MAKES = {"fairscale flat": adam, "FSDP2": adamw_tensor_lr}


def save_all(root: Path) -> None:
    for wrapper, make in MAKES.items():
        with cpu():
            trained = Trained(wrapper, make)
            extra = {"step": 3, "lrs": [0.1, 0.2]}
            name = wrapper.replace(" ", "-")
            fsdp_optim.save(
                root / name,
                trained.model,
                trained.optim,
                state=state_for(extra),
                options=fsdp_optim.SaveOptions(durable=False, process_group=trained.process_group),
            )


def resumed_by_fairscale(path: Path) -> None:
    with cpu():
        target = Trained(lambda model: FullyShardedDataParallel(model, flatten_parameters=True), adam, 0)
        target.model.load_state_dict(torch.load(path / "model.pt", weights_only=True))
        own = target.model.get_shard_from_optim_state_dict(torch.load(path / "optim.pt", weights_only=True))
        target.optim.load_state_dict(own)
        target.step(range(STEPS, STEPS + 2))
        wanted = Oracle(adam, STEPS + 2)
        full = target.gather(None, "name")
        state = {name: {key: full["state"][name][key] for key in values} for name, values in wanted.by_name().items()}
        check_same("state", state, wanted.by_name())
        weights = target.model.state_dict()
        check_same("weights", {name: weights[name] for name in wanted.names}, dict(wanted.model.state_dict()))


def load(path: Path) -> Any:
    """The values that stock torch reads, without unpickling objects; mapped, and plain."""
    value = torch.load(path, weights_only=True)
    check_same("mapped", torch.load(path, weights_only=True, mmap=True), value)
    return value


def keys_of(bucket: MemoryBucket) -> list[str]:
    return [entry.key for entry in bucket.list("run/")]


class TorchWriterTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    @parameterized.expand(list(MAKES))
    def test_stock_torch_goes_on(self, wrapper: str) -> None:
        """The unwrapped model and a plain optimizer train on as in the run that never stopped."""
        name, make = wrapper.replace(" ", "-"), MAKES[wrapper]
        fsdp_optim.convert(
            self.root / name,
            self.root / f"{name}-torch",
            format="torch",
            options=fsdp_optim.ConvertOptions(durable=False),
        )
        path = self.root / f"{name}-torch"
        resumed, wanted = Oracle(make, 0), Oracle(make, STEPS)
        resumed.model.load_state_dict(load(path / "model.pt"))
        resumed.optim.load_state_dict(copy.deepcopy(load(path / "optim.pt")))
        for more in ((), range(STEPS, STEPS + 2)):
            resumed.step(more)
            wanted.step(more)
            check_same("weights", dict(resumed.model.state_dict()), dict(wanted.model.state_dict()))
            check_same("state", resumed.by_name(), wanted.by_name())
        for group in resumed.optim.param_groups:
            group.pop("param_names", None)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in resumed.optim.param_groups]
        wanted_groups = [{k: v for k, v in g.items() if k != "params"} for g in wanted.optim.param_groups]
        check_same("groups", *[[dict(sorted(g.items())) for g in listed] for listed in (groups, wanted_groups)])
        check_same("extra", load(path / "trainer.pt"), {"step": 3, "lrs": [0.1, 0.2]})

    def test_fairscale_itself_reads_it(self) -> None:
        """Its own load_state_dict and get_shard_from_optim_state_dict, at another world size, with the root alone wrapped."""
        path = self.root / "for-fairscale"
        fsdp_optim.convert(
            self.root / "fairscale-flat", path, format="fairscale", options=fsdp_optim.ConvertOptions(durable=False)
        )
        run_on_ranks(resumed_by_fairscale, 3, path)
        model = Net()
        optim = torch.optim.Adam([{"params": list(model.stem.parameters())}, {"params": list(model.head.parameters())}])
        model.stem(torch.ones(1, 5)).sum().backward()
        optim.step()
        fsdp_optim.save(self.root / "groups", model, optim, options=fsdp_optim.SaveOptions(durable=False))
        with self.assertRaisesRegex(CheckpointError, "2 param groups, and fairscale's full dict has one"):
            fsdp_optim.convert(
                self.root / "groups",
                self.root / "x",
                format="fairscale",
                options=fsdp_optim.ConvertOptions(durable=False),
            )

    def test_fairscale_has_no_parameters_without_dimensions(self) -> None:
        """It takes the state of one for that of the whole flat parameter."""
        model = torch.nn.ParameterDict({"scale": torch.tensor(2.0), "weight": torch.ones(3)})
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        path = self.root / "without dimensions"
        fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False))
        with self.assertRaisesRegex(CheckpointError, "scale: has no dimensions, and fairscale .* write the format"):
            fsdp_optim.convert(path, self.root / "y", format="fairscale")
        self.assertFalse((self.root / "y").exists())

    def test_by_name(self) -> None:
        fsdp_optim.convert(
            self.root / "FSDP2",
            self.root / "named",
            format=TorchFiles(key_by="name"),
            options=fsdp_optim.ConvertOptions(durable=False),
        )
        optim, wanted = load(self.root / "named" / "optim.pt"), Oracle(adamw_tensor_lr)
        check_same("names", optim["param_groups"][0]["params"], wanted.names)
        state = {name: {key: optim["state"][name][key] for key in values} for name, values in wanted.by_name().items()}
        check_same("state", state, wanted.by_name())

    def test_there_and_back(self) -> None:
        """This library reads its own torch files."""
        fsdp_optim.convert(
            self.root / "fairscale-flat",
            self.root / "there",
            format="torch",
            options=fsdp_optim.ConvertOptions(durable=False),
        )
        fsdp_optim.convert(self.root / "there", self.root / "back", options=fsdp_optim.ConvertOptions(durable=False))
        model = Net()
        optim = adam(model.parameters())
        fsdp_optim.load(self.root / "back", model, optim)
        wanted = Oracle(adam)
        check_same("weights", dict(model.state_dict()), dict(wanted.model.state_dict()))
        name_of = {param: name for name, param in model.named_parameters()}
        state = {name_of[param]: values for param, values in optim.state.items()}
        check_same("state", {name: state[name] for name in wanted.names}, wanted.by_name())

    def test_a_bucket_keeps_the_names(self) -> None:
        """Where new files would lie in a folder beside older objects, other tools would not find them: that is refused."""
        model, bucket = nn.Linear(2, 2), MemoryBucket()
        fsdp_optim.save(self.root / "one", model, options=fsdp_optim.SaveOptions(durable=False))
        options = ConvertArguments(format="torch", overwrite=True)
        place = ObjectStore(bucket, "run/torch", TorchFilesProbe())
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                if bucket.look("run/torch/model.pt") is not None:
                    stack.enter_context(self.assertRaisesRegex(fsdp_optim.CheckpointError, "into a new place"))
                conversion.convert(self.root / "one", place, options)
            self.assertEqual({key.rpartition("/")[0] for key in keys_of(bucket)}, {"run/torch"})

    def test_overwrite(self) -> None:
        """A folder of torch files is replaced by another one only."""
        model = nn.Linear(2, 2)
        fsdp_optim.save(self.root / "small", model, options=fsdp_optim.SaveOptions(durable=False))
        path = self.root / "files"
        fsdp_optim.convert(self.root / "small", path, format="torch", options=fsdp_optim.ConvertOptions(durable=False))
        with self.assertRaisesRegex(CheckpointError, "already exists"):
            fsdp_optim.convert(
                self.root / "small", path, format="torch", options=fsdp_optim.ConvertOptions(durable=False)
            )
        fsdp_optim.convert(
            self.root / "small", path, format="torch", overwrite=True, options=fsdp_optim.ConvertOptions(durable=False)
        )
        check_same("weights", load(path / "model.pt"), dict(model.state_dict()))
