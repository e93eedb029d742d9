"""A training loop with a real Accelerator, as its users write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from kit.hugging_face import enabled, on_cpu, state_of, tiny_llama
from kit.pretrained import transformers


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def with_lora(model: Any, seed: int = 0) -> Any:
    """The model with adapters of PEFT, whose values depend on the seed; the base is frozen."""
    import peft

    torch.manual_seed(20 + seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


class Loop:
    """A training loop as users of Accelerate write it. Inside `on_cpu`. `adapters`: only those of PEFT train."""

    def __init__(self, kind: str, seed: int = 0, scaler: bool = False, adapters: bool = False, **options: Any) -> None:
        import accelerate

        transformers()
        if kind.startswith("FSDP"):
            options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=int(kind[-1]),
                state_dict_type="SHARDED_STATE_DICT",
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                sync_module_states=False,
                **({"use_orig_params": True} if adapters and kind == "FSDP1" else {}),
            )
        self.accelerator = accelerate.Accelerator(cpu=not kind.startswith("FSDP"), **options)
        if scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        model = with_lora(tiny_llama(seed), seed) if adapters else tiny_llama(seed)
        if kind == "FSDP1":  # makes other parameters, which an optimizer must get
            model = self.accelerator.prepare(model)
        optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
        sched = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
        if kind != "FSDP1":
            model, optim, sched = self.accelerator.prepare(model, optim, sched)
        else:
            optim, sched = self.accelerator.prepare(optim, sched)
        self.model, self.optim, self.sched = model, optim, sched
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(10 + dist.get_rank())

    def step(self) -> float:
        batch = torch.randint(0, 31, (2, 6))
        loss = self.model(input_ids=batch, labels=batch).loss
        self.accelerator.backward(loss)
        self.optim.step()
        self.sched.step()
        self.optim.zero_grad()
        self.counter.number += 1
        return float(loss)

    @property
    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optim.optimizer)

    @property
    def rest(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        scale = None if scaler is None else dict(scaler.state_dict())
        return {"lr": self.optim.param_groups[0]["lr"], "number": self.counter.number, "scale": scale}


def load_and_go_on(
    kind: str, folder: str, settings: Any, scaler: bool, steps: int = 2, adapters: bool = False
) -> dict[str, Any]:
    with on_cpu(kind), enabled(settings):
        loop = Loop(kind, seed=1, scaler=scaler, adapters=adapters)
        loop.accelerator.load_state(folder)
        third, rest = loop.state, loop.rest
        losses = [loop.step() for _ in range(steps)]
        return {"third": third, "rest of third": rest, "losses": losses, "end": loop.state, "rest": loop.rest}
