"""docs/interop.md lists every class and function that a pickle of another library may name."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch

from fsdp_optim.foreign.archive.torch_globals import StorageClass, table_of
from fsdp_optim.foreign.dcp import metadata_pickle as dcp_pickle
from fsdp_optim.foreign.deepspeed.trees import STAND_INS
from fsdp_optim.foreign.per_rank.torch_shards import stand_ins

DOC = Path(__file__).parents[2] / "docs" / "interop.md"
IN_WORDS = (torch.dtype, StorageClass)  # "dtypes", "the classes of storages"


class NoTensors:
    def tensor(self, view: Any) -> None:
        return None


class KnownClassesTest(unittest.TestCase):
    def test_the_docs_name_each(self) -> None:
        text = DOC.read_text(encoding="utf-8")
        of_torch = {what for what, entry in table_of(NoTensors()).globals.items() if not isinstance(entry, IN_WORDS)}
        of_dcp = {entry for entry in (*dcp_pickle.CLASSES, *dcp_pickle.WORDS) if not entry.startswith("pathlib")}
        known = {*of_torch, *stand_ins(), *STAND_INS, *of_dcp}
        self.assertGreater(len(known), 60)
        self.assertEqual(sorted(what for what in known if f"{what.rpartition('.')[2]}`" not in text), [])


if __name__ == "__main__":
    unittest.main()
