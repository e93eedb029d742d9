"""Checkpoints on servers that speak S3: saved by all ranks at once, loaded at other world sizes and in other wrappers."""

from __future__ import annotations

import signal
import tempfile
import unittest
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import mine, scramble
from kit.compare import Differs, check_same, error_text
from kit.managed import Run
from kit.optimizers import adam
from kit.options import as_options
from kit.servers import new_bucket, shared
from kit.trained import Trained
from kit.wrapping import cpu
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.testing import run_on_ranks

WRAPS = ("fairscale flat", "fairscale non-flat", "FSDP1 orig", "FSDP1 flat", "FSDP2", "HSDP", "FSDP2 x TP", "DDP")
FEW = {"moto": ("fairscale flat", "FSDP2", "DDP"), "rclone": ("FSDP1 flat", "HSDP")}
"""What `make test-all` saves on each server; tests/checkpoint/test_store_checkpoints.py has all of them in a store in memory."""

SPLIT = {"FSDP2", "FSDP1 flat"}  # the wrappers whose checkpoints are split into several files
IN_BACKGROUND = {"FSDP2", "FSDP1 flat", "DDP"}

Options = dict[str, Any]


def save_all(root: str, options: Options, wraps: Sequence[str]) -> list[tuple[int, int]]:
    """Save every wrapper's model; what was saved in all, and by this rank."""
    totals = []
    with cpu():
        for wrap in wraps:
            trained = Trained(wrap, adam)
            asked: Options = {"process_group": trained.process_group, "progress": False, "storage_options": options}
            asked |= {"extra": {"wrap": wrap}, "per_rank_extra": dist.get_rank(), "step": 3}
            asked |= {"max_file_size": 500} if wrap in SPLIT else {}
            url = f"{root}/{wrap.replace(' ', '-')}"
            if wrap in IN_BACKGROUND:
                handle = fsdp_optim.async_save(
                    url, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
                )
                scramble(trained)
                saved = handle.wait()
            else:
                saved = fsdp_optim.save(
                    url, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
                )
            check_same("the place", saved.path, url)
            totals.append((saved.nbytes, saved.nbytes_written))
    return totals


def load_all(root: str, options: Options, wraps: Sequence[str]) -> None:
    """Load every wrapper's checkpoint into another wrapper, beside what training gave it."""
    with cpu():
        for source, wrap in zip(wraps, (*wraps[1:], wraps[0]), strict=True):
            expected, other = Trained(wrap, adam), Trained(wrap, adam, steps=0)
            scramble(other)
            asked: Options = {"process_group": other.process_group, "progress": False, "storage_options": options}
            url = f"{root}/{source.replace(' ', '-')}"
            restored = fsdp_optim.load(
                url, other.model, other.optim, **as_options(fsdp_optim.LoadOptions, **asked, compare=True)
            )
            check_same(f"{source} into {wrap}", mine(other), mine(expected))
            check_same("extra", (restored.state["wrap"], restored.step), (source, 3))
            check_same("per rank", restored.state["per_rank_extra"], dist.get_rank())


def manage(root: str, options: Options) -> None:
    """A run of a manager that is stopped by a signal on one rank, continues, and goes back."""
    asked: Options = {"every": 1, "keep_last": 2, "agree_every": 1, "storage_options": options}

    def steps() -> list[int | None]:
        return [
            checkpoint.step
            for checkpoint in fsdp_optim.checkpoints(root, storage_options=options)
            if checkpoint.complete
        ]

    run = Run(root, "FSDP2", **asked)
    with run.manager:
        check_same("nothing there", run.manager.resume(), 0)
        run.steps(range(1, 4))
        if run.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        run.steps(range(4, 9))
        check_same("stopped", (run.manager.should_stop, steps()), (True, [4, 3]))
    dist.barrier()
    again = Run(root, "FSDP2", **asked)
    with again.manager:
        check_same("resumed at", again.manager.resume(), 4)
        check_same("everything", again.everything()["params"], run.everything()["params"])
        again.manager.rollback(to=3)
        again.manager.save(5)
        again.manager.wait()
        check_same("4 was taken back", steps(), [5, 3])


def save_in_background(root: str, options: Options) -> None:
    """In the background, the second and third time over what is there."""
    with cpu():
        asked: Options = {"storage_options": options, "progress": False, "durable": False, "extra": {"a": 1}}
        for steps in (1, None, None):
            trained = Trained("FSDP2", adam, steps=1) if steps else Trained("FSDP2", adam)
            handle = fsdp_optim.async_save(
                f"{root}/step-1", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
            )
            scramble(trained)
            check_same("the place", handle.wait().path, f"{root}/step-1")
            asked |= {"overwrite": True, "per_rank_extra": dist.get_rank()}
        other = Trained("fairscale flat", adam, steps=0)
        restored = fsdp_optim.load(
            f"{root}/step-1",
            other.model,
            other.optim,
            options=fsdp_optim.LoadOptions(storage_options=options, compare=True, progress=False),
        )
        check_same("loaded", mine(other), mine(Trained("fairscale flat", adam)))
        check_same("per rank", restored.state["per_rank_extra"], dist.get_rank())


def save_for_cache(url: str, options: Options) -> None:
    with cpu():
        trained = Trained("FSDP2", adam)
        fsdp_optim.save(
            url, trained.model, trained.optim, options=fsdp_optim.SaveOptions(storage_options=options, progress=False)
        )


def load_with_cache(url: str, options: Options, folder: str) -> int:
    """How many reads of the store this rank needs."""
    real, num = S3Bucket.read_into, 0

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal num
        num += 1
        real(*args, **kwargs)

    with cpu(), mock.patch.object(S3Bucket, "read_into", counted):
        other = Trained("fairscale flat", adam, steps=0)
        scramble(other)
        asked: Options = {"storage_options": options, "progress": False, "local_cache": folder}
        fsdp_optim.load(url, other.model, other.optim, **as_options(fsdp_optim.LoadOptions, **asked, compare=True))
        check_same("loaded", mine(other), mine(Trained("fairscale flat", adam)))
    return num


def save_to_nowhere(root: str, options: Options) -> tuple[tuple[str, str], tuple[str, str]]:
    """The error on every rank where the bucket does not exist, and where a share cannot be sent."""
    with cpu():
        trained = Trained("FSDP2", adam, steps=1)
        asked: Options = {"storage_options": options, "progress": False, "durable": False}
        missing = error_text(
            lambda: fsdp_optim.async_save(
                "s3://no-such-bucket/a", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
            )
        )
        failing = mock.patch.object(S3Bucket, "put_part", side_effect=CheckpointError("the line is cut"))
        with failing if dist.get_rank() == 1 else nullcontext():
            handle = fsdp_optim.async_save(
                f"{root}/b", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
            )
            broken = error_text(handle.wait)
        return missing, broken


class TestServers(unittest.TestCase):
    options: dict[str, Options]

    @classmethod
    def setUpClass(cls) -> None:
        cls.options = {"moto": shared("moto"), "rclone": shared("rclone")}

    @expand(soon=list(FEW.items()), later=[("moto", WRAPS), ("rclone", WRAPS)])
    def test_four_ranks_save_and_others_load(self, kind: str, wraps: Sequence[str]) -> None:
        options = self.options[kind]
        name = new_bucket(options)
        root = f"s3://{name}/run"
        by_rank = run_on_ranks(save_all, 4, root, options, wraps)
        for wrap, results in zip(wraps, zip(*by_rank, strict=True), strict=True):
            self.assertEqual(sum(written for _, written in results), results[0][0], f"{wrap}: every byte is put once")
            self.assertGreater(sum(written > 0 for _, written in results), 1, f"{wrap}: the ranks share the work")
        for world_size in (3, 1):
            run_on_ranks(load_all, world_size, root, options, wraps)
        self.check_bucket(name, options, wraps[-1].replace(" ", "-"))
        self.assertEqual(fsdp_optim.latest(root, storage_options=options), f"{root}/{wraps[-1].replace(' ', '-')}")

    @pytest.mark.slow  # test_store_checkpoints.py has one whose store is in memory
    def test_a_manager(self) -> None:
        options = self.options["moto"]
        run_on_ranks(manage, 2, f"s3://{new_bucket(options)}/run", options)

    def test_in_the_background(self) -> None:
        options = self.options["rclone"]
        run_on_ranks(save_in_background, 3, f"s3://{new_bucket(options)}/run", options)

    def test_a_local_cache(self) -> None:
        """The second load reads hardly anything but the manifest from the store, also with another wrapper."""
        options = self.options["rclone"]
        url = f"s3://{new_bucket(options)}/run/step-1"
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_for_cache, 2, url, options)
            first, second = (max(run_on_ranks(load_with_cache, 2, url, options, folder)) for _ in range(2))
        self.assertGreater(first, second)
        self.assertLessEqual(second, 2, "the manifest, to open it and to see whether it was replaced")

    def test_a_background_save_that_fails(self) -> None:
        """All ranks raise the same error, and nothing is left."""
        options = self.options["moto"]
        name = new_bucket(options)
        for missing, broken in run_on_ranks(save_to_nowhere, 2, f"s3://{name}/run", options):
            self.assertEqual(missing[0], "CheckpointError", missing[1])
            self.assertIn("no-such-bucket", missing[1])
            self.assertEqual(broken, ("CheckpointError", "rank 1: the line is cut"))
        self.assertEqual([entry.key for entry in S3Bucket(name, options).list("")], [])
        self.assertEqual(list(S3Bucket(name, options).uploads("")), [])

    def check_bucket(self, name: str, options: Options, last: str) -> None:
        """Nothing is left but the files, which other tools open, and which are a folder's where they are copied."""
        bucket = S3Bucket(name, options)
        self.assertEqual(list(bucket.uploads("")), [])
        keys = [entry.key for entry in bucket.list("")]
        self.assertEqual([key for key in keys if "/." in key], [])
        with tempfile.TemporaryDirectory() as folder, cpu():
            for key in keys:
                if key.startswith(f"run/{last}/"):
                    path = Path(folder, key)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(bucket.read(key)[0])
            path = Path(folder, "run", last)
            expected, other = Trained("plain", adam), Trained("plain", adam, steps=0)
            weights = load_file(path / "model.safetensors")
            for fqn, weight in expected.model.state_dict().items():
                if not torch.equal(weights[fqn], weight):
                    raise Differs(fqn)
            fsdp_optim.load(path, other.model, other.optim)
            check_same("a copy of the bucket is a folder", mine(other), mine(expected))
