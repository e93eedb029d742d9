"""Make `checkpoints.tar.xz`, small checkpoints that DeepSpeed itself writes on CPU: see README.md beside this file.

`oracle.safetensors` has the weights and moments of the same training without DeepSpeed, `kit.zero_runs.oracle()`. They are
compared here with what the live engine of every run says about its parameters, and with what DeepSpeed's zero_to_fp32 reads.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from kit.zero_runs import STEPS, Model, optimizer, oracle  # noqa: E402

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_GRADS: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 100}}
FP16_STATIC: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 8.0}}

RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # name: (world size, zero_optimization, other settings)
    "z1-w1-fp32": (1, {"stage": 1}, {}),
    "z1-w2-bf16": (2, {"stage": 1}, BF16),  # written by DeepSpeed's BF16_Optimizer
    "z1-w3-fp16": (3, {"stage": 1}, FP16_STATIC),
    "z1-w4-bf16": (4, {"stage": 1}, BF16_GRADS),
    "z2-w1-bf16": (1, {"stage": 2}, BF16),
    "z2-w2-fp32": (2, {"stage": 2, "round_robin_gradients": True}, {}),
    "z2-w3-aligned": (3, {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}, BF16),
    "z2-w4-fp16": (4, {"stage": 2, "round_robin_gradients": True}, FP16),
    "z2-w2-elastic": (2, {"stage": 2, "elastic_checkpoint": True}, BF16),
    "z3-w1-bf16": (1, {"stage": 3}, BF16),
    "z3-w2-groups": (2, {"stage": 3, "sub_group_size": 12}, BF16),
    "z3-w3-fp32": (3, {"stage": 3, "sub_group_size": 12}, {}),
    "z3-w4-fp16": (4, {"stage": 3}, FP16),
    "z0-w2-fp32": (2, {"stage": 0}, {}),
    "z0-w1-bf16": (1, {"stage": 0}, BF16_GRADS),
}
UNIVERSAL = ("z1-w2-bf16", "z1-w4-bf16", "z2-w2-fp32", "z2-w3-aligned", "z3-w3-fp32")  # that of z2-w2-fp32 is wrong


def train(folder: str, name: str) -> None:
    """One rank of one run of DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed(dist_backend="gloo")
    world_size, zero, settings = RUNS[name]
    model = Model()
    config = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **settings,
    }
    optim = optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optim, lr_scheduler=schedule, config=config)
    for step in range(STEPS):
        engine.backward(engine(2.0**-step))
        engine.step()
    expected = load_file(f"{folder}/oracle.safetensors")
    for key, param in engine.module.named_parameters():
        if zero["stage"] < 3 and (zero["stage"] or not settings):
            check(f"{name}: {key}", param, expected[key].to(param.dtype).float())
        elif zero["stage"] == 3 and param.requires_grad:
            check(f"{name}: {key}", safe_get_full_fp32_param(param), expected[key])
            for value in ("exp_avg", "exp_avg_sq"):
                got = safe_get_full_optimizer_state(param, value)
                check(f"{name}: {key}: {value}", got, expected[f"state.{key}.{value}"])
    engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 4, "args": Namespace(seed=1)})


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got.detach().cpu().float().reshape(expected.shape), expected):
        raise SystemExit(f"{what} differs from the training without DeepSpeed: {got} is not {expected}")


def launch(folder: Path, name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    world_size = RUNS[name][0]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), name],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{name} failed")


def make_universal(folder: Path, name: str) -> None:
    """Convert by DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    tag = f"global_step{STEPS}"
    ds_to_universal.main(
        Namespace(
            input_folder=f"{folder}/{name}/{tag}",
            output_folder=f"{folder}/{name}-universal/{tag}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def check_by_zero_to_fp32(folder: Path, name: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = load_file(f"{folder}/oracle.safetensors")
    weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}")
    for key in (key for key in expected if not key.startswith("state.")):
        if key in weights:
            check(f"{name}: zero_to_fp32: {key}", weights[key], expected[key])


def main() -> None:
    import deepspeed

    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "made")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(oracle(), folder / "oracle.safetensors")
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    (folder / "versions.json").write_text(json.dumps(versions))
    for name, (_, zero, settings) in RUNS.items():
        launch(folder, name)
        if zero["stage"] > 1 or (zero["stage"] and settings is not BF16):  # it does not read what BF16_Optimizer writes
            check_by_zero_to_fp32(folder, name)
    for name in UNIVERSAL:
        make_universal(folder, name)
    for script in [*folder.rglob("zero_to_fp32.py"), *folder.rglob("zero_to_torch.py")]:
        script.unlink()
    with tarfile.open(HERE / "checkpoints.tar.xz", "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".", filter=without_owner)


def without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_BUILD_OPS", "0")
    if len(sys.argv) == 3:
        train(sys.argv[1], sys.argv[2])
    else:
        main()
