"""Tensors that no file has as they are, read from those that files have: any range, in pieces, and in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod

import pytest
import torch

from fsdp_optim import View
from fsdp_optim.checkpoint.views import MappedFiles
from fsdp_optim.layout import Block, Box, Boxes
from fsdp_optim.plugins import Chunks, Extent, StoredTensor, dtype_name

PAIRS = View("w", "(f (a + b)) c", {"one": "(f a) c", "two": "(f b) c"}, a=1, b=1)
HEADS = View("w", "(g (q + k) d) c", {"q": "(g q d) c", "k": "(g k d) c"}, q=2, k=1, d=3)
OSS = View("w", "e c (f (a + b))", {"{e}.one": "(f a) c", "{e}.two": "(f b) c"}, a=1, b=1)
HALVES = View("w", "e (a + b) c", {"{e}.a": "a c", "{e}.b": "b c"})
CASES = {"pairs": (PAIRS, (14, 5)), "heads": (HEADS, (36, 3)), "oss": (OSS, (2, 5, 12)), "halves": (HALVES, (3, 8, 2))}
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.complex128]
LEAST = 16  # bytes of scratch memory: one element


class Files:
    """Files in memory, which refuse to read a byte twice at once, and note what each read has."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.most_nbytes, self.num_reads, self.num_extents = 0, 0, 0

    def add(self, file: str, tensor: torch.Tensor, before: int = 3) -> int:
        """Put a tensor behind what is in a file. Returns the byte at which it begins."""
        begin = len(self.data.get(file, b"")) + before
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        self.data[file] = self.data.get(file, b"") + b"\xff" * before + content
        return begin

    def read(self, extents: Mapping[str, Sequence[Extent]]) -> None:
        for file, ranges in extents.items():
            ordered = sorted(ranges, key=lambda extent: extent.start)
            for first, second in itertools.pairwise(ordered):
                assert first.stop <= second.start, "a byte would be read twice at once"
            for extent in ordered:
                extent.memory[:] = self.data[file][extent.start : extent.stop]
            self.most_nbytes = max(self.most_nbytes, sum(len(extent.memory) for extent in ranges))
            self.num_reads, self.num_extents = self.num_reads + 1, self.num_extents + len(ranges)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(prod(shape)) % 251).to(dtype).view(shape)


def whole(files: Files, key: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(key, dtype_name(tensor.dtype), tuple(tensor.shape), "f", files.add("f", tensor))


def in_boxes(files: Files, key: str, tensor: torch.Tensor) -> StoredTensor:
    """As DCP has it: in boxes of several files, uneven, cut along the last dimension too."""
    boxes, at = [], {}
    rows, last = (0, 1, tensor.shape[0]), (0, tensor.shape[-1] // 2, tensor.shape[-1])
    for number, (low, high) in enumerate(itertools.pairwise(rows)):
        for half, (left, right) in enumerate(itertools.pairwise(last)):
            rank, file = -1 - 2 * number - half, f"f{number}"
            part = tensor[low:high, ..., left:right]
            inner = tensor.shape[1:-1]
            box = Box((low, *(0 for _ in inner), left), (high - low, *inner, right - left))
            boxes.append((rank, (Block(box, 0),)))
            at[rank] = file, files.add(file, part)
    placement = Boxes(tuple(tensor.shape), tuple(sorted(boxes)))
    file, start = at[-1]
    return StoredTensor(key, dtype_name(tensor.dtype), tuple(tensor.shape), file, start, chunks=Chunks(placement, at))


def by_hand(view: View, live: torch.Tensor) -> dict[str, torch.Tensor]:
    if view is PAIRS:
        return {"one": live[::2], "two": live[1::2]}
    if view is HEADS:
        groups = live.unflatten(0, (-1, 3, 3))
        return {"q": groups[:, :2].flatten(0, 2), "k": groups[:, 2].flatten(0, 1)}
    if view is OSS:
        return {f"{e}.{name}": live[e, :, at::2].T for at, name in enumerate(("one", "two")) for e in range(2)}
    return {f"{e}.{name}": live[e, at * 4 : at * 4 + 4] for at, name in enumerate("ab") for e in range(3)}


def check_read(mapped: MappedFiles, files: Files, stored: StoredTensor, expected: torch.Tensor) -> None:
    """Read all of it, and ranges of bytes that begin and end inside elements, into memory where no element may begin."""
    content = expected.contiguous().flatten().view(torch.uint8)
    nbytes = content.numel()
    for low, high in [(0, nbytes), (1, nbytes - 1), (nbytes // 3, nbytes // 2 + 1), (nbytes - 1, nbytes), (2, 2)]:
        for offset in (0, 1):
            memory = torch.zeros(offset + high - low, dtype=torch.uint8)
            extent = Extent(stored.start + low, memory.numpy().data[offset:])
            if mapped.has(stored.file):
                done: list[int] = []
                mapped.fill({stored.file: [extent]}, files.read, done.append)
                assert sum(done) == high - low
            elif stored.chunks is None:
                files.read({stored.file: [extent]})
            assert stored.chunks is not None or torch.equal(memory[offset:], content[low:high])


Store = Callable[[Files, str, torch.Tensor], StoredTensor]


@pytest.mark.parametrize("scratch", [LEAST, 64, 1 << 20])
@pytest.mark.parametrize("store", [whole, in_boxes])
@pytest.mark.parametrize("case", sorted(CASES))
def test_parts_of_a_stored_tensor(case: str, store: Store, scratch: int) -> None:
    view, shape = CASES[case]
    for dtype in DTYPES:
        live, files, mapped = numbers(shape, dtype), Files(), MappedFiles(scratch)
        stored = store(files, "w", live)
        expected = by_hand(view, live)
        for name, part in view.bind("w", shape).parts:
            seen = mapped.part_of(stored, part, name)
            assert (seen.key, seen.dtype, seen.shape) == (name, stored.dtype, tuple(expected[name].shape))
            check_read(mapped, files, seen, expected[name])


@pytest.mark.parametrize("scratch", [LEAST, 64, 1 << 20])
@pytest.mark.parametrize("store", [whole, in_boxes])
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_tensor_that_parts_make(case: str, store: Store, scratch: int) -> None:
    view, shape = CASES[case]
    for dtype in DTYPES:
        live, files, mapped = numbers(shape, dtype), Files(), MappedFiles(scratch)
        parts = [(store(files, name, by_hand(view, live)[name]), part) for name, part in view.bind("w", shape).parts]
        seen = mapped.joined(parts, "w")
        assert (seen.key, seen.shape) == ("w", shape)
        check_read(mapped, files, seen, live)


def test_there_and_back_again() -> None:
    """Parts of what parts make, by another reader: one fusion into another."""
    live, files, inner, outer = numbers((2, 5, 12), torch.int16), Files(), MappedFiles(), MappedFiles()
    stored = whole(files, "w", live)
    parts = OSS.bind("w", (2, 5, 12)).parts
    seen = dict(inner.split(stored, parts))
    joined = outer.joined([(seen[name], part) for name, part in parts], "w")
    memory = torch.zeros(live.nbytes, dtype=torch.uint8)

    def read(extents: Mapping[str, Sequence[Extent]]) -> None:
        inner.fill(extents, files.read, lambda nbytes: None)

    outer.fill({joined.file: [Extent(joined.start, memory.numpy().data)]}, read, lambda nbytes: None)
    assert torch.equal(memory.view(torch.int16), live.flatten())


def test_runs_lie_in_their_file() -> None:
    """Half a stack is a range of the file, so that many small ones are read together as without Views."""
    files, mapped = Files(), MappedFiles()
    stored = whole(files, "w", numbers((3, 8, 2), torch.float32))
    seen = [mapped.part_of(stored, part, name) for name, part in HALVES.bind("w", (3, 8, 2)).parts]
    assert {part.file for part in seen} == {"f"}
    assert [part.start - stored.start for part in seen] == [0, 64, 128, 32, 96, 160]


def test_tensors_that_lie_side_by_side_are_read_together() -> None:
    """One range of a file that has several of them, as reads of many small tensors ask for it."""
    files, mapped, live = Files(), MappedFiles(), [numbers((14, 5), torch.float32) + at for at in range(3)]
    stored = [whole(files, f"w{at}", tensor) for at, tensor in enumerate(live)]
    parts = PAIRS.bind("w", (14, 5)).parts
    seen = [part for tensor in stored for _, part in mapped.split(tensor, parts)]
    assert len({part.file for part in seen}) == 1
    first, last = seen[0].start, seen[-1].start + 35 * 4
    memory = torch.zeros(last - first, dtype=torch.uint8)
    mapped.fill({seen[0].file: [Extent(first, memory.numpy().data)]}, files.read, lambda nbytes: None)
    for part, expected in zip(seen, [half for tensor in live for half in (tensor[::2], tensor[1::2])], strict=True):
        assert torch.equal(memory[part.start - first :][:140].clone().view(torch.float32), expected.flatten())
    assert files.num_reads <= 2, "those of one file, but for bytes that both halves of a pair need"


def test_long_rows_are_read_to_where_they_belong() -> None:
    """Interleaved heads of 96 KiB are a few ranges, without what lies between them; short ones are read with it."""
    wide, files, mapped = View("w", "(g (q + k)) c", {"q": "(g q) c", "k": "(g k) c"}, q=1, k=1), Files(), MappedFiles()
    live = numbers((8, 48 << 10), torch.int16)
    seen = mapped.part_of(whole(files, "w", live), wide.bind("w", tuple(live.shape)).parts[0][1], "q")
    check_read(mapped, files, seen, live[::2])
    memory = torch.zeros(4 * 96 << 10, dtype=torch.uint8)
    files.num_extents, files.most_nbytes = 0, 0
    mapped.fill({seen.file: [Extent(seen.start, memory.numpy().data)]}, files.read, lambda nbytes: None)
    assert (files.num_extents, files.most_nbytes) == (4, memory.numel())


def test_memory_stays_within_the_scratch() -> None:
    """A transposed stack that is much larger is read in pieces, each no larger than the scratch memory."""
    files, scratch = Files(), 64 << 10
    mapped, live = MappedFiles(scratch), numbers((2, 300, 1000), torch.float32)
    stored = whole(files, "w", live)
    for name, part in OSS.bind("w", tuple(live.shape)).parts:
        check_read(mapped, files, mapped.part_of(stored, part, name), by_hand(OSS, live)[name])
    assert files.most_nbytes <= scratch
