"""Fine-tune with Hugging Face's Trainer and FSDP2, save in the background, and resume at any number of ranks.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --root checkpoints --last 40
    torchrun --nproc-per-node 4 examples/hf_trainer.py --root checkpoints --last 80    # continues from step 40

The model is a tiny Llama that is made from a configuration, so nothing is downloaded. `--model` takes another one: a name
of the Hub, or a folder.
On CPUs the Trainer uses DDP instead of FSDP2. `from_pretrained` opens each `checkpoint-<step>`.
"""

from __future__ import annotations

import argparse
import os

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fsdp_optim.integrations.accelerate


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts of digits, where each digit is the sum of the two digits before it."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = [index % 10, index // 10 % 10]
        while len(text) < 16:
            text.append((text[-1] + text[-2]) % 10)
        return {"input_ids": torch.tensor(text), "labels": torch.tensor(text)}


def main(arguments: list[str] | None = None) -> int:
    """Train up to a step; returns the step that was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a folder that all ranks share")
    parser.add_argument("--last", type=int, default=40, help="the number of the last step")
    parser.add_argument("--every", type=int, default=10, help="save every so many steps")
    parser.add_argument("--model", help="a model of the Hub, or a folder of from_pretrained")
    asked = parser.parse_args(arguments)

    fsdp_optim.integrations.accelerate.enable(background=True)  # the only line that is not the Trainer's own

    on_gpu = torch.cuda.is_available()
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}} if on_gpu else {"use_cpu": True}
    training = TrainingArguments(
        output_dir=asked.root,
        max_steps=asked.last,
        save_steps=asked.every,
        save_total_limit=2,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **sharded,
    )
    transformers.set_seed(0)  # the same weights on all ranks
    if asked.model:
        model = AutoModelForCausalLM.from_pretrained(asked.model)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=10, **sizes))
    trainer = Trainer(model=model, args=training, train_dataset=Sums())
    newest = get_last_checkpoint(asked.root) if os.path.isdir(asked.root) else None
    trainer.train(resume_from_checkpoint=newest)
    if trainer.is_world_process_zero():
        begun = newest.rpartition("-")[2] if newest else "0"
        print(f"trained from step {begun} to step {trainer.state.global_step}", flush=True)
    return int(trainer.state.global_step)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
