"""Checkpoints on servers that speak S3: saved by all ranks at once, loaded at other world sizes and in other wrappers."""

from __future__ import annotations

import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoints import mine, scramble
from kit.servers import new_bucket, serving
from kit.wrapping import Differs, Trained, adam, check_same, cpu
from parameterized import parameterized
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.storage.objects.s3 import S3Bucket
from fsdp_optim.testing import run_on_ranks

WRAPS = ("fairscale flat", "fairscale non-flat", "FSDP1 orig", "FSDP1 flat", "FSDP2", "HSDP", "FSDP2 x TP", "DDP")
SPLIT = {"FSDP2", "FSDP1 flat"}  # the wrappers whose checkpoints are split into several files
IN_BACKGROUND = {"FSDP2", "FSDP1 flat", "DDP"}

Options = dict[str, Any]


def save_all(root: str, options: Options) -> list[tuple[int, int]]:
    """Save every wrapper's model; what was saved in all, and by this rank."""
    found = []
    with cpu():
        for wrap in WRAPS:
            one = Trained(wrap, adam)
            asked: Options = {"process_group": one.process_group, "progress": False, "storage_options": options}
            asked |= {"extra": {"wrap": wrap}, "per_rank_extra": dist.get_rank(), "step": 3}
            asked |= {"max_file_size": 500} if wrap in SPLIT else {}
            url = f"{root}/{wrap.replace(' ', '-')}"
            if wrap in IN_BACKGROUND:
                handle = fsdp_optim.async_save(url, one.model, one.optim, **asked)
                scramble(one)
                saved = handle.wait()
            else:
                saved = fsdp_optim.save(url, one.model, one.optim, **asked)
            check_same("the place", saved.path, url)
            found.append((saved.nbytes, saved.nbytes_written))
    return found


def load_all(root: str, options: Options) -> None:
    """Load every wrapper's checkpoint into another wrapper, beside what training gave it."""
    with cpu():
        for source, wrap in zip(WRAPS, (*WRAPS[1:], WRAPS[0]), strict=True):
            expected, other = Trained(wrap, adam), Trained(wrap, adam, steps=0)
            scramble(other)
            asked: Options = {"process_group": other.process_group, "progress": False, "storage_options": options}
            url = f"{root}/{source.replace(' ', '-')}"
            restored = fsdp_optim.load(url, other.model, other.optim, check="bitwise", **asked)
            check_same(f"{source} into {wrap}", mine(other), mine(expected))
            check_same("extra", (restored["wrap"], restored.summary.step), (source, 3))
            check_same("per rank", restored.per_rank, dist.get_rank())


class TestServers(unittest.TestCase):
    options: dict[str, Options]

    @classmethod
    def setUpClass(cls) -> None:
        held = ExitStack()
        cls.addClassCleanup(held.close)
        cls.options = {kind: held.enter_context(serving(kind)) for kind in ("moto", "rclone")}  # type: ignore[arg-type]

    @parameterized.expand([("moto",), ("rclone",)])
    def test_four_ranks_save_and_others_load(self, kind: str) -> None:
        options = self.options[kind]
        name = new_bucket(options)
        root = f"s3://{name}/run"
        by_rank = run_on_ranks(save_all, 4, root, options)
        for wrap, its in zip(WRAPS, zip(*by_rank, strict=True), strict=True):
            self.assertEqual(sum(written for _, written in its), its[0][0], f"{wrap}: every byte is put once")
            self.assertGreater(sum(written > 0 for _, written in its), 1, f"{wrap}: the ranks share the work")
        for world_size in (3, 1):
            run_on_ranks(load_all, world_size, root, options)
        self.check_bucket(name, options)
        self.assertEqual(fsdp_optim.latest(root, storage_options=options), f"{root}/{WRAPS[-1]}")

    def check_bucket(self, name: str, options: Options) -> None:
        """Nothing is left but the files, which other tools open, and which are a folder's where they are copied."""
        bucket = S3Bucket(name, options)
        self.assertEqual(list(bucket.uploads("")), [])
        found = [one.key for one in bucket.list("")]
        self.assertEqual([key for key in found if "/." in key], [])
        with tempfile.TemporaryDirectory() as folder, cpu():
            for key in found:
                if key.startswith("run/HSDP/"):
                    path = Path(folder, key)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(bucket.read(key)[0])
            path = Path(folder, "run/HSDP")
            one, other = Trained("plain", adam), Trained("plain", adam, steps=0)
            weights = load_file(path / "model.safetensors")
            for fqn, weight in one.model.state_dict().items():
                if not torch.equal(weights[fqn], weight):
                    raise Differs(fqn)
            fsdp_optim.load(path, other.model, other.optim)
            check_same("a copy of the bucket is a folder", mine(other), mine(one))
