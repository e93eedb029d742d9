"""DeepSpeed's own engine on ranks of this machine: a program that resumes from universal checkpoints, and compares every value.

    python tests/kit/deepspeed_engine.py cases.json 2 3

For each world size, the ranks are forked from a process that has imported DeepSpeed once. The expectation of a case is a file of
`torch.save` that neither DeepSpeed nor this library has made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".deepspeed"
"""Where `make test-all` puts DeepSpeed: in no site-packages, because other libraries change what they do where they find it."""


def why_not() -> str:
    """Why DeepSpeed cannot be used; empty if it can."""
    if (FOLDER / "deepspeed").is_dir() or importlib.util.find_spec("deepspeed") is not None:
        return ""
    return "DeepSpeed 0.19 is not installed: `make deepspeed` puts it beside the tests"


def run_engines(file: Path, world_sizes: Sequence[int]) -> None:
    """Run this program in a process of its own. Raises AssertionError with what the ranks say."""
    paths = [str(path) for path in (ROOT, ROOT / "tests", FOLDER) if path.is_dir()]
    settings = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, str(file), *map(str, world_sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise AssertionError(f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def check(what: str, got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        got, expected = got.detach().float().reshape(expected.shape), expected.float()
        is_equal = torch.equal(got, expected)
    else:
        is_equal = got == expected
    if not is_equal:
        raise AssertionError(f"{what} is {got}, not {expected}")


def resume(case: dict[str, Any], world_size: int) -> None:
    """Resume from the checkpoint of one case, compare all weights, moments and steps, and train on."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from kit import zero_runs

    expected = torch.load(case["expected"])
    model = zero_runs.Model()
    model.unused = zero_runs.Leaf(weight=(3, 2)) if case["has_unused"] else None
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optim = zero_runs.optimizer(model) if case["groups"] == 2 else one_group(model)
    config = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": case["zero"],
        "checkpoint": {"load_universal": True},
        **case["settings"],
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optim, config=config)
    path = Path(case["folder"])
    at = (str(path), None) if case["by_latest"] else (str(path.parent), path.name)
    _, client = engine.load_checkpoint(at[0], tag=at[1])
    check("the step", engine.global_steps, zero_runs.STEPS)
    check("the trainer's values", client.get("epoch"), 4)
    of_fqn = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    check("the parameters", [*of_fqn], [*expected["state"]])
    for fqn, param in of_fqn.items():
        check(fqn, safe_get_full_fp32_param(param), expected["weights"][fqn])
        for name in ("exp_avg", "exp_avg_sq"):
            check(f"{fqn}: {name}", safe_get_full_optimizer_state(param, name), expected["state"][fqn][name])
    for flat, values in engine.optimizer.optimizer.state.items():
        check(f"the step of {tuple(flat.shape)}", float(values["step"]), float(zero_runs.STEPS))
    groups = [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in optim.param_groups]
    check("the hyperparameters", json.dumps(groups), json.dumps(expected["groups"]))
    for step in range(zero_runs.STEPS, zero_runs.STEPS + 2) if "after" in expected else ():
        engine.backward(engine(2.0**-step))
        engine.step()
    for fqn, weight in expected.get("after", {}).items():
        check(f"{fqn} two steps later", safe_get_full_fp32_param(of_fqn[fqn]), weight)


def one_group(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.0625, betas=(0.5, 0.75)
    )


def rank_main(rank: int, world_size: int, port: int, cases: Sequence[dict[str, Any]]) -> None:
    import deepspeed

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled in minutes, and not needed
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        try:
            resume(case, world_size)
        except BaseException as error:
            raise AssertionError(f"{case['name']} on {world_size} ranks") from error


def main(file: str, world_sizes: Sequence[int]) -> None:
    import deepspeed  # noqa: F401  # once for all ranks

    cases = json.loads(Path(file).read_text())
    for world_size in world_sizes:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        ranks = []
        for rank in range(world_size):
            ranks.append(os.fork())
            if not ranks[-1]:
                code = 1
                try:
                    rank_main(rank, world_size, port, cases)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
        codes = [os.waitpid(pid, 0)[1] for pid in ranks]
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
