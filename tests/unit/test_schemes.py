"""Schemes of third parties, and the sizes of parts."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any

import torch
from kit.compare import check_same, error_text
from kit.installed import installed
from kit.options import as_options
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectStore
from fsdp_optim.plugins import use_stores
from fsdp_optim.registry import STORES
from fsdp_optim.storage.base import Capabilities, CheckpointProbe, Store

MEMORY = Memory()


def open_store(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> Store:
    """A scheme whose objects are in the memory of this process."""
    return ObjectStore(MemoryBucket(MEMORY, name="mine://x"), url.removeprefix("mine://x/"), probe, **options)


def save_and_load() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    asked: dict[str, Any] = {"storage_options": {"part_nbytes": 100}}
    for step in (1, 2):
        fsdp_optim.save(
            f"mine://x/run/step-{step}",
            model,
            step=step,
            state={"step": step},
            overwrite=True,
            **as_options(fsdp_optim.SaveOptions, **asked),
        )
    newest = fsdp_optim.latest("mine://x/run", **asked)
    check_same("newest", newest, "mine://x/run/step-2")
    restored = fsdp_optim.load(str(newest), other, **as_options(fsdp_optim.LoadOptions, **asked))
    check_same("loaded", (restored.state["step"], other.weight), (2, model.weight))
    handle = fsdp_optim.async_save("mine://x/run/step-3", model, **as_options(fsdp_optim.SaveOptions, **asked))
    check_same("in the background", handle.wait().path, "mine://x/run/step-3")


class SchemeTest(unittest.TestCase):
    def setUp(self) -> None:
        MEMORY.delete([key for key, *_ in MEMORY.listed("")])

    def test_a_program_handles_a_scheme(self) -> None:
        with use_stores({"MINE": open_store}):
            save_and_load()
        kind, text = error_text(lambda: fsdp_optim.latest("mine://x/run"))
        self.assertEqual(kind, "CheckpointError")
        self.assertIn("mine", text)

    def test_an_installed_package_handles_a_scheme(self) -> None:
        with installed(STORES, mine=f"{__name__}:open_store"):
            save_and_load()

    def test_a_package_that_cannot_be_loaded(self) -> None:
        with installed(STORES, mine="kit.no_such_module:open_store"):
            kind, text = error_text(lambda: fsdp_optim.latest("mine://x/run"))
        self.assertEqual(kind, "CheckpointError")
        for words in ("mine://", "kit.no_such_module"):
            self.assertIn(words, text)

    def test_a_bucket_without_a_name_in_it(self) -> None:
        with use_stores({"mine": open_store}):
            kind, text = error_text(lambda: fsdp_optim.load("mine://x/", torch.nn.Linear(3, 2)))
        self.assertEqual(kind, "CheckpointError", text)

    @parameterized.expand([(1, 8), (80_000, 8), (80_001, 16), (160_001, 32)])
    def test_parts_grow_where_there_would_be_too_many(self, nbytes: int, expected: int) -> None:
        """Doubled, so that every rank finds the same size; no file has more than 10,000 parts."""
        size = Capabilities("parts", renames=False, part_nbytes=8, most_parts=10_000).part_nbytes_of(nbytes)
        self.assertEqual(size, expected)
        self.assertLessEqual(-(-nbytes // size), 10_000)


if __name__ == "__main__":
    unittest.main()
