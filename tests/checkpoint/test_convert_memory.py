"""`bucket_nbytes` bounds what a conversion takes, from every kind of checkpoint and into every format, however large it is."""

from __future__ import annotations

import unittest
from typing import Any

from kit.cases import expand, those
from kit.conversions import MEMORY
from kit.folders import InFolder
from kit.forked import LIBRARY, run
from kit.large import NAMES, SOURCES, ours

from fsdp_optim.plugins import FairscaleShards
from fsdp_optim.registry import format_names

SOON = ("torch transposed", "ZeRO 3", "fairscale_shards", "deepspeed_universal")
ROWS = 2304
"""81 MiB of tensors, five times MEMORY."""

SLACK = 8  # MiB: the interpreter's, and those of threads

SCRIPT = """
from kit.peaks import Peak
from kit.options import as_options
import torch, fsdp_optim
from fsdp_optim.plugins import FairscaleShards
root, options = {root!r}, {options!r}
fsdp_optim.convert(root + "/small", root + "/small-to", **as_options(fsdp_optim.ConvertOptions, durable=False, **options))
torch.set_num_threads(4)
with Peak() as peak:
    quiet = as_options(fsdp_optim.ConvertOptions, bucket_nbytes={memory}, durable=False, progress=False, **options)
    done = fsdp_optim.convert(root + "/big", root + "/to", **quiet)
print(done.nbytes, peak.mib)
"""


class ConvertMemoryTest(InFolder):
    def check(self, **options: Any) -> None:
        """In a process that has converted something already, so that no import counts."""
        code = SCRIPT.format(root=str(self.root), options=options, memory=MEMORY)
        done = run(code, preload=LIBRARY)
        self.assertEqual(done.returncode, 0, done.stderr)
        nbytes, mib = map(float, done.stdout.split())
        self.assertGreater(nbytes, 5 * MEMORY)
        self.assertLess(mib, MEMORY / 2**20 + SLACK)

    @expand(*those([(name,) for name in SOURCES], soon=lambda name: name in SOON))
    def test_from(self, source: str) -> None:
        for name, rows in (("small", 8), ("big", ROWS)):
            SOURCES[source](self.root / name, rows)
        self.check()

    @expand(*those([(name,) for name in format_names()], soon=lambda name: name in SOON))
    def test_to(self, target: str) -> None:
        for name, rows in (("small", 8), ("big", ROWS)):
            ours(self.root / name, rows)
        self.check(format=FairscaleShards(2, {"": NAMES}) if target == "fairscale_shards" else target)


if __name__ == "__main__":
    unittest.main()
