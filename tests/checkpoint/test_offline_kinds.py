"""What tools without a model do for tensors that are alike: once for all of them, and together."""

from __future__ import annotations

import random
import shutil
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import numpy
import torch
import torch.distributed.checkpoint as dcp
from kit.compare import check_same
from kit.folders import SharedFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim
import fsdp_optim.dcp
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.load.short_ranges import ShortRanges
from fsdp_optim.foreign.archive import part_in_memory
from fsdp_optim.foreign.archive.part_in_memory import close_together
from fsdp_optim.foreign.archive.record_sums import RecordSums
from fsdp_optim.foreign.reader import Archive
from fsdp_optim.layout import Whole, whole_on

LAYERS = 40
QUICK = fsdp_optim.ConvertOptions(durable=False)
CALLS: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda place, new: fsdp_optim.verify(place),
    "convert": lambda place, new: fsdp_optim.convert(place, new, options=QUICK),
    "convert to DCP": lambda place, new: fsdp_optim.convert(place, new, format="dcp", options=QUICK),
    "convert to torch's files": lambda place, new: fsdp_optim.convert(place, new, format="torch", options=QUICK),
}


def trained(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers that are alike, each with other numbers."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optim.step()
    return model, optim


def sorted_state(optim: torch.optim.Optimizer) -> dict[int, dict[str, object]]:
    return {number: dict(sorted(state.items())) for number, state in optim.state_dict()["state"].items()}


@contextmanager
def count_plans() -> Iterator[mock.Mock]:
    """Count how often ranges of tensors are found and read."""
    with mock.patch.object(ShortRanges, "of", wraps=ShortRanges.of) as of_ranges:
        yield of_ranges


def problems_in(place: Path) -> list[str]:
    """What the checksums in the files of a checkpoint say."""
    with closing(open_checkpoint(store_at(place), verify=True)) as checkpoint:
        sums = RecordSums.of(checkpoint)
        assert sums is not None
        return sorted(sums.compare(2, lambda nbytes: None))


class OfflineKindsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        """Checkpoints of a few layers and of many, in each format."""
        for num_layers in (2, LAYERS):
            model, optim = trained(num_layers)
            source = cls.root / f"safetensors-{num_layers}"
            fsdp_optim.save(source, model, optim)
            for format in ("dcp", "torch"):
                fsdp_optim.convert(source, cls.root / f"{format}-{num_layers}", format=format, options=QUICK)

    @parameterized.expand([(format, name) for format in ("safetensors", "dcp", "torch") for name in CALLS])
    def test_tensors_that_are_alike_are_read_together(self, format: str, name: str) -> None:
        nums = []
        for num_layers in (2, LAYERS):
            new = self.root / "new"
            with count_plans() as of_ranges:
                CALLS[name](self.root / f"{format}-{num_layers}", new)
            nums.append(of_ranges.call_count)
            if new.exists():
                again = trained(num_layers)
                for tensor in again[0].parameters():
                    nn.init.zeros_(tensor)
                again[1].state.clear()
                fsdp_optim.load(new, *again)
                check_same("weights", again[0].state_dict(), trained(num_layers)[0].state_dict())
                check_same("state", sorted_state(again[1]), sorted_state(trained(num_layers)[1]))
                shutil.rmtree(new)
        self.assertLessEqual(nums[1], nums[0] + 2, f"{nums} for 2 and {LAYERS} layers of 8 values")

    def test_items_of_torchs_planner(self) -> None:
        nums = []
        for num_layers in (2, LAYERS):
            model, _ = trained(num_layers)
            wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for tensor in model.parameters():
                nn.init.zeros_(tensor)
            with count_plans() as of_ranges:
                place = self.root / f"safetensors-{num_layers}"
                dcp.load({"model": model.state_dict()}, storage_reader=fsdp_optim.dcp.Reader(place), no_dist=True)
            check_same("weights", model.state_dict(), wanted)
            nums.append(of_ranges.call_count)
        self.assertLessEqual(nums[1], nums[0] + 2, f"{nums} for 2 and {LAYERS} layers")

    def test_a_byte_of_archives_that_are_alike(self) -> None:
        """Each byte of the frames of the second and the third of four, and of the last: as when each is looked at by itself."""
        place = self.root / "changed"
        shutil.copytree(self.root / "dcp-2", place)
        file = place / "model.distcp"
        data = file.read_bytes()
        starts = [at for at in range(len(data)) if data[at : at + 4] == b"PK\3\4" and at % 64 == 0]
        starts = [at for at in starts if b"data.pkl" in data[at : at + 60]]
        self.assertEqual(len(starts), 4)
        rng, num_refused = random.Random(0), 0
        ends = [*starts[1:], len(data)]
        for start, end in list(zip(starts, ends, strict=True))[1:]:
            for at in sorted(rng.sample(range(start, end), 60)):
                file.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
                problems = problems_in(place)
                with mock.patch.object(RecordSums, "_has_known_frames", return_value=False):
                    self.assertEqual(problems, problems_in(place), f"byte {at}")
                num_refused += bool(problems)
        self.assertGreater(num_refused, 20)
        for at in rng.sample(range(ends[0] - starts[0] - 300), 60):  # the same byte of all
            changed = bytearray(data)
            for start in starts:
                changed[start + at] ^= 1
            file.write_bytes(changed)
            problems = problems_in(place)
            with mock.patch.object(RecordSums, "_has_known_frames", return_value=False):
                self.assertEqual(problems, problems_in(place), f"byte {at} of each")


class TogetherTest(unittest.TestCase):
    def test_what_lies_between_counts(self) -> None:
        """Thousands of small archives, each with a gap that is just read too: no read takes more than the bound."""
        gap = part_in_memory._GAP_NBYTES
        archives = [Archive("a", number * (10 + gap), 10) for number in range(5000)]
        batches = list(close_together(archives))
        self.assertEqual([archive for batch in batches for archive in batch], archives)
        for batch in batches:
            self.assertLessEqual(batch[-1].start + 10 - batch[0].start, part_in_memory._MOST_TOGETHER)
        self.assertLess(len(batches), 10)

    def test_what_is_not_together(self) -> None:
        gap = part_in_memory._GAP_NBYTES
        for archives in (
            [Archive("a", 0, 10), Archive("b", 10, 10)],
            [Archive("a", 0, 10), Archive("a", 11 + gap, 10)],
            [Archive("a", 0, 10), Archive("a", 9, 10)],
            [Archive("a", 20, 10), Archive("a", 0, 10)],
        ):
            self.assertEqual(list(close_together(archives)), [[archive] for archive in archives])
        both = [Archive("a", 0, 10), Archive("a", 10 + gap, 10)]
        self.assertEqual(list(close_together(both)), [both])

    def test_equal_wholes_are_one_object(self) -> None:
        self.assertIs(whole_on((3, 4), (0,)), whole_on((3, 4), (0,)))
        self.assertEqual(whole_on((3, 4), (1, 2)), Whole((3, 4), (1, 2)))
        for shape in (torch.Size((31, 7)), tuple(numpy.array((31, 8)))):
            made = whole_on(shape, (0,))
            self.assertIs(type(made.full_shape), tuple)
            self.assertEqual({*map(type, made.full_shape)}, {int})
        self.assertNotEqual(whole_on((3, 4), (0,)), whole_on((3, 4), (1,)))


if __name__ == "__main__":
    unittest.main()
