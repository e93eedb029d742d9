"""Files of torch.save: what is read of one, tied and reordered tensors, and folders of Accelerate and Lightning."""

from __future__ import annotations

import json
import unittest
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_same
from kit.folders import SharedFolder
from kit.forked import TRAINING, run
from kit.pretrained import build, tensors_of
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from torch import nn

import fsdp_optim
from fsdp_optim.foreign.torch.reader import TORCH_FILE
from fsdp_optim.storage.posix import OpenFiles
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------- what is read


class Wide(nn.Module):
    """Rows that three ranks share evenly, large enough to tell a part from the whole."""

    units = ("0", "1", "2", "")

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.add_module(str(index), nn.Linear(600, 600, bias=False))


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all reads of files."""
    sizes: list[int] = []
    read_into = OpenFiles.read_into

    def count(self: OpenFiles, name: str, pieces: Any, offset: int) -> None:
        sizes.append(sum(map(len, pieces)))
        read_into(self, name, pieces, offset)

    with mock.patch.object(OpenFiles, "read_into", count):
        yield sizes


def read_parts(root: Path) -> None:
    """Each rank reads its part of the elements, at most a tenth more, and the metadata."""
    share = (root / "wide.pt").stat().st_size / dist.get_world_size()
    for wrapper in ("FSDP2", "FSDP1 flat", "fairscale flat", "DDP"):
        with cpu():
            torch.manual_seed(5)
            model = WRAPPERS[wrapper](Wide())
            optim = torch.optim.Adam(model.parameters())
            with counted() as sizes:
                fsdp_optim.load(
                    root / "wide.pt", model, optim, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD)
                )
            if sum(sizes) > 1.1 * share + (200 << 10):
                raise Differs(f"{wrapper}: {sum(sizes)} bytes were read, and {share:.0f} are a rank's part")
            with counted() as sizes:
                fsdp_optim.load(root / "wide.pt", model, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD))
            if sum(sizes) > 1.1 * share / 3 + (200 << 10):
                raise Differs(f"{wrapper}: {sum(sizes)} bytes were read of the weights alone")


# ------------------------------------------------------------------------------------------- more optimizers than one


class ContentsTest(SharedFolder):
    def test_each_rank_reads_its_part(self) -> None:
        model = Wide()
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, self.root / "wide.pt")
        run_on_ranks(read_parts, 3, self.root)

    def test_a_split_model_with_an_index(self) -> None:
        """As save_pretrained wrote it before safetensors; tied weights are stored once, or share their bytes."""
        for name in ("bert", "gpt2, tied"):
            folder = self.root / f"split {name}"
            folder.mkdir()
            state = build(name).state_dict()
            half = len(state) // 2
            listed = {}
            for number, keys in enumerate((list(state)[:half], list(state)[half:]), start=1):
                file = f"pytorch_model-{number:05}-of-00002.bin"
                torch.save({key: state[key] for key in keys}, folder / file)
                listed.update(dict.fromkeys(keys, file))
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
            for place in (folder, folder / "pytorch_model.bin.index.json"):
                model = zeroed(build(name))
                fsdp_optim.load(place, model, options=fsdp_optim.LoadOptions(compare=True))
                check_same(f"{place}", tensors_of(model), tensors_of(build(name)))

    def test_tied_weights_into_a_model_that_does_not_tie_them(self) -> None:
        """Both names have the same bytes of the file."""
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
        torch.save(tied.state_dict(), self.root / "tied.pt")
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fsdp_optim.load(self.root / "tied.pt", model, options=fsdp_optim.LoadOptions(compare=True))
        check_same("weights", dict(model.state_dict()), dict(tied.state_dict()))

    def test_one_step_of_several_parameters(self) -> None:
        """A tensor that several parameters share is one stored tensor, and is read once."""
        step = torch.tensor(3.0)
        state = {index: {"step": step, "exp_avg": torch.ones(2) * index} for index in range(3)}
        torch.save({"state": state, "param_groups": [{"params": [0, 1, 2]}]}, self.root / "shared.pt")
        with closing(OpenFiles.at(self.root / "shared.pt")) as opened:
            reader = TORCH_FILE.open(opened, verify=True)
            self.assertEqual(sorted(tensor.shape for tensor in reader.optim.values()), [(), (2,), (2,), (2,)])

    def test_other_orders_of_elements(self) -> None:
        """Weights and state in channels_last, and a transposed weight."""
        model = nn.Sequential(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Linear(5, 4))
        model[1].weight = nn.Parameter(torch.randn(5, 4).t())
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optim.step()
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, self.root / "orders.pt")
        target = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(5, 4))
        target_optim = torch.optim.Adam(target.parameters())
        fsdp_optim.load(self.root / "orders.pt", target, target_optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("model", dict(target.state_dict()), dict(model.state_dict()))
        check_same("state", target_optim.state_dict()["state"], optim.state_dict()["state"])

    def test_a_value_that_modules_add(self) -> None:
        """get_extra_state's, with the version of the module's code."""

        class Counter(nn.Linear):
            count = 0

            def get_extra_state(self) -> Any:
                return {"count": self.count, "seen": torch.tensor([1, 2])}

            def set_extra_state(self, state: Any) -> None:
                self.count = state["count"]

        saved, target = nn.Sequential(Counter(2, 2)), nn.Sequential(Counter(2, 2))
        saved[0].count = 5
        torch.save({"model": saved.state_dict()}, self.root / "added.pt")
        fsdp_optim.load(self.root / "added.pt", target)
        self.assertEqual(target[0].count, 5)

    def test_large_values_beside_the_model(self) -> None:
        """They are not read by every rank: an access says so."""
        model = nn.Linear(2, 2)
        ema = {"weight": torch.zeros(5000, 5000), "bias": torch.zeros(2)}
        torch.save({"model": model.state_dict(), "ema": ema, "epoch": 1}, self.root / "ema.pt")
        with counted() as sizes:
            restored = fsdp_optim.load(self.root / "ema.pt", model)
        self.assertLess(sum(sizes), 1 << 20)
        self.assertEqual(restored.state["epoch"], 1)
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "ema has tensors of 100000008 bytes"):
            restored.state["ema"]

    @expand(soon=[(True,)], later=[(False,)])
    def test_accelerates_folders(self, safe: bool) -> None:
        """Written by Accelerate, in a process of its own, with and without safetensors."""
        folder = self.root / f"accelerate-{safe}"
        done = run(ACCELERATE.format(folder=str(folder), safe=safe), preload=TRAINING)
        self.assertEqual(done.returncode, 0, done.stderr)
        wanted = torch.load(folder / "wanted.zip")  # no name of a checkpoint
        model = nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters(), lr=9.0)
        restored = fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("model", dict(model.state_dict()), dict(wanted["model"]))
        check_same("optimizer", optim.state_dict()["state"], wanted["optim"]["state"])
        self.assertEqual(optim.param_groups[0]["lr"], wanted["optim"]["param_groups"][0]["lr"])
        self.assertEqual(restored.state["scheduler"]["last_epoch"], wanted["scheduler"]["last_epoch"])

    @pytest.mark.slow
    def test_lightnings_checkpoint(self) -> None:
        """Written by Lightning's Trainer. In `make test-all`, tests/integrations/test_lightning.py continues from one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lightning

            class Module(lightning.LightningModule):
                def __init__(self, width: int = 4) -> None:
                    super().__init__()
                    self.save_hyperparameters()
                    self.net = nn.Linear(3, width)

                def training_step(self, batch: Any, index: int) -> Any:
                    return self.net(batch).square().mean()

                def configure_optimizers(self) -> Any:
                    return torch.optim.AdamW(self.parameters(), lr=0.5)

            options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = lightning.Trainer(
                max_steps=2, accelerator="cpu", enable_model_summary=False, default_root_dir=self.root, **options
            )
            module = Module()
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=2))
            trainer.save_checkpoint(self.root / "lightning.ckpt")
        target = Module()
        optim = torch.optim.AdamW(target.parameters())
        restored = fsdp_optim.load(
            self.root / "lightning.ckpt", target, optim, options=fsdp_optim.LoadOptions(compare=True)
        )
        check_same("model", dict(target.state_dict()), dict(module.state_dict()))
        check_same("optimizer", optim.state_dict(), trainer.optimizers[0].state_dict())
        self.assertEqual((restored.state["global_step"], dict(restored.state["hyper_parameters"])), (2, {"width": 4}))


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator(cpu=True)
model = nn.Linear(3, 2)
optim = torch.optim.AdamW(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
model, optim, scheduler = accelerator.prepare(model, optim, scheduler)
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optim.step()
    scheduler.step()
accelerator.save_state({folder!r}, safe_serialization={safe})
parts = {{"model": model.state_dict(), "optim": optim.state_dict(), "scheduler": scheduler.state_dict()}}
torch.save(parts, {folder!r} + "/wanted.zip")
"""


def zeroed(model: Any) -> Any:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_() if tensor.is_floating_point() else None
    return model


if __name__ == "__main__":
    unittest.main()
