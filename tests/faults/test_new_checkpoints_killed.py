"""A call that makes a new checkpoint of others and is killed leaves none; the next call makes it, and removes what was left.

A conversion is in tests/checkpoint/test_convert_killed.py, a copy in test_copy.py, extracted files in test_show_extract.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kit.compare import check_same
from kit.folders import InFolder
from kit.forked import LIBRARY, run
from parameterized import parameterized
from safetensors.torch import save_file
from torch import nn

import fsdp_optim

CALLS = {
    "average": "fsdp_optim.average(['a', 'b'], 'new', options=FAST)",
    "merge_adapter": "fsdp_optim.merge_adapter('a', 'adapter', 'new', options=FAST)",
}
KILLED = """
import os, signal, fsdp_optim
FAST = fsdp_optim.ConvertOptions(durable=False)
from fsdp_optim.storage.posix import FolderStaging, FolderWriter

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

{place} = die
os.chdir({folder!r})
{call}
"""
PLACES = ["FolderStaging.create", "FolderWriter.write", "FolderStaging.commit"]


class KilledTest(InFolder):
    def setUp(self) -> None:
        super().setUp()
        for number, name in enumerate("ab"):
            torch.manual_seed(number)
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            fsdp_optim.save(self.root / name, model, options=fsdp_optim.SaveOptions(durable=False))
        adapter = self.root / "adapter"
        adapter.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["0"], "base_model_name_or_path": ""}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        name = "base_model.model.0.lora_{}.weight"
        factors = {name.format("A"): torch.ones(2, 4), name.format("B"): torch.ones(3, 2)}
        save_file(factors, adapter / "adapter_model.safetensors")

    @parameterized.expand([(name, place) for name in CALLS for place in PLACES])
    def test_nothing_is_left_half(self, name: str, place: str) -> None:
        code = KILLED.format(place=place, folder=str(self.root), call=CALLS[name])
        check_same("killed", run(code, preload=LIBRARY).returncode, -9)
        self.assertFalse((self.root / "new").exists())
        self.assertNotIn(self.root / "new", [Path(info.path) for info in fsdp_optim.checkpoints(self.root)])
        again = KILLED.format(place="unused", folder=str(self.root), call=CALLS[name])
        done = run(again, preload=LIBRARY)
        self.assertEqual(done.returncode, 0, done.stderr)
        fsdp_optim.verify(self.root / "new")
        self.assertEqual([entry.name for entry in self.root.iterdir() if entry.name.startswith("new.")], [])
        before, after = (fsdp_optim.show(self.root / of, "0.weight", slice=":").elements for of in ("a", "new"))
        self.assertFalse(torch.equal(before, after))
