"""TRL's own SFTTrainer and DPOTrainer resume by this library at another number of ranks.

Needs trl and datasets, which are no part of `make venv`, because verl 0.9.1 fails beside trl 1: install both elsewhere, and run
this file alone there.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
from kit.compare import check_same
from kit.hugging_face import train
from parameterized import parameterized

from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "datasets")), reason="trl and datasets are not here"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(31)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2", unk_token="w0")


def texts(num: int) -> list[list[int]]:
    return [[3 + (5 * row + 7 * column) % 28 for column in range(6)] for row in range(num)]


def table(columns: dict[str, Any]) -> Any:
    """A data set of these columns."""
    import datasets
    import pyarrow

    return datasets.Dataset(pyarrow.table(columns), fingerprint="texts")


def sft(package: Any) -> Any:
    """A maker of SFTTrainers, in the place of `transformers.Trainer`."""
    import trl

    def make(*, model: Any, args: Any, callbacks: Any, **_: Any) -> Any:
        data = table({"input_ids": texts(48)})
        return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)

    return make


def dpo(package: Any) -> Any:
    """A maker of DPOTrainers, with a reference model of their own."""
    import trl

    def make(*, model: Any, args: Any, callbacks: Any, **_: Any) -> Any:
        words = [" ".join(f"w{token}" for token in text) for text in texts(48)]
        data = table({"prompt": words, "chosen": words[::-1], "rejected": [*words[1:], words[0]]})
        names = (
            "learning_rate",
            "max_steps",
            "save_steps",
            "save_strategy",
            "output_dir",
            "fsdp",
            "fsdp_config",
            "use_cpu",
        )
        kept = {name: getattr(args, name) for name in names}
        config = trl.DPOConfig(
            **kept, report_to=[], per_device_train_batch_size=args.per_device_train_batch_size, logging_steps=1
        )
        reference = copy.deepcopy(model)
        return trl.DPOTrainer(
            model, reference, config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
        )

    return make


MAKERS = {"SFT": sft, "DPO": dpo}


def run(which: str, kind: str, folder: Path, resume: str | None) -> dict[str, Any]:
    return train(kind, folder, {}, resume=resume, seed=0 if resume is None else 1, base=MAKERS[which])


class TrlTest(unittest.TestCase):
    @parameterized.expand([("SFT", "FSDP2", "DDP"), ("SFT", "DDP", "FSDP2"), ("DPO", "DDP", "DDP")])
    def test_a_trainer_of_trl_resumes(self, which: str, saved: str, resumed: str) -> None:
        with tempfile.TemporaryDirectory() as root:
            wanted = run_on_ranks(run, 2, which, saved, Path(root, "one"), None)[0]
            states = run_on_ranks(run, 3, which, resumed, Path(root, "two"), f"{root}/one/checkpoint-2")
            for state in states:
                check_same("resumed", state["begun"], wanted["second"])


if __name__ == "__main__":
    unittest.main()
