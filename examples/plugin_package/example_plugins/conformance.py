"""The conformance suites of this package's three plug-ins: `python -m unittest example_plugins.conformance`."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_optim
from example_plugins.masters import MasterOptimizer, Mixed
from example_plugins.raw_format import RAW
from example_plugins.sqlite_store import SqliteBucket, open_store
from fsdp_optim.plugins import Bucket, CheckpointProbe, Folder, Format, Store
from fsdp_optim.testing import AdapterConformance, BucketConformance, FormatConformance, StoreConformance, run_on_ranks


def new_url(case: Any) -> str:
    """The URL of a checkpoint in a new file."""
    folder = tempfile.TemporaryDirectory()
    case.addCleanup(folder.cleanup)
    return f"sqlite://{Path(folder.name) / 'run.db'}/run/step-1"


class TestAdapter(AdapterConformance, unittest.TestCase):
    """`make_adapter` stays None: the adapter is installed."""

    wrap = Mixed
    make_optimizer = MasterOptimizer


class TestBucket(BucketConformance, unittest.TestCase):
    def make_bucket(self) -> Bucket:
        return SqliteBucket(new_url(self).removeprefix("sqlite://").partition("/run/step-1")[0], durable=False)


class TestStore(StoreConformance, unittest.TestCase):
    def make_store(self, probe: CheckpointProbe[Any]) -> Store:
        return open_store(new_url(self), probe, {"part_nbytes": 1000, "durable": False})


class TestFormat(FormatConformance, unittest.TestCase):
    def make_format(self) -> Format:
        return RAW

    def make_store(self, format: Format) -> Store:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        assert format.probe is not None
        return Folder(Path(folder.name) / "step", format.probe)


# ------------------------------------------------------------------------------------------- the three together


def trained(steps: int) -> tuple[Mixed, MasterOptimizer]:
    """The same model on all ranks, whatever their number, after some steps."""
    torch.manual_seed(0)
    model = Mixed(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
    optim = MasterOptimizer(model)
    for step in range(steps):
        for number, (*_, param) in enumerate(model.places()):
            param.grad = torch.full_like(param, step + number + 1.0)
        optim.step()
    return model, optim


def options_of(url: str) -> dict[str, Any]:
    return {"storage_options": {"part_nbytes": 1000, "durable": False}} if "://" in url else {}


def save_some(url: str) -> None:
    """Save in the foreground and in the background. Called by all ranks."""
    for step in (1, 2):
        model, optim = trained(step)
        place = f"{url}/step-{step}"
        values: dict[str, Any] = {
            "format": "raw",
            "step": step,
            "state": {"epoch": step, "rank": fsdp_optim.per_rank(dist.get_rank())},
        }
        if step == 1:
            fsdp_optim.save(place, model, optim, **values)
        else:
            fsdp_optim.async_save(place, model, optim, **values).wait()


def check_some(url: str) -> None:
    """List them, resume from the newest and load the other one. Called by all ranks, of any number."""
    options = options_of(url)
    loading = fsdp_optim.LoadOptions(compare=True, **options)
    assert [(one.step, one.complete, one.world_size) for one in fsdp_optim.checkpoints(url, **options)] == [
        (2, True, 2),
        (1, True, 2),
    ]
    assert str(fsdp_optim.latest(url, **options)).endswith("step-2")
    for step in (2, 1):
        model, optim = trained(0)
        if step == 2:
            restored = fsdp_optim.resume(url, model, optim, options=loading)
        else:
            restored = fsdp_optim.load(f"{url}/step-1", model, optim, options=loading)
        assert restored is not None
        own = {"rank": dist.get_rank()} if dist.get_rank() < 2 else {}  # two ranks have saved
        assert (restored.step, dict(restored.state)) == (step, {"epoch": step, **own})
        wanted = fsdp_optim.gather_full_optim_state_dict(*trained(step), recipient_rank=None)
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None)
        assert all(torch.equal(full["state"][0][name], value) for name, value in wanted["state"][0].items())


class TestTogether(unittest.TestCase):
    """A model in this package's wrapper, saved in its format at a URL of its store, and in a folder."""

    def test_saved_and_loaded(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for url in (f"sqlite://{folder}/run.db/run", f"{folder}/run"):
                run_on_ranks(save_some, 2, url)
                run_on_ranks(check_some, 3, url)
                self.assertEqual(fsdp_optim.inspect(f"{url}/step-1").format, "raw")
                self.assertTrue(fsdp_optim.verify(f"{url}/step-1").has_checksums)
            fsdp_optim.convert(f"sqlite://{folder}/run.db/run/step-1", f"{folder}/own/step-1")
            fsdp_optim.convert(f"{folder}/own/step-1", f"{folder}/raw/step-1", format="raw")
            self.assertEqual(fsdp_optim.inspect(f"{folder}/own/step-1").format, "fsdp_optim")
            self.assertEqual(fsdp_optim.inspect(f"{folder}/raw/step-1").format, "raw")


if __name__ == "__main__":
    unittest.main()
