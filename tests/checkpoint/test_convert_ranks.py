"""A conversion by several processes, in several threads, in bounded memory, and what is shown of it."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoint_format import all_bytes
from kit.compare import check_same, error_text
from kit.conversions import MEMORY, check_converted, save_some
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.options import as_options

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.checkpoint.common import progress
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.base import Capabilities
from fsdp_optim.storage.posix import FolderStaging
from fsdp_optim.testing import run_on_ranks, run_on_threads, thread_rank


@contextlib.contextmanager
def no_shared_files() -> Iterator[None]:
    """Each rank writes files of its own, as where several machines cannot write to one file."""
    with mock.patch.object(FolderStaging, "capabilities", Capabilities("no")):
        yield


def convert_to(target: Path, source: Path, size: int) -> int:
    """On each rank."""
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False, max_file_size=size)
    ).nbytes_written


def convert_alone(source: Path, target: Path) -> int | None:
    """Rank 1 by itself, while the others do something else."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() != 1:
        return None
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(process_group=groups[1], durable=False)
    ).nbytes_written


def fail_on_all(root: Path) -> dict[str, tuple[str, str]]:
    """The errors of ranks if they see different sources, or have other options, or one of them reads damage."""
    own_source = root / f"source-{thread_rank()}"
    memory = MEMORY * (1 + thread_rank())
    return {
        "another source": error_text(
            lambda: fsdp_optim.convert(own_source, root / "to", options=fsdp_optim.ConvertOptions(durable=False))
        ),
        "other options": error_text(
            lambda: fsdp_optim.convert(
                root / "source-0", root / "to", options=fsdp_optim.ConvertOptions(bucket_nbytes=memory, durable=False)
            )
        ),
        "damage": error_text(
            lambda: fsdp_optim.convert(
                root / "damaged", root / "to", options=fsdp_optim.ConvertOptions(durable=False, bucket_nbytes=MEMORY)
            )
        ),
        "no source": error_text(lambda: fsdp_optim.convert(root / "nothing", root / "to")),
    }


IN_LITTLE_MEMORY = """
from kit.peaks import Peak
import torch, fsdp_optim
fsdp_optim.convert({small!r}, {small!r} + "-to", options=fsdp_optim.ConvertOptions(durable=False))
torch.set_num_threads(4)
with Peak() as peak:
    options = fsdp_optim.ConvertOptions(bucket_nbytes={memory}, durable=False, max_file_size={size})
    done = fsdp_optim.convert({source!r}, {target!r}, options=options)
print(done.nbytes, peak.mib)
"""


class ConvertRanksTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.source = cls.root / "source"
        save_some(cls.source)

    def setUp(self) -> None:
        self.folder = self.own_folder()

    def test_ranks_write_a_share_each_of_the_same_files(self) -> None:
        for name, size in (("one", 10**9), ("several", 1 << 21), ("own", 1 << 21)):
            with no_shared_files() if name == "own" else contextlib.nullcontext():
                first, second = run_on_threads(convert_to, 2, self.folder / name, self.source, size)
            wanted = self.folder / f"wanted-{name}"
            done = fsdp_optim.convert(
                self.source,
                wanted,
                options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False, max_file_size=size),
            )
            check_converted(self.folder / name, wanted)
            self.assertEqual(first + second, done.nbytes)
            self.assertLess(abs(first - second), done.nbytes / 2)

    def test_one_rank_of_a_job_by_itself(self) -> None:
        by_rank = run_on_ranks(convert_alone, 2, self.source, self.folder / "to")
        wanted = fsdp_optim.convert(
            self.source, self.folder / "wanted", options=fsdp_optim.ConvertOptions(durable=False)
        )
        self.assertEqual(by_rank, [None, wanted.nbytes])
        check_converted(self.folder / "to", self.folder / "wanted")

    def test_an_error_of_one_rank_is_an_error_of_all(self) -> None:
        save_some(self.folder / "source-0", seed=0)
        save_some(self.folder / "source-1", seed=1)
        shutil.copytree(self.source, self.folder / "damaged")
        damaged = self.folder / "damaged" / "optim.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1  # in the share of rank 1
        damaged.write_bytes(content)
        errors = run_on_threads(fail_on_all, 2, self.folder)
        for case in errors[0]:
            check_same(case, errors[1][case], errors[0][case])
        self.assertRegex(errors[0]["another source"][1], "the ranks see different checkpoints")
        self.assertRegex(errors[0]["other options"][1], "see different checkpoints, or have other options")
        self.assertRegex(errors[0]["damage"][1], "optim.safetensors.*not those that were saved")
        self.assertEqual(errors[0]["damage"][0], "CheckpointError")
        self.assertRegex(errors[0]["no source"][1], "nothing")
        self.assertEqual([path.name for path in self.folder.iterdir() if path.name.startswith("to")], [])

    def test_threads_and_memory_do_not_show_in_the_files(self) -> None:
        before = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, before)
        fsdp_optim.convert(self.source, self.folder / "wanted", options=fsdp_optim.ConvertOptions(durable=False))
        for threads, memory in ((1, 16 << 20), (2, 32 << 20), (7, 512 << 20)):
            torch.set_num_threads(threads)
            fsdp_optim.convert(
                self.source, self.folder / "to", options=fsdp_optim.ConvertOptions(bucket_nbytes=memory, durable=False)
            )
            check_converted(self.folder / "to", self.folder / "wanted")
            shutil.rmtree(self.folder / "to")

    def test_the_memory_is_bounded(self) -> None:
        """Ten times the memory; what the interpreter and the threads need besides is in the slack."""
        big, small = self.folder / "big", self.folder / "small"
        save_some(big, num_layers=3, width=2048)
        save_some(small, num_layers=1, width=8)
        place = {"source": str(big), "target": str(self.folder / "to"), "small": str(small), "memory": MEMORY}
        done = run(IN_LITTLE_MEMORY.format(**place, size=10**9), preload=LIBRARY)
        self.assertEqual(done.returncode, 0, done.stderr)
        nbytes, mib = map(float, done.stdout.split())
        self.assertGreater(nbytes, 9 * MEMORY)
        self.assertLess(mib, MEMORY / 2**20 + 8)

    def test_to_a_bucket_and_back(self) -> None:
        bucket = MemoryBucket()
        there = ObjectStore(bucket, "run/step", OURS.probe)
        fsdp_optim.convert(self.source, self.folder / "wanted", options=fsdp_optim.ConvertOptions(durable=False))
        done = fsdp_optim.convert(self.source, there)  # type: ignore[arg-type]
        self.assertEqual(done.nbytes_written, done.nbytes)
        fsdp_optim.convert(there, self.folder / "back", options=fsdp_optim.ConvertOptions(durable=False))  # type: ignore[arg-type]
        got, wanted = (all_bytes(self.folder / name) for name in ("back", "wanted"))
        for name in wanted:
            if name.endswith(".safetensors"):
                self.assertEqual(got[name], wanted[name], name)

    def test_lines_in_the_log_say_how_fast_it_is(self) -> None:
        with (
            mock.patch.multiple(progress, _BAR_FROM=0, _LINE_EVERY=-1.0),
            self.assertLogs("fsdp_optim", logging.INFO) as logs,
        ):
            fsdp_optim.convert(
                self.source, self.folder / "to", options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
            )
        lines = [line for line in logs.output if "converting" in line]
        self.assertGreater(len(lines), 4)
        for line in lines:
            self.assertRegex(line, r"converting: \d+ of \d+ bytes, \d+\.\d\d s, \d+ MB/s$")
        with self.assertNoLogs("fsdp_optim", logging.INFO):
            fsdp_optim.convert(
                self.source, self.folder / "again", options=fsdp_optim.ConvertOptions(progress=False, durable=False)
            )

    def test_wrong_arguments(self) -> None:
        to = self.folder / "to"
        cases: dict[str, dict[str, Any]] = {
            "bucket_nbytes must be at least 16777216 bytes": {"bucket_nbytes": 1 << 20},
            "max_file_size must be at least 1 byte": {"max_file_size": 0},
            "format must be one of 'safetensors'": {"format": "zip"},
            "format must be .* not 3": {"format": 3},
            "has options of its own that must be given": {"format": "fairscale_shards"},
            "param_names must be a list": {"param_names": "weight"},
            "timeout must be": {"timeout": -1},
        }
        for message, options in cases.items():
            with self.assertRaisesRegex((CheckpointError, StateError), message):
                fsdp_optim.convert(self.source, to, **as_options(fsdp_optim.ConvertOptions, **options))
        self.assertFalse(to.exists())
