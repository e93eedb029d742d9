"""save and load: each rank writes and reads its part of the bytes only."""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import threading
import unittest
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.checkpoints import (
    load,
    save,
)
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fsdp_optim.testing import run_on_ranks


class Wide(nn.Module):
    """A few MiB, most of it in tensors of one size."""

    units = (*(f"layers.{i}" for i in range(4)), "")
    tensor_parallel = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, collections.Counter[str]]]:
    """Bytes that this process reads from and writes to each file through `os`, by the file's name."""
    counts = {"read": collections.Counter[str](), "written": collections.Counter[str]()}
    lock = threading.Lock()

    def counting(name: str, which: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            result = real(fd, *args)
            file = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            with lock:
                counts[which][file] += result if isinstance(result, int) else len(result)
            return result

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as stack:
        for name in ("pread", "preadv", "read"):
            stack.enter_context(counting(name, "read"))
        for name in ("pwrite", "pwritev", "write"):
            stack.enter_context(counting(name, "written"))
        yield counts


def tensor_bytes(counts: Mapping[str, int]) -> int:
    return sum(n for file, n in counts.items() if file.startswith(("model", "optim")) and file.endswith(".safetensors"))


def head_and_data(file: Path) -> tuple[int, int]:
    """How long the header of a safetensors file is, and the rest."""
    with file.open("rb") as stream:
        head = 8 + int.from_bytes(stream.read(8), "little")
    return head, file.stat().st_size - head


def sizes_of(folder: Path) -> tuple[int, int]:
    """Of all headers, and of all data."""
    files = [*folder.glob("model*.safetensors"), *folder.glob("optim*.safetensors")]
    heads, data = zip(*map(head_and_data, files), strict=True)
    return sum(heads), sum(data)


CUT_ANEW = ("fairscale flat", "FSDP2", "HSDP")
"""For these wrappers, a checkpoint of another world size is read, too."""


def bytes_written(root: Path, wrappers: Sequence[str]) -> dict[str, dict[str, int]]:
    by_wrapper = {}
    for wrapper in wrappers:
        with cpu():
            trained = Trained(wrapper, steps=1, model=Wide)
            with counted() as counts:
                save(root / f"{wrapper} {dist.get_world_size()}", trained)
            by_wrapper[wrapper] = {f: n for f, n in counts["written"].items() if tensor_bytes({f: n})}
    return by_wrapper


def bytes_read(root: Path, size: int, wrappers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By wrapper: read, and said to be read."""
    by_wrapper = {}
    for wrapper in wrappers:
        with cpu():
            target = Trained(wrapper, steps=0, model=Wide)
            with counted() as counts:
                restored = load(root / f"{wrapper} {size}", target)
            by_wrapper[wrapper] = (tensor_bytes(counts["read"]), restored.nbytes)
    return by_wrapper


class BytesTest(unittest.TestCase):
    def test_every_byte_is_written_once_and_read_once(self) -> None:
        self.check_bytes((*CUT_ANEW, "DDP"), CUT_ANEW)

    @pytest.mark.slow
    def test_every_byte_is_written_once_and_read_once_by_every_wrapper(self) -> None:
        self.check_bytes(tuple(WRAPPERS), tuple(WRAPPERS))

    def check_bytes(self, wrappers: Sequence[str], cut_anew: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            written = run_on_ranks(bytes_written, 4, root, wrappers)
            run_on_ranks(bytes_written, 3, root, cut_anew)
            by_size = {
                4: run_on_ranks(bytes_read, 4, root, 4, wrappers),
                3: run_on_ranks(bytes_read, 4, root, 3, cut_anew),
            }
            sizes = {path.name: sizes_of(path) for path in root.iterdir()}
        wrong = []
        for wrapper in wrappers:
            heads, data = sizes[f"{wrapper} 4"]
            by_rank = [sum(counts[wrapper].values()) for counts in written]
            if not data <= sum(by_rank) <= data + heads:
                wrong.append(f"{wrapper}: {data} bytes and {heads} of headers, written {by_rank}, {sum(by_rank)}")
            if max(by_rank) > 1.1 * data / 4 + heads:
                wrong.append(f"{wrapper}: {data} bytes, written not evenly: {by_rank}")
            for size, reports in by_size.items():
                if wrapper not in reports[0]:
                    continue
                heads, data = sizes[f"{wrapper} {size}"]
                by_rank, said = ([counts[wrapper][i] for counts in reports] for i in (0, 1))
                where = f"{wrapper}, saved by {size}, loaded by 4: {data} bytes and {heads} of headers, read {by_rank}"
                if not data <= sum(by_rank) <= 1.05 * data + 4 * heads:
                    wrong.append(f"{where}, {sum(by_rank)}")
                if max(by_rank) > 1.1 * data / 4 + heads:
                    wrong.append(f"{where}: not evenly")
                if not all(data / 4.4 <= stated <= read for stated, read in zip(said, by_rank, strict=True)):
                    wrong.append(f"{where}, said {said}")
        self.assertEqual(wrong, [])

    @parameterized.expand(("DDP", "plain"))
    def test_replicas_share_one_large_tensor(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(bytes_of_one, 4, Path(folder) / "step-1", wrapper)
            heads, data = sizes_of(Path(folder) / "step-1")
        self.assertTrue(data <= sum(by_rank) <= data + heads, (by_rank, data, heads))
        self.assertLess(max(by_rank), 1.1 * data / 4 + heads, by_rank)

    def test_with_per_rank_files_one_rank_writes_a_file(self) -> None:
        """All of its data. The headers are the first rank's."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step-1"
            by_rank = run_on_ranks(files_written, 3, path)
            sizes = {file.name: head_and_data(file) for file in path.glob("*-of-*.safetensors")}
        owners = set()
        for name, (head, data) in sizes.items():
            written = [counts.get(name, 0) for counts in by_rank]
            owner = written.index(max(written))
            owners.add(owner)
            self.assertTrue(data <= written[owner] <= data + head, (name, head, data, written))
            self.assertTrue(data <= sum(written) <= data + head, (name, head, data, written))
        self.assertEqual(owners, {0, 1, 2})


def bytes_of_one(path: Path, wrapper: str) -> int:
    trained = Trained(wrapper, steps=0, model=lambda: nn.Linear(1024, 1024, bias=False))
    with counted() as counts:
        save(path, trained)
    return tensor_bytes(counts["written"])


def files_written(path: Path) -> dict[str, int]:
    trained = Trained("FSDP2", steps=1, model=Wide)
    with counted() as counts:
        save(path, trained, strategy="per_rank_files")
    return dict(counts["written"])
