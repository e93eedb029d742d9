"""The examples in the docs: every python block is python, and those that say so run.

The word after the language decides: "```python" is compiled, "```python run" is run in one process, and
"```python ranks=2" is run on each of two ranks, where fairscale works on CPU. All in an empty folder. Both sides of a
"```diff ranks=2 given=FSDP2" are run like that. One that begins in the
middle of a program says what is there already: "```python ranks=2 given=FSDP2" finds the names that `GIVEN` makes:
by a program of website/preludes/, which the site shows, or by the tests' kit. Where it has
gathered what was trained and loaded that again, the optimizers that it was given must be as they were, bit for bit.
"""

from __future__ import annotations

import copy
import os
import re
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import zero_runs
from kit.compare import check_same
from kit.examples import BLOCK, BLOCKS, DIFF, side_of
from kit.folders import at
from kit.groups import with_experts
from kit.local_parts import local_of
from kit.slices import TrainedSlices
from kit.stages import TrainedStages
from kit.trained import Trained
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import RanksFailed, fairscale_on_cpu, run_on_ranks

ROOT = Path(__file__).parents[2]
PRELUDES = ROOT / "website" / "preludes"


def trained(wrapper: str) -> dict[str, Any]:
    wrapped = Trained(wrapper)
    return {"model": wrapped.model, "fsdp": wrapped.model, "stage": wrapped.model, "optim": wrapped.optim}


def experts() -> dict[str, Any]:
    model, optim, _ = with_experts([dist.get_rank()])
    return {"model": model, "optim": optim}


def slices() -> dict[str, Any]:
    rank = dist.get_rank()
    trained_slices = TrainedSlices(4 * rank, 4 * rank + 4, 2)
    return {"model": trained_slices.model, "optim": trained_slices.optim}


def stages() -> dict[str, Any]:
    rank = dist.get_rank()
    trained_stages = TrainedStages([rank, rank + 2], 4, 2, each=True)
    return {"stages": trained_stages.model, "optims": trained_stages.optim}


def of_deepspeed() -> dict[str, Any]:
    """A checkpoint that DeepSpeed wrote, in the folder run, and what it was loaded into."""
    if dist.get_rank() == 0:
        with tarfile.open(ROOT / "tests/data/deepspeed/checkpoints.tar.xz") as archive:
            members = [member for member in archive.getmembers() if "z2-w2-fp32" in Path(member.name).parts]
            archive.extractall(".", members, filter="data")
        os.rename("z2-w2-fp32", "run")
    dist.barrier()
    model = zero_runs.Model()
    for unit in (*model.body, model):
        fully_shard(unit)
    optim = zero_runs.optimizer(model)
    fsdp_optim.load("run", model, optim)
    return {"model": model, "optim": optim}


def of_prelude(name: str) -> dict[str, Any]:
    """What a program of website/preludes/ makes, which the site shows beside the block."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile((PRELUDES / f"{name}.py").read_text(), name, "exec"), names)
    return names


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "deepspeed": of_deepspeed,
    "experts": experts,
    "slices": slices,
    "stage": lambda: trained("plain"),
    "stages": stages,
    **{file.stem: partial(of_prelude, file.stem) for file in PRELUDES.glob("*.py")},
}


def states(names: dict[str, Any]) -> dict[str, Any]:
    """The state of every optimizer among these names."""
    return {
        name: [
            {key: copy.deepcopy(local_of(v)) if isinstance(v, Tensor) else v for key, v in sorted(values.items())}
            for values in optim.state.values()
        ]
        for name, optim in names.items()
        if isinstance(optim, torch.optim.Optimizer)
    }


@pytest.mark.parametrize(("where", "how", "code"), BLOCKS, ids=[where for where, *_ in BLOCKS])
def test_example(where: str, how: str, code: str, tmp_path: Path) -> None:
    program = compile(code, where, "exec")
    if how == "run":
        with at(tmp_path):
            exec(program, {"__name__": "example"})
    elif match := re.fullmatch(r"ranks=(\d+)(?: given=(\S+))?", how):
        run_on_ranks(run_on_a_rank, int(match[1]), where, code, str(tmp_path), match[2])
    else:
        assert how == "", f"{where}: what does {how!r} mean?"


def run_on_a_rank(where: str, code: str, folder: str, given: str | None = None) -> None:
    with at(folder), fairscale_on_cpu():
        names: dict[str, Any] = {"__name__": "example"}
        if given is not None:
            names |= {
                "torch": torch,
                "dist": dist,
                "fsdp_optim": fsdp_optim,
                "rank": dist.get_rank(),
                "path": "optim.pt",
            }
            names |= GIVEN[given]()
        start = states(names)
        exec(compile(code, where, "exec"), names)
        if given is not None and not code.startswith("# before"):  # others may change what they read
            check_same(f"{where}: the optimizers afterwards", states(names), start)


def test_blocks_are_found_and_judged(tmp_path: Path) -> None:
    page = "text\n```python\nx = 1\n```\n```sh\nmake\n```\n```python ranks=2\ny = (\n```\n"
    blocks = [(match["how"], match["code"]) for match in BLOCK.finditer(page)]
    assert blocks == [("", "x = 1\n"), ("ranks=2", "y = (\n")]
    diff = "```diff ranks=2 before=a given=b\n-x = 1\n+x = 2\n\n y = x\n```\n"
    match = DIFF.search(diff)
    assert match is not None
    assert (match["before"], match["given"]) == ("a", "b")
    assert [side_of(match["code"], sign) for sign in "-+"] == ["x = 1\n\ny = x\n", "x = 2\n\ny = x\n"]
    with pytest.raises(SyntaxError):
        test_example("page.md:8", "ranks=2", blocks[1][1], tmp_path)
    with pytest.raises(AssertionError, match="what does 'rnu' mean"):
        test_example("page.md:8", "rnu", "pass", tmp_path)
    with pytest.raises(ZeroDivisionError):
        test_example("page.md:8", "run", "1 / 0", tmp_path)
    with pytest.raises(RanksFailed, match="the optimizers afterwards"):
        test_example("page.md:8", "ranks=2 given=FSDP2", "optim.param_groups[0]['lr'] = 1\noptim.step()", tmp_path)
