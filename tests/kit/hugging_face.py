"""Real Accelerators and Trainers on CPU ranks, with a tiny Llama that is made from a configuration."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import fsdp_optim
from fsdp_optim import SaveOptions
from fsdp_optim.integrations import accelerate as plugin
from kit.pretrained import SIZES, transformers

GLOBAL_BATCH = 6  # the same samples in each step on 1, 2 and 3 ranks
KINDS = ("DDP", "FSDP2", "FSDP1")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def on_cpu(kind: str) -> Iterator[None]:
    """Let Accelerate find its ranks, and FSDP among them.

    Accelerate offers FSDP to processes with accelerators only, so this says that the ranks have GPUs, whose device is the CPU.
    For DDP it needs the variables that a launcher sets.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    rank, size = (str(dist.get_rank()), str(num_ranks())) if dist.is_initialized() else ("0", "1")
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
    }
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    as_if = {
        "none": (None, DistributedType.NO),
        "DDP": ("gloo", DistributedType.MULTI_CPU),
        "FSDP1": ("gloo", DistributedType.MULTI_GPU),
        "FSDP2": ("gloo", DistributedType.MULTI_GPU),
    }[kind]

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(PartialState, "_prepare_backend", return_value=as_if),
        mock.patch.dict(PartialState._shared_state),
    ):
        reset()
        try:
            yield
        finally:
            reset()


QUIET = SaveOptions(durable=False, progress=False)


@contextlib.contextmanager
def enabled(settings: Mapping[str, Any] | None) -> Iterator[None]:
    """The plug-in with these settings inside the block; None: without the plug-in."""
    if settings is not None:
        plugin.enable(**{"save_options": QUIET, **settings})
    try:
        yield
    finally:
        plugin.disable()
        with contextlib.suppress(fsdp_optim.FsdpOptimError):
            fsdp_optim.wait_for_saves()


def tiny_llama(seed: int = 0, **options: Any) -> Any:
    """Dropout makes the losses depend on the random states."""
    package = transformers()
    torch.manual_seed(seed)
    config = package.LlamaConfig(**SIZES, num_key_value_heads=1, attention_dropout=0.2, **options)
    return package.LlamaForCausalLM(config)


def samples(number: int = 48) -> list[dict[str, Any]]:
    """Texts of random tokens."""
    texts = torch.randint(0, SIZES["vocab_size"], (number, 6), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": text, "labels": text} for text in texts]


def state_of(model: Any, optim: Any) -> dict[str, Any]:
    """The weights and the optimizer's state on every rank, as if there were no wrapper."""
    return {
        "weights": dict(fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)),
        "state": fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")["state"],
    }


def trainer_of(
    kind: str, folder: str | Path, base: Callable[[Any], Any] = lambda package: package.Trainer, **options: Any
) -> Any:
    """A Trainer inside `on_cpu`. Options are those of TrainingArguments, `callbacks`, `state_dict_type` and `model`."""
    package = transformers()
    importlib.import_module("transformers.trainer")
    callbacks, model = options.pop("callbacks", None), options.pop("model", None)
    kept = options.pop("state_dict_type", "SHARDED_STATE_DICT")
    if kind.startswith("FSDP"):
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": int(kind[-1]),
            "state_dict_type": kept,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "sync_module_states": "false",  # FSDP1 broadcasts only where there are GPUs
        }
    if kind == "DDP":
        options["ddp_find_unused_parameters"] = False
    arguments = package.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=GLOBAL_BATCH // num_ranks(),
        per_device_eval_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **{"max_steps": 4, "save_steps": 2, "learning_rate": 0.01, **options},
    )
    model = model if model is not None else tiny_llama()
    data = samples()
    return base(package)(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)


def losses_of(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def probe() -> Any:
    """A callback that keeps the state of the model and the optimizer when training begins, and after step 2."""

    class Probe(transformers().TrainerCallback):
        def __init__(self) -> None:
            self.trainer: Any = None
            self.begun: Any = None
            self.second: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                self.begun = self.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                self.second = self.now()

        def now(self) -> dict[str, Any]:
            return state_of(self.trainer.model_wrapped, self.trainer.optimizer.optimizer)

    return Probe()


def train(
    kind: str,
    folder: str | Path,
    settings: Mapping[str, Any] | None,
    resume: str | bool | None = None,
    seed: int = 0,
    base: Callable[[Any], Any] = lambda package: package.Trainer,
    model: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank, from the beginning or from a checkpoint. `seed` of the weights, which a resume does not depend on."""
    random.seed(1)
    np.random.seed(1)
    with on_cpu(kind), enabled(settings):
        seen = probe()
        callbacks = [seen, *options.pop("callbacks", [])]
        trainer = trainer_of(
            kind, folder, base, model=model if model is not None else tiny_llama(seed), callbacks=callbacks, **options
        )
        seen.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        end = state_of(trainer.model_wrapped, trainer.optimizer.optimizer)
        best = trainer.state.best_model_checkpoint
        return {"losses": losses_of(trainer), "end": end, "begun": seen.begun, "second": seen.second, "best": best}
