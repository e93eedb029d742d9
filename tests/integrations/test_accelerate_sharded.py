"""Folders that Accelerate and the Trainer themselves have saved as sharded: a run that switches to the plug-in goes on.

Accelerate's own function loads the optimizer of FSDP1 into what `FSDP.optim_state_dict` gives of the new optimizer, which has no
state before its first step, so nothing is loaded.
"""

from __future__ import annotations

import shutil
import tempfile
import unittest
from typing import Any

from kit.accelerate_loop import Loop, load_and_go_on
from kit.cases import expand, some
from kit.compare import check_same
from kit.hugging_face import enabled, on_cpu, train

from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


def by_accelerate_alone(kind: str, folder: str) -> dict[str, Any]:
    """Five steps without the plug-in. Accelerate saves after the third."""
    with on_cpu(kind), enabled(None):
        loop = Loop(kind)
        losses = [loop.step() for _ in range(3)]
        third, rest = loop.state, loop.rest
        loop.accelerator.save_state(folder)
        losses += [loop.step() for _ in range(2)]
        return {"third": third, "rest of third": rest, "losses": losses[3:], "end": loop.state, "rest": loop.rest}


class ShardedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)

    @expand(*some([("FSDP1", 3, "FSDP2"), ("FSDP2", 3, "FSDP1"), ("FSDP1", 1, "none"), ("FSDP2", 2, "DDP")], every=4))
    def test_an_accelerator_goes_on_bit_for_bit(self, kind: str, world_size: int, other: str) -> None:
        folder = f"{self.root}/{kind}-{world_size}"
        oracle = run_on_ranks(by_accelerate_alone, 2, kind, folder)
        for rank, resumed in enumerate(run_on_ranks(load_and_go_on, 2, kind, folder, {}, False)):
            check_same(f"{kind}: a run that switches", resumed, oracle[rank], in_order=False)
        for one in run_on_ranks(load_and_go_on, world_size, other, folder, {}, False, 0):
            check_same(f"{kind} in {other} on {world_size}", one["third"], oracle[0]["third"], in_order=False)
            check_same(f"{kind} in {other} on {world_size}", one["rest of third"], oracle[0]["rest of third"])

    @expand(*some([("FSDP1", 3, "FSDP2"), ("FSDP2", 3, "FSDP1"), ("FSDP1", 1, "none")], every=3))
    def test_a_trainer_goes_on_bit_for_bit(self, kind: str, world_size: int, other: str) -> None:
        folder = f"{self.root}/trainer-{kind}-{world_size}"
        oracle = run_on_ranks(train, 2, kind, folder, None)
        old = f"{folder}/checkpoint-2"
        for rank, resumed in enumerate(run_on_ranks(train, 2, kind, folder, {}, old, 1, save_strategy="no")):
            check_same(f"{kind}, begun", resumed["begun"], oracle[rank]["second"], in_order=False)
            check_same(
                f"{kind}, losses", [resumed["losses"][n] for n in (3, 4)], [oracle[rank]["losses"][n] for n in (3, 4)]
            )
            check_same(f"{kind}, end", resumed["end"], oracle[rank]["end"], in_order=False)
        options = {"save_strategy": "no", "max_steps": 3}
        for one in run_on_ranks(train, world_size, other, folder, {}, old, 1, **options):
            check_same(f"{kind} in {other} on {world_size}", one["begun"], oracle[0]["second"], in_order=False)
