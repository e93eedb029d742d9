"""torchtitan's own Trainer on CPU, with a small Llama, and stand-ins for the parts that it lacks there."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_optim
from kit.imports import stand_ins

STAND_INS = (
    "torch.utils.tensorboard",  # for figures of a training
    "datasets",  # texts; the tests have a loader of their own
    "datasets.distributed",
    "torchtitan.distributed.minimal_async_ep.kernels",  # kernels in Triton, which has a gigabyte
)


def import_torchtitan() -> None:
    """Import torchtitan's trainer for CPU, without packages that only training on GPUs, or real texts, need."""
    if "torchtitan.trainer" in sys.modules:
        return
    with stand_ins(*STAND_INS), mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        import torchtitan.trainer  # noqa: F401


class _NoMemoryMonitor:
    """torchtitan asks the GPU how much memory it uses."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def _step_of_batches(
    self: Any,
    *,
    arg_mbs: Any = None,
    kwarg_mbs: Any = None,
    target_mbs: Any = None,
    losses: Any = None,
    return_outputs: bool = True,
    loss_kwargs: Any = None,
) -> None:
    """A step of a pipeline's schedule with split batches, as torchtitan calls it; the step of torch 2.13 splits them itself."""
    for stage in getattr(self, "_stages", None) or [self._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


@contextmanager
def torchtitan_on_cpu() -> Iterator[None]:
    """A context in which torchtitan's Trainer trains on CPU, on the ranks that there are."""
    import_torchtitan()
    with (
        mock.patch("torchtitan.components.metrics.build_device_memory_monitor", _NoMemoryMonitor),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),  # by a barrier of GPUs
        mock.patch("torch.distributed.pipelining.schedules.PipelineScheduleSingle.step", _step_of_batches),
        mock.patch("torch.distributed.pipelining.schedules.PipelineScheduleMulti.step", _step_of_batches),
        mock.patch("torchtitan.trainer.time.sleep"),  # seconds for other ranks at the end
        mock.patch.dict("os.environ", {"LOCAL_RANK": str(dist.get_rank() if dist.is_initialized() else 0)}),
        mock.patch("gc.disable"),
    ):
        yield


def small_llama(vocabulary: int = 40, *, fuse_qkv: bool = False, num_layers: int = 2) -> Any:
    """torchtitan's Llama with two layers, or some more, and with an attention that CPUs have."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    dim, heads = 32, 4
    layers = llama3._build_llama3_layers(
        n_layers=num_layers,
        dim=dim,
        n_heads=heads,
        n_kv_heads=2,
        hidden_dim=44,
        rope=llama3.ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=10000, scaling="none"),
        attn_backend="varlen",
        fuse_qkv=fuse_qkv,
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()

    def parallelize(model: Any, **kwargs: Any) -> Any:
        model = llama3.parallelize_llama(model, **kwargs)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no sum with a factor
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec = llama3.model_registry("debugmodel")
    spec.parallelize_fn = parallelize
    spec.model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocabulary, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )
    return spec


def trainer_config(
    folder: Path,
    checkpoint: Any,
    *,
    steps: int,
    alike: bool = False,
    parallelism: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Any:
    """A training of `small_llama`. `alike`: all ranks have the same batches, so that their number does not matter."""
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    class Tokens(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        """Random tokens, with a state."""

        def __init__(self, seed: int) -> None:
            self.num_drawn, self._generator = 0, torch.Generator().manual_seed(seed)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                self.num_drawn += 1
                tokens = torch.randint(0, 40, (9,), generator=self._generator)
                yield {"input": tokens[:-1]}, tokens[1:]

        def state_dict(self) -> dict[str, Any]:
            return {"num_drawn": self.num_drawn, "generator": self._generator.get_state()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.num_drawn = state["num_drawn"]
            self._generator.set_state(state["generator"])

    class TokenLoader(ParallelAwareDataloader):
        """torchtitan's loader with these tokens."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            alike: bool = False

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            tokens = Tokens(7 if config.alike else 100 + dp_rank)
            place = (
                (0, 1) if config.alike else (dp_rank, dp_world_size)
            )  # torchtitan's loader refuses another number of ranks
            super().__init__(tokens, *place, batch_size=local_batch_size)

    class NoTokenizer(BaseTokenizer):
        """The tokens are numbers already."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 40

    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    groups = [("norm", "Adam", {**adam, "weight_decay": 0.0}), (".*", "AdamW", adam)]
    return Trainer.Config(
        model_spec=small_llama(**spec),
        hf_assets_path=str(folder / "assets"),
        dump_folder=str(folder),
        tokenizer=NoTokenizer.Config(),
        dataloader=TokenLoader.Config(alike=alike),
        loss=CrossEntropyLoss.Config(),
        optimizer=OptimizersContainer.Config(
            implementation="for-loop",
            param_groups=[
                ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=kwargs)
                for pattern, name, kwargs in groups
            ],
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=8,
            steps=steps,
            max_norm=1e9,  # norms of gradients depend on the number of ranks
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **(parallelism or {})),
        metrics=MetricsProcessor.Config(log_freq=1000),
        activation_checkpoint=None,
        checkpoint=checkpoint,
    )


def everything(trainer: Any) -> dict[str, Any]:
    """All that two trainings must have in common, of all ranks together."""
    parts, optims = trainer.model_parts, [*trainer.optimizers.optimizers]
    full = fsdp_optim.gather_full_optim_state_dict(parts, optims, recipient_rank=None, key_by="name")
    assert full is not None
    return {
        "model": fsdp_optim.gather_full_model_state_dict(parts, recipient_rank=None),
        "state": full["state"],
        "lr": [group["lr"] for optim in optims for group in optim.param_groups],
        "scheduler": trainer.lr_schedulers.state_dict(),
        "step": trainer.step,
        "tokens": trainer.ntokens_seen,
        "num_drawn": trainer.dataloader.dataset.num_drawn,  # which a load changes when the loader is next used
        "random": [random.random(), torch.rand(3)],
    }


@contextmanager
def trainer_of(
    folder: Path, steps: int, *, alike: bool = False, spec: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """torchtitan's Trainer with this library's manager, and closed at the end as torchtitan does it."""
    with torchtitan_on_cpu():
        from fsdp_optim.integrations.torchtitan import FsdpOptimCheckpointManager

        options = {"enable": True, "interval": 2, "last_save_model_only": False, "durable": False, **options}
        config = trainer_config(
            folder, FsdpOptimCheckpointManager.Config(**options), steps=steps, alike=alike, **(spec or {})
        )
        trainer = config.build()
        try:
            yield trainer
        except Exception:
            trainer.close()
            raise
        trainer.close()


def trained(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    with trainer_of(folder, steps, **options) as trainer:
        trainer.train()
        trainer.checkpointer.maybe_wait_for_saving()
        return everything(trainer)


def without(mapping: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}
