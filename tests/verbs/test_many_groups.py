"""The work of a call grows with the number of parameters, groups and files, not with its square: counted in lines that run."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import fsdp_optim
from fsdp_optim import (
    SaveOptions,
    gather_full_optim_state_dict,
    get_shard_from_optim_state_dict,
    iter_full_optim_state,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    transfer_optim_state,
)

LIBRARY = str(Path(fsdp_optim.__file__).parent)
FEW, MANY = 100, 400


def a_run(num_groups: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((3,), float(i))) for i in range(num_groups)])
    optim = torch.optim.Adam([{"params": [param], "lr": 0.1} for param in model])
    for param in model:
        param.grad = torch.ones(3)
    optim.step()
    return model, optim


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the library a call runs; each round of a loop or a comprehension counts."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    def trace_library(frame, event, arg):
        return trace(frame, event, arg) if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace()
    sys.settrace(trace_library)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def get_shard(model, optim, full, _):
    get_shard_from_optim_state_dict(model, optim, full)


def get_shard_without_optimizer(model, optim, full, _):
    get_shard_from_optim_state_dict(model, None, full)


def gather(model, optim, full, _):
    gather_full_optim_state_dict(model, optim)


def iterate(model, optim, full, _):
    list(iter_full_optim_state(model, optim))


def scatter(model, optim, full, _):
    scatter_full_optim_state_dict(model, optim, full)


def rekey(model, optim, full, _):
    rekey_optim_state_dict(full, model, "id")


def transfer(model, optim, full, _):
    transfer_optim_state(model, optim, *a_run(len(optim.param_groups)))


def save(model, optim, full, path):
    fsdp_optim.save(path / f"of {len(optim.param_groups)}", model, optim)


def load(model, optim, full, path):
    fsdp_optim.load(path / f"of {len(optim.param_groups)}", model, optim)


def save_files(model, optim, full, path):
    """A file for each value, or nearly."""
    options = SaveOptions(max_file_size=200, durable=False)
    fsdp_optim.save(path / f"files of {len(optim.param_groups)}", model, optim, overwrite=True, options=options)


def load_files(model, optim, full, path):
    fsdp_optim.load(path / f"files of {len(optim.param_groups)}", model, optim)


def verify_files(model, optim, full, path):
    fsdp_optim.verify(path / f"files of {len(optim.param_groups)}")


def convert_files(model, optim, full, path):
    folder = path / f"files of {len(optim.param_groups)}"
    fsdp_optim.convert(folder, folder.with_name(f"{folder.name}, converted"), overwrite=True)


OF_FILES = [save_files, load_files, verify_files, convert_files]
CALLS = [get_shard, get_shard_without_optimizer, gather, iterate, scatter, rekey, transfer, save, load, *OF_FILES]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_work_grows_with_the_number_of_groups(call, tmp_path):
    counts = []
    for num_groups in (FEW, MANY):
        model, optim = a_run(num_groups)
        full = gather_full_optim_state_dict(model, optim)
        if call is load:
            save(model, optim, full, tmp_path)
        elif call in OF_FILES:
            save_files(model, optim, full, tmp_path)
        counts.append(lines_run(partial(call, model, optim, full, tmp_path)))
    assert 0 < counts[1] < 1.25 * MANY / FEW * counts[0], f"{counts[0]} lines for {FEW} groups, {counts[1]} for {MANY}"
