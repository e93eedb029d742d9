"""verl's own FSDP engine on CPU, with a small Llama, and stand-ins for the parts that it lacks there."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from kit.imports import stand_ins

STAND_INS = ("ray", "ray.util", "ray.actor", "datasets", "datasets.distributed", "pandas", "pyarrow")
"""verl's clusters, and its tables of prompts. `import verl` imports them."""


def import_verl() -> None:
    """Import verl's FSDP engine, without packages that only its clusters and its data need."""
    if "verl.workers.engine.fsdp.transformer_impl" not in sys.modules:
        with stand_ins(*STAND_INS):
            import verl.workers.engine.fsdp.transformer_impl  # noqa: F401


@contextmanager
def verl_on_cpu() -> Iterator[None]:
    """A context in which verl's FSDP engine trains on CPU: verl has a registry of platforms, and none that is a CPU."""
    import_verl()
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        """A platform whose only device is the CPU."""

        device_name = "cpu"
        device_module = types.SimpleNamespace(
            **vars(torch.cpu),
            empty_cache=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
        )

        def is_available(self) -> bool:
            return False

        def current_device(self) -> Any:
            return torch.device("cpu")

        def empty_cache(self) -> None:
            pass

    class OnCpu(FSDP):
        """FSDP1, which sends weights to the other ranks from GPUs only: here all ranks have them."""

        def __init__(self, module: Any, *args: Any, sync_module_states: bool = False, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)

    engine = "verl.workers.engine.fsdp.transformer_impl"
    with (
        mock.patch.object(platform_manager, "_current_platform", Cpu()),
        mock.patch(f"{engine}.device_name", "cpu"),
        mock.patch(f"{engine}.load_fsdp_model_to_gpu"),  # all is on the CPU
        mock.patch(f"{engine}.FSDP", OnCpu),
        mock.patch(f"{engine}.get_init_weight_context_manager", return_value=nullcontext),
    ):
        yield


def small_llama_folder(folder: str | Path) -> None:
    """A pretrained model of transformers, for verl to begin with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def engine_of(model: str | Path, strategy: str, checkpoint: Mapping[str, Any] | None = None, **lora: Any) -> Any:
    """verl's engine, made as its workers make it: the config imports `external_lib`, and the engine makes the manager."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    external_lib = lora.pop("external_lib", "fsdp_optim.integrations.verl")
    model_config = HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        external_lib=external_lib,
        override_config={"attn_implementation": "eager"},
        enable_gradient_checkpointing=False,
        use_remove_padding=False,
        **lora,
    )
    engine = FSDPEngineWithLMHead(  # which verl's registry has for GPUs
        model_config=model_config,
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            use_orig_params=True,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=10, lr_scheduler_type="cosine", clip_grad=1e9
        ),
        checkpoint_config=CheckpointConfig(**(checkpoint or {})),
    )
    engine.initialize()
    return engine
