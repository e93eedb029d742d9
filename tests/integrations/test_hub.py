"""`push_to_hub` of a real Trainer, with a Hub that keeps what it is given: folders are complete when they are uploaded."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import check_same
from kit.hugging_face import enabled, on_cpu, state_of, trainer_of
from kit.pretrained import transformers

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


class Hub:
    """The Hub's API, which copies each folder at the moment of its upload."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uploads: list[tuple[str, str]] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path: str, path_in_repo: str = "", run_as_future: bool = False, **_: Any) -> Any:
        copy = self.root / str(len(self.uploads))
        shutil.copytree(folder_path, copy)
        self.uploads.append((path_in_repo, str(copy)))
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None


def pushed(kind: str, root: str, background: bool) -> dict[str, Any]:
    """Train with a push of every checkpoint, then push the final model."""
    import transformers.trainer

    weights: dict[int, Any] = {}

    class Keep(transformers.TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights[state.global_step] = state_of(self.trainer.model_wrapped, self.trainer.optimizer.optimizer)[
                "weights"
            ]

    hub, keep = Hub(Path(root, "hub")), Keep()
    options = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_token": "none", "save_total_limit": 1}
    with (
        on_cpu(kind),
        enabled({"background": background}),
        mock.patch.object(transformers.trainer, "hf_api", return_value=hub),
        mock.patch.object(transformers.Trainer, "create_model_card"),
    ):
        keep.trainer = trainer_of(kind, f"{root}/run", callbacks=[keep], **options)
        keep.trainer.train()
        keep.trainer.push_to_hub()
        keep.trainer.save_model()  # which pushes too
    return {"uploads": hub.uploads if dist.get_rank() == 0 else [], "weights": weights}


class HubTest(unittest.TestCase):
    def test_what_is_uploaded_is_complete(self) -> None:
        opened = transformers().AutoModelForCausalLM.from_pretrained
        for background in (True, False):
            root = tempfile.mkdtemp()
            self.addCleanup(shutil.rmtree, root)
            done = run_on_ranks(pushed, 2, "FSDP2", root, background)[0]
            places = [place for place, _ in done["uploads"]]
            self.assertEqual(places, ["", "checkpoint-2", "", "checkpoint-4", "", ""])
            for (place, copy), step in zip(done["uploads"], (2, 2, 4, 4, 4, 4), strict=True):
                check_same(f"{place} of step {step}", dict(opened(copy).state_dict()), done["weights"][step])
                if place:
                    self.assertTrue(Path(copy, "trainer_state.json").is_file())
                    self.assertEqual(fsdp_optim.inspect(copy).step, step)
                    fsdp_optim.verify(copy)
