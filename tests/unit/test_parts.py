"""Files in equal parts: who puts which byte, for any placements, dtypes and sizes, beside an oracle of one byte at a time."""

from __future__ import annotations

import unittest
from collections import Counter
from itertools import groupby

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.oracle import RANKS, held, layouts, shapes
from parameterized import parameterized

from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.checkpoint.save.part_ranges import PartedFile, cuts_of, ranges_on
from fsdp_optim.layout import FlatChunks
from fsdp_optim.plugins import PlannedFile

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
LEAST_PART = 8


@st.composite
def files(draw: st.DrawFn) -> File:
    """One file of a few values, placed anyhow, after a head of any length."""
    of = {f"p{i}": shape for i, shape in enumerate(draw(st.lists(shapes, max_size=5)))}
    layout = draw(layouts(of)).placements if of else {}
    values = tuple(SavedValue(fqn, "", draw(st.sampled_from(DTYPES)), layout[fqn], stored_name=fqn) for fqn in of)
    starts, end = [], 0
    for value in values:
        starts.append(end)
        end += value.nbytes
    head = bytes(draw(st.integers(LEAST_PART, 60)))
    at = sorted(draw(st.sets(st.integers(1, end), max_size=4))) if end else []
    between = tuple((byte, bytes(draw(st.integers(1, 40)))) for byte in at)
    plan = PlannedFile("file", "model", head, (), tuple(starts), end, 0, lambda start, stop: "", between)
    return File(plan, values)


def data_of_bytes(plan: PlannedFile) -> list[int | None]:
    """For each byte of the file, the byte of the data that it is; None for the head and the frames."""
    origins: list[int | None] = [None] * len(plan.head)
    frames = dict(plan.between)
    for byte in range(plan.nbytes_of_data + 1):
        origins += [None] * len(frames.get(byte, b"")) + ([byte] if byte < plan.nbytes_of_data else [])
    return origins


cases = st.tuples(st.lists(files(), min_size=1, max_size=2), st.integers(LEAST_PART, 70))


def parted(of: list[File], part_nbytes: int) -> list[PartedFile]:
    loads = dict.fromkeys(RANKS, 0.0)
    return [PartedFile.of(file, part_nbytes, loads) for file in of]


def owners_of_bytes(file: PartedFile) -> list[int]:
    """The owner of the part of each byte."""
    return [file.owners[byte // file.part_nbytes] for byte in range(file.file.plan.nbytes)]


@settings(max_examples=50)
@given(cases)
def test_every_byte_is_put_once_by_the_owner_of_its_part(case: tuple[list[File], int]) -> None:
    parted_files = parted(*case)
    assert [file.owners for file in parted_files] == [file.owners for file in parted(*case)], (
        "all ranks compute the same"
    )
    for file in parted_files:
        assert len(file.owners) == -(-file.file.plan.nbytes // file.part_nbytes)
        assert set(file.owners) <= set(RANKS)
        put: dict[int, int] = {}
        for rank in RANKS:
            others = [*file.head_on(rank), *(frame for contents in file.frames_on(rank).values() for frame in contents)]
            own_ranges = ranges_on([file], rank)
            data = data_of_bytes(file.file.plan)
            ranges = [range(start, start + len(content)) for start, content in others]
            ranges += [
                range(data.index(run.start), data.index(run.stop - 1) + 1)
                for runs in own_ranges.values()
                for run in runs
            ]
            for number, put_range in enumerate(ranges):
                assert put_range
                for byte in put_range:
                    if number >= len(others) and data[byte] is None:
                        continue  # a frame inside the value
                    assert byte not in put, f"byte {byte} is put by {put[byte]} and by {rank}"
                    put[byte] = rank
        assert [put.get(byte) for byte in range(file.file.plan.nbytes)] == owners_of_bytes(file)


@settings(max_examples=50)
@given(cases)
def test_each_owner_holds_what_it_puts(case: tuple[list[File], int]) -> None:
    """A rank has one stretch, and the beginning; its runs in the cut have all elements with bytes in it, and no others."""
    parted_files = parted(*case)
    for file in parted_files:
        cuts = cuts_of([file])
        data = data_of_bytes(file.file.plan)
        owners = [owner for owner, byte in zip(owners_of_bytes(file), data, strict=True) if byte is not None]
        for value, begin in zip(file.file.values, file.file.plan.starts, strict=True):
            size = value.dtype.itemsize
            value_owners = owners[begin : begin + value.nbytes]
            after_first = [owner for owner, _ in groupby(value_owners)][1:]
            assert len(after_first) == len(set(after_first)), "a hole"
            needed: dict[int, set[int]] = {}
            for byte, owner in enumerate(value_owners):
                needed.setdefault(owner, set()).add(byte // size)
            cut = cuts[value.key]
            has: dict[int, set[int]] = {}
            for rank, first, last in zip(cut.by, cut.starts, cut.stops, strict=True):
                has.setdefault(rank, set()).update(range(first, last))
            assert has == needed
            assert cut.shape == value.placement.shape


@settings(max_examples=50)
@given(cases)
def test_a_part_is_put_by_a_rank_that_has_some_of_it(case: tuple[list[File], int]) -> None:
    """Unless its stretch of a value would have a hole. Where ranks hold runs of elements that nobody else has."""
    for file in parted(*case):
        owners, values = file.owners, list(zip(file.file.values, file.file.plan.starts, strict=True))
        data = data_of_bytes(file.file.plan)
        part_of = [at // file.part_nbytes for at, byte in enumerate(data) if byte is not None]
        for number, owner in enumerate(owners):
            part_bytes = [byte for byte, part in enumerate(part_of) if part == number]
            has, excluded, is_shared = set[int](), set[int](), False
            for value, at in values:
                inside = (
                    range(max(part_bytes[0], at), min(part_bytes[-1] + 1, at + value.nbytes))
                    if part_bytes
                    else range(0)
                )
                if inside and at < part_bytes[0]:
                    excluded = {*owners[part_of[at] + 1 : number]} - {owners[number - 1]}
                elements = {(byte - at) // value.dtype.itemsize for byte in inside}
                by_rank = {rank: elements & {*local.values()} for rank, local in held(value.placement).items()}
                is_shared |= sum(map(len, by_rank.values())) > len(elements)
                is_shared |= any(value.placement.run(shard) is None for shard in range(value.placement.num_shards))
                has |= {rank for rank, of in by_rank.items() if of}
            if has - excluded and not is_shared:
                assert owner in has - excluded, f"part {number} of {owners}: {has}, without {excluded}"


class NamedTest(unittest.TestCase):
    @parameterized.expand([(2, 100), (2, 1000), (4, 1000), (8, 1000)])
    def test_ranks_go_on_alike(self, num_ranks: int, numel: int) -> None:
        """Where each rank has an equal share of each tensor, no rank has put much more than another one by the end of a tensor.

        Connections to a store would be idle then: ranks wait for each other's elements.
        """
        part_nbytes, num_values = 32, 40
        cut = FlatChunks((numel,), 0, -(-numel // num_ranks), (tuple(range(num_ranks)),))
        values = tuple(SavedValue(f"p{i}", "", torch.uint8, cut, stored_name=f"p{i}") for i in range(num_values))
        starts, nbytes = tuple(range(0, numel * num_values, numel)), numel * num_values
        plan = PlannedFile("file", "model", bytes(10), (), starts, nbytes, 0, lambda start, stop: "")
        loads = dict.fromkeys(range(num_ranks), 0.0)
        owners = PartedFile.of(File(plan, values), part_nbytes, loads).owners
        for stop in range(numel, nbytes + 1, numel):
            put = Counter(owners[: (10 + stop) // part_nbytes])
            most, least = (of(put[rank] for rank in range(num_ranks)) for of in (max, min))
            self.assertLessEqual(most - least, 3 + put.total() / num_ranks / 10, f"{put} parts of {stop} bytes")

    def test_a_file_of_a_head_alone(self) -> None:
        """The rank with least to do puts it, whole."""
        plan = PlannedFile("file", "model", bytes(50), (), (), 0, 0, lambda start, stop: "")
        parted_file = PartedFile.of(File(plan, ()), 8, {0: 500.0, 1: 3.0})
        self.assertEqual(parted_file.owners, (1,) * 7)
        self.assertEqual([(at, len(content)) for at, content in parted_file.head_on(1)][-1], (48, 2))


if __name__ == "__main__":
    unittest.main()
