"""The start of a run with Accelerate and FSDP2 from a Hugging Face folder: Accelerate's own, and `weights_from`.

    python benchmarks/starts.py [--layers 12] [--width 1024] [--worlds 2 4] [--rounds 3]

A Llama in bfloat16, which Accelerate trains with float32 parameters (mixed_precision="bf16"): `from_pretrained`, an AdamW, and
`accelerator.prepare`. Each start has processes of its own, which have started a tiny model before: everything is imported. "Most
MiB": the highest resident size of a rank, over that before.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.hugging_face import on_cpu
from kit.pretrained import transformers
from measure import peak, reset_peak

from fsdp_optim.testing import RankPool

WHO = ("Accelerate", "weights_from")


def start(folder: str, tiny: str, who: str) -> tuple[float, float]:
    """Seconds of a start, and MiB of this rank, after the start of a tiny model."""
    _start(tiny, who)
    return _start(folder, who)


def _start(folder: str, who: str) -> tuple[float, float]:
    import accelerate

    from fsdp_optim.integrations.accelerate import weights_from

    package = transformers()
    torch.set_num_threads(1)
    with on_cpu("FSDP2"):
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
        )
        loop = accelerate.Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
        package.AutoConfig.from_pretrained(folder)
        dist.barrier()
        reset_peak()
        before, begun = peak(), time.perf_counter()
        with weights_from(folder) if who == "weights_from" else contextlib.nullcontext():
            model = package.AutoModelForCausalLM.from_pretrained(folder)
            loop.prepare(model, torch.optim.AdamW(model.parameters()))
        dist.barrier()
        return time.perf_counter() - begun, (peak() - before) / (1 << 20)


def make(folder: str, layers: int, width: int) -> int:
    """A folder with a model of random weights, and its size in bytes."""
    package = transformers()
    config = package.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    package.LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="300MB")
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny:
        make(tiny, 1, 64)
        print(f"{make(folder, asked.layers, asked.width) / (1 << 20):.0f} MiB of bfloat16")
        for world in asked.worlds:
            seen: dict[str, list[tuple[float, float]]] = {who: [] for who in WHO}
            for _ in range(asked.rounds):
                for who in random.sample(WHO, len(WHO)):
                    with RankPool() as pool:
                        results = pool.run(start, world, folder, tiny, who, timeout=600)
                    seen[who].append((max(seconds for seconds, _ in results), max(mib for _, mib in results)))
            for who, values in seen.items():
                seconds, mib = zip(*values, strict=True)
                spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
                rows.append([f"{world} ranks", who, f"{statistics.median(seconds):.2f}", spread, f"{max(mib):.0f}"])
    print(
        tabulate(rows, ["start", "who", "median s", "range s", "most MiB on a rank"], "github", disable_numparse=True)
    )


if __name__ == "__main__":
    main()
