"""fairscale is an extra: all else works where it is not installed, and what needs it says how to install it."""

from __future__ import annotations

import os
import socket
import unittest

from kit.folders import InFolder
from kit.forked import WITHOUT_FAIRSCALE, run, start

ON_A_RANK = """
import io, os, runpy, sys
from contextlib import redirect_stdout
from pathlib import Path
from kit.imports import hide

hide("fairscale")

import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import fsdp_optim
from fsdp_optim.testing import adapter_conformance
from kit.compare import check_same
from kit.trained import Trained

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = Path(os.environ["FOLDER"])


def trained(wrapper, steps=1):
    one = Trained(wrapper, steps=steps)
    return one.model, one.optim


def gathered(model, optim):
    return fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")


for name in ("FSDP2", "FSDP1 orig", "FSDP1 flat", "DDP"):
    model, optim = trained(name)
    full = gathered(model, optim)
    assert len(full["state"]) > 4, full["state"].keys()
    for how in ("get_shard", "scatter", "transfer", "load", "async_save") if name == "FSDP2" else ("get_shard", "load"):
        other, other_optim = trained(name, steps=0 if how == "transfer" else 2)
        if how == "get_shard":
            shard = fsdp_optim.get_shard_from_optim_state_dict(other, other_optim, full)
            fsdp_optim.load_optim_state_dict(other_optim, shard)
        elif how == "scatter":
            given = full if dist.get_rank() == 1 else None
            shard = fsdp_optim.scatter_full_optim_state_dict(other, other_optim, given, source_rank=1)
            fsdp_optim.load_optim_state_dict(other_optim, shard)
        elif how == "transfer":
            fsdp_optim.transfer_optim_state(model, optim, other, other_optim)
        elif how == "load":
            fsdp_optim.save(folder / name, model, optim)
            fsdp_optim.load(folder / name, other, other_optim)
        else:
            fsdp_optim.async_save(folder / f"{name}-async", model, optim).wait()
            fsdp_optim.load(folder / f"{name}-async", other, other_optim)
        check_same(f"{name}, {how}", gathered(other, other_optim), full)
    streamed = dict(fsdp_optim.iter_full_optim_state(model, optim, recipient_rank=None))
    check_same(f"{name}, streamed", streamed, full["state"])
    by_id = fsdp_optim.rekey_optim_state_dict(full, model, "id", optim=optim)
    named = fsdp_optim.rekey_optim_state_dict(by_id, model, "name")
    check_same(f"{name}, rekeyed", named["state"], full["state"])
    assert set(fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)) >= set(full["state"])
    with fsdp_optim.CheckpointManager(folder / f"{name}-run", model, optim, every=1) as manager:
        assert manager.resume() == 0
        manager.step(1)


class Conformance:
    make_adapter = None
    wrap = staticmethod(DistributedDataParallel)
    make_optimizer = staticmethod(lambda model: torch.optim.Adam(model.parameters()))


adapter_conformance.run_check(adapter_conformance.check_gather, Conformance)
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()

if rank == 0:  # the command line alone
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    said = io.StringIO()
    for command in (["inspect", folder / "FSDP2"], ["verify", folder / "FSDP2"],
                    ["convert", folder / "FSDP2", folder / "torch", "--format", "torch", "--quiet"]):
        sys.argv = ["fsdp_optim", *map(str, command)]
        with redirect_stdout(said):
            try:
                runpy.run_module("fsdp_optim", run_name="__main__")
            except SystemExit as end:
                assert not end.code, (command, end.code)
    assert "Adam" in said.getvalue(), said.getvalue()
    fsdp_optim.convert(folder / "FSDP2", folder / "for-fairscale", format="fairscale")
    assert (folder / "for-fairscale").exists()
assert not [name for name in sys.modules if name.split(".")[0] == "fairscale"]
print("all done")
"""

WHAT_PEOPLE_DO = """
import pydoc, sys
from inspect import getmembers
from kit.imports import hide

{hide}
import fsdp_optim
from fsdp_optim import *
names = dict(getmembers(fsdp_optim))
assert "save" in names and "FullyShardedDataParallel" not in names
pydoc.render_doc(fsdp_optim)
import fsdp_optim.testing
assert not [name for name in sys.modules if name.split(".")[0] == "fairscale"]
"""

ENTRIES = """
from kit.imports import hide

hide("fairscale")

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu


def by_import():
    from fsdp_optim.fairscale import FullyShardedDataParallel

def by_module():
    import fsdp_optim.fairscale

def on_cpu():
    with fairscale_on_cpu():
        pass

for entry in (by_import, by_module, on_cpu):
    try:
        entry()
    except ModuleNotFoundError as error:
        assert error.__cause__ is None and error.__suppress_context__
        assert error.name == "fairscale"
        print(error)
"""


class WithoutFairscaleTest(InFolder):
    def test_everything_else_works_on_ranks(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "FOLDER": str(self.root)}
        started = [
            start(ON_A_RANK, preload=WITHOUT_FAIRSCALE, environment={**os.environ, **common, "RANK": str(rank)})
            for rank in range(2)
        ]
        for process in started:
            process.wait(300)
        for rank, process in enumerate(started):
            self.assertEqual(
                (process.returncode, process.stdout.strip()), (0, "all done"), f"rank {rank}: {process.stderr}"
            )

    def test_imports_completion_and_help_do_not_look_for_it(self) -> None:
        for hidden in (True, False):
            done = run(WHAT_PEOPLE_DO.format(hide='hide("fairscale")' if hidden else ""))
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_is_fairscales_says_what_to_install(self) -> None:
        done = run(ENTRIES)
        self.assertEqual(done.returncode, 0, done.stderr)
        way_out = "needs fairscale, which is not installed: pip install 'fairscale>=0.4.13'"
        drop_in = f"fsdp_optim.fairscale {way_out}"
        self.assertEqual(done.stdout.splitlines(), [drop_in] * 2 + [f"fairscale_on_cpu() {way_out}"])


if __name__ == "__main__":
    unittest.main()
