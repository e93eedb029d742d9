"""Paths that are no folders: unknown schemes are refused by name, `~` is the home folder; and lists of no optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kit.compare import check_refused, check_same, error_text
from kit.described import training_here
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_threads

CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: fsdp_optim.save(path, nn.Linear(3, 2), options=fsdp_optim.SaveOptions(durable=False)),
    "async_save": lambda path: fsdp_optim.async_save(
        path, nn.Linear(3, 2), options=fsdp_optim.SaveOptions(durable=False)
    ).wait(60),
    "load": lambda path: fsdp_optim.load(path, nn.Linear(3, 2)),
    "load without a model": fsdp_optim.load,
    "latest": fsdp_optim.latest,
}
URLS = {  # and the words of the error
    "nosuch://bucket/x": ("nosuch",),
    "gs://bucket/x": ("gcsfs",),
    "abfs://c@a.dfs.core.windows.net/x": ("adlfs",),
    "s3:///x": ("s3://",),
    Path("s3://bucket/x"): ("str", "s3://"),
    "s3:/bucket/x": ("str", "s3://"),
}


def refused_on_ranks(path: str) -> tuple[str, str]:
    with training_here() as trained:
        return error_text(
            lambda: fsdp_optim.save(
                path, trained.model, trained.optim, options=fsdp_optim.SaveOptions(durable=False, timeout=30.0)
            )
        )


def no_optimizers(root: Path) -> list[tuple[str, str]]:
    with training_here() as trained:
        fsdp_optim.save(root / "good", trained.model, trained.optim, options=fsdp_optim.SaveOptions(durable=False))
        calls: list[Callable[[], Any]] = [
            lambda: fsdp_optim.save(root / "step-1", trained.model, [], options=fsdp_optim.SaveOptions(durable=False)),
            lambda: fsdp_optim.async_save(
                root / "step-1", trained.model, (), options=fsdp_optim.SaveOptions(durable=False)
            ),
            lambda: fsdp_optim.load(root / "good", trained.model, []),
            lambda: fsdp_optim.gather_full_optim_state_dict(trained.model, []),
        ]
        return [error_text(call) for call in calls]


class SchemeTest(InFolder):
    def setUp(self) -> None:
        super().setUp()
        was = os.getcwd()
        self.addCleanup(os.chdir, was)
        os.chdir(self.root)

    @parameterized.expand([(what, call, url) for what, call in CALLS.items() for url in URLS])
    def test_a_url_is_refused_by_its_scheme(self, what: str, call: Callable[[Any], Any], url: Any) -> None:
        kind, text = error_text(lambda: call(url))
        check_same("kind", kind, "CheckpointError")
        for word in (str(url).split(":")[0], *URLS[url]):
            self.assertIn(word, text)
        self.check_only()

    def test_options_of_a_path(self) -> None:
        kind, text = error_text(
            lambda: fsdp_optim.load("run/step-1", options=fsdp_optim.LoadOptions(storage_options={"region_name": "x"}))
        )
        check_same("kind", kind, "CheckpointError")
        self.assertIn("storage_options", text)

    def test_on_all_ranks(self) -> None:
        errors = run_on_threads(refused_on_ranks, 2, "nosuch://bucket/x")
        check_refused("a URL", errors, "CheckpointError", "nosuch")

    def test_a_folder_that_is_called_so(self) -> None:
        for name in ("./s3:/x", "a:b/x", "1:/x", "./~/x"):
            CALLS["save"](name)
            CALLS["load"](name)
        self.check_only("s3:", "a:b", "1:", "~")

    @parameterized.expand(("save", "async_save"))
    def test_home(self, what: str) -> None:
        home = self.root / "home"
        home.mkdir()
        with mock.patch.dict(os.environ, {"HOME": str(home)}):
            for path in ("~/run/step-1", Path("~/run/step-2")):
                CALLS[what](path)
                CALLS["load"](path)
                CALLS["load without a model"](path)
            check_same("latest", CALLS["latest"]("~/run"), home / "run" / "step-2")
        self.check_only("home")
        check_same("there", sorted(path.name for path in (home / "run").iterdir()), ["step-1", "step-2"])

    @parameterized.expand(CALLS.items())
    def test_nobodys_home(self, what: str, call: Callable[[Any], Any]) -> None:
        kind, text = error_text(lambda: call("~nobody at all/x"))
        check_same("kind", kind, "CheckpointError")
        self.assertIn("~nobody at all/x", text)
        self.check_only()


class NoOptimizerTest(InFolder):
    def test_an_empty_list_is_refused(self) -> None:
        """It would save a checkpoint with an optimizer that has no state."""
        by_rank = run_on_threads(no_optimizers, 2, self.root)
        for errors in zip(*by_rank, strict=True):
            check_refused("no optimizer", errors, "WrapperError", "optim", "None")
        self.check_only("good")
