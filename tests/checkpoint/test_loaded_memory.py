"""The memory of what a load makes: each value of an optimizer's new state has a storage of its own, as torch's own state has."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import torch
from kit.checkpoints import load, optims_of, save, scramble
from kit.trained import Trained
from parameterized import parameterized

from fsdp_optim.testing import run_on_ranks


def storages(wrapper: str, folder: str) -> list[tuple[str, int, int, int]]:
    """Load into an optimizer without state. Returns (value name, address, bytes of the storage, bytes of the elements)."""
    trained = Trained(wrapper, torch.optim.Adam)
    trained.step(range(2))
    save(Path(folder) / "c", trained)
    scramble(trained)
    load(Path(folder) / "c", trained)
    made = []
    for optim in optims_of(trained):
        for values in optim.state.values():
            for name, value in values.items():
                local = value.to_local() if hasattr(value, "to_local") else value
                storage = local.untyped_storage()
                made.append((name, storage.data_ptr(), storage.nbytes(), local.nbytes))
    return made


class LoadedMemoryTest(unittest.TestCase):
    @parameterized.expand(["FSDP2", "DDP", "FSDP1 flat"])
    def test_no_two_values_share_memory(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for made in run_on_ranks(storages, 2, wrapper, folder):
                self.assertEqual({name for name, *_ in made}, {"step", "exp_avg", "exp_avg_sq"})
                for name, _, of_storage, of_value in made:
                    self.assertEqual(of_storage, of_value, name)
                addresses = [address for _, address, nbytes, _ in made if nbytes]
                self.assertEqual(len(set(addresses)), len(addresses))
