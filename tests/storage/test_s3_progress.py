"""The progress of saves to a URL and of loads from it: lines with the bytes, of all bytes, and the MB/s, as for files."""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kit.optimizers import adam
from kit.options import as_options
from kit.servers import Options, new_bucket, shared
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.common import progress
from fsdp_optim.testing import run_on_ranks

LINE = re.compile(r"(saving|loading): (\d+) of (\d+) bytes, \d+\.\d\d s, \d+ MB/s")
SUMMARY = re.compile(r"(saved|loaded) ([^\s,]+): .*[\d.]+ \w?B in [\d.]+ s \([\d.]+ \w?B/s\)")
BUCKET = 8 << 10  # bytes
SHARD = 3 * 4 * 128 * 128  # bytes of the tensors of a rank: half of two layers, with two values of Adam each


class Layers(nn.Module):
    """128 KiB of weights, and twice that with Adam's state beside them."""

    units = ("layers.0", "layers.1", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))


@contextlib.contextmanager
def lines() -> Iterator[list[str]]:
    """The lines of the library's log, where every call is long, and a line is always due."""
    told: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("fsdp_optim")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        with mock.patch.multiple(progress, _BAR_FROM=0, _LINE_EVERY=-1.0):
            yield told
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def save_and_load(url: str, options: Options | None) -> tuple[list[str], list[str], int]:
    """The lines of a save and of a load on this rank; the bytes of the checkpoint."""
    with cpu():
        trained = Trained("FSDP2", adam, 1, Layers)
        given: Any = {"storage_options": options, "bucket_nbytes": BUCKET}
        with lines() as saving:
            saved = fsdp_optim.save(url, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **given))
        with lines() as loading:
            fsdp_optim.load(url, trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **given))
    return saving, loading, saved.nbytes


def steps(told: list[str]) -> list[tuple[int, int]]:
    """The bytes that were done and all bytes, line by line."""
    return [(int(line[2]), int(line[3])) for line in map(LINE.fullmatch, told) if line]


class ProgressTest(unittest.TestCase):
    @parameterized.expand([("a folder",), ("s3",), ("fsspec",)])
    def test_lines(self, place: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options: Options | None = None
            url = f"file://{folder}/run/step-1" if place == "fsspec" else f"{folder}/run/step-1"
            if place == "s3":
                options = {**shared("rclone"), "part_nbytes": 4 << 10}
                url = f"s3://{new_bucket(options)}/run/step-1"
            (saving, loading, nbytes), (*others, _) = run_on_ranks(save_and_load, 2, url, options)
        self.assertLess(2 * SHARD, nbytes, "steps are tensors, too")
        self.assertEqual([steps(lines) for lines in others], [[], []], "rank 1")
        for told, total, verb in ((saving, nbytes, "saved"), (loading, SHARD, "loaded")):
            done = [num_done for num_done, _ in steps(told)]
            self.assertEqual({of for _, of in steps(told)}, {total}, told)
            self.assertEqual(done, sorted(done))
            self.assertEqual(done[-1], total)
            self.assertGreater(len({*done}), 4, "steps on the way")
            (summary,) = [line for line in map(SUMMARY.match, told) if line]
            self.assertEqual((summary[1], summary[2]), (verb, url), told)


if __name__ == "__main__":
    unittest.main()
