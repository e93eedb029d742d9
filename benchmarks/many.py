"""Many small tensors: processor time and Python calls per value of each call, beside DCP and a bare loop of writes.

    python benchmarks/many.py [--params 400 4000] [--worlds 2] [--wrappers FSDP2] [--apart] [--calls] [--profile CALL]

Each parameter has 8 x 8 elements and Adam's state: four values each with the weight, two moments and the step. 20 parameters
make one unit of the wrapper. Processor time is user and system time of the slowest rank, by `resource.getrusage`: also that of
its threads. The contestants run in turn in the same processes, or with --apart DCP in others: what it leaves of the heap costs
the others some tenth more. A load is of the save before, into an optimizer without state.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import os
import pstats
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from measure import peak, reset_peak, table

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

UNIT = 20
OURS, DCP = "fsdp_optim", "DCP"
VALUES = 4  # of a parameter: its weight, two moments and the step

Calls = dict[str, Callable[[], object]]


def units_of(num_params: int) -> list[nn.Module]:
    """Return one module for each unit of the wrapper."""
    return [
        nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(min(UNIT, num_params - first))))
        for first in range(0, num_params, UNIT)
    ]


def in_fsdp2(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_hsdp(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_tensor_parallel(units: list[nn.Module]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    ways = (ColwiseParallel, RowwiseParallel)
    for unit in units:
        parallelize_module(unit, mesh["tensor"], {name: ways[int(name) % 2]() for name, _ in unit.named_children()})
    mesh = mesh["data"]
    return fully_shard(nn.Sequential(*(fully_shard(unit, mesh=mesh) for unit in units)), mesh=mesh)


def in_fsdp1(units: list[nn.Module]) -> nn.Module:
    def wrap(module: nn.Module) -> nn.Module:
        return TorchFSDP(module, use_orig_params=True, device_id=torch.device("cpu"))

    return wrap(nn.Sequential(*map(wrap, units)))


def in_fairscale(units: list[nn.Module]) -> nn.Module:
    model = FullyShardedDataParallel(nn.Sequential(*(FullyShardedDataParallel(unit) for unit in units)))
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            module._lazy_init()
    return model


def in_ddp(units: list[nn.Module]) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(*units))


WRAPPERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "FSDP2": in_fsdp2,
    "HSDP": in_hsdp,
    "FSDP2-TP": in_tensor_parallel,
    "FSDP1": in_fsdp1,
    "fairscale": in_fairscale,
    "DDP": in_ddp,
    "none": lambda units: nn.Sequential(*units),
}
WITHOUT_DCP = ("fairscale",)  # its load_state_dict() does not take what torch's set_state_dict gives it


def trained(wrapper: str, num_params: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](units_of(num_params))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    optim.zero_grad()
    return model, optim


def bare_write(model: nn.Module, path: Path) -> None:
    """The floor: one write for each local tensor, each rank into a file of its own."""
    tensors = [getattr(param, "_local_tensor", param).detach() for param in model.parameters()]
    with (path.with_suffix(f".{dist.get_rank()}")).open("wb", buffering=0) as file:
        for tensor in tensors:
            for _ in range(VALUES - 1):
                file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))


def dcp_save(model: nn.Module, optim: torch.optim.Optimizer, path: Path) -> None:
    weights, state = get_state_dict(model, optim)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)


def dcp_load(model: nn.Module, optim: torch.optim.Optimizer, path: Path) -> None:
    weights, state = get_state_dict(model, optim)
    tree = {"model": weights, "optim": state}
    dcp.load(tree, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=tree["model"], optim_state_dict=tree["optim"])


def contestants(
    folder: Path, wrapper: str, num_params: int, libraries: Sequence[str]
) -> tuple[Calls, Callable[[str], None]]:
    """Return the calls of some libraries to measure, in the order of the first round, and what prepares each."""
    model, optim = trained(wrapper, num_params)
    handles: list[fsdp_optim.SaveHandle] = []
    quick = fsdp_optim.SaveOptions(durable=False)

    def save() -> None:
        fsdp_optim.save(folder / "ours", model, optim, overwrite=True, options=quick)

    def stall() -> None:
        handles.append(fsdp_optim.async_save(folder / "async", model, optim, overwrite=True, options=quick))

    def before(name: str) -> None:
        while handles:
            handles.pop().wait()
        if name.endswith(", load"):
            optim.state.clear()
        if name == "DCP, save" and dist.get_rank() == 0:
            shutil.rmtree(folder / "dcp", ignore_errors=True)
        dist.barrier()

    calls: Calls = {
        "fsdp_optim, save": save,
        "fsdp_optim, load": lambda: fsdp_optim.load(folder / "ours", model, optim),
        "fsdp_optim, gather": lambda: fsdp_optim.gather_full_optim_state_dict(model, optim),
        "async_save's stall": stall,
        "bare writes": lambda: bare_write(model, folder / "bare"),
    }
    peers: Calls = {
        "DCP, save": lambda: dcp_save(model, optim, folder / "dcp"),
        "DCP, load": lambda: dcp_load(model, optim, folder / "dcp"),
    }
    return {**(calls if OURS in libraries else {}), **(peers if DCP in libraries else {})}, before


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(
    folder: Path, wrapper: str, num_params: int, rounds: int, libraries: Sequence[str]
) -> dict[str, list[tuple[float, float, float]]]:
    """Runs on every rank. Returns for each call (processor seconds, seconds, growth of the peak in bytes), a tuple a round."""
    with fairscale_on_cpu():
        calls, before = contestants(folder, wrapper, num_params, libraries)
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
        for index in range(rounds):
            order = list(calls)
            if index:  # a load needs the save before it
                random.Random(index).shuffle(order)
            for name in order:
                before(name)
                gc.collect()
                resident = reset_peak()
                dist.barrier()
                clock, begin = time.perf_counter(), processor_seconds()
                kept = calls[name]()
                used = processor_seconds() - begin
                results[name].append((used, time.perf_counter() - clock, peak() - resident))
                del kept
        before("")
        return results


def count_calls(folder: Path, wrapper: str, num_params: int) -> dict[str, int]:
    """Runs on every rank. Returns the Python and C calls of each call, in its second round, on this rank's main thread."""
    with fairscale_on_cpu():
        calls, before = contestants(folder, wrapper, num_params, [OURS])
        counts = {}
        for _, name in itertools.product(range(2), calls):
            before(name)
            profile = cProfile.Profile()
            profile.enable()
            calls[name]()
            profile.disable()
            counts[name] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        before("")
        return counts


def profiled(folder: Path, wrapper: str, num_params: int, name: str, order: str) -> None:
    """Runs on every rank: rank 0 prints a profile of the second round of one call."""
    with fairscale_on_cpu():
        calls, before = contestants(folder, wrapper, num_params, [OURS, DCP])
        calls["DCP, save" if name.startswith("DCP") else "fsdp_optim, save"]()
        for index in range(2):
            before(name)
            profile = cProfile.Profile()
            if index:
                profile.enable()
            calls[name]()
            profile.disable()
            if index and dist.get_rank() == 0:
                pstats.Stats(profile).sort_stats(order).print_stats(60)
        before("")


def rows_of(about: str, by_rank: list[dict[str, list[tuple[float, float, float]]]], num_values: int) -> list[list[str]]:
    rows = []
    for name in by_rank[0]:
        used = statistics.median(
            max(rank[name][index][0] for rank in by_rank) for index in range(len(by_rank[0][name]))
        )
        seconds = statistics.median(entry[1] for entry in by_rank[0][name])
        growth = max(rank[name][-1][2] for rank in by_rank)
        rows.append(
            [
                about,
                name,
                f"{used:.3f}",
                f"{seconds:.3f}",
                f"{used / num_values * 1e6:.1f}",
                f"{growth / num_values:.0f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, nargs="+", default=[400, 4000])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--wrappers", nargs="+", default=["FSDP2"], choices=list(WRAPPERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="leave DCP out")
    parser.add_argument("--apart", action="store_true", help="DCP in processes of its own")
    parser.add_argument("--calls", action="store_true", help="count Python calls per value instead")
    parser.add_argument(
        "--profile",
        default=None,
        help='print a profile of this call instead: "fsdp_optim, save", "fsdp_optim, load", ...',
    )
    parser.add_argument("--order", default="tottime")
    options = parser.parse_args()
    os.environ["FSDP_OPTIM_QUIET"] = "1"
    header = ("model", "who", "processor s", "s", "processor us / value", "bytes / value")
    for wrapper, num_params, world_size in itertools.product(options.wrappers, options.params, options.worlds):
        about = f"{num_params:,} parameters, {wrapper}, {world_size} rank{'' if world_size == 1 else 's'}"
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            if options.profile:
                run_on_ranks(
                    profiled, world_size, place, wrapper, num_params, options.profile, options.order, timeout=1800.0
                )
            elif options.calls:
                counts = run_on_ranks(count_calls, world_size, place, wrapper, num_params, timeout=1800.0)
                for name in counts[0]:
                    most = max(rank[name] for rank in counts) / (VALUES * num_params)
                    print(f"{about}: {name}: {most:.1f} calls per value", flush=True)
            else:
                libraries = [OURS] if options.no_peers or wrapper in WITHOUT_DCP else [OURS, DCP]
                rows = []
                for together in [[name] for name in libraries] if options.apart else [libraries]:
                    given = place, wrapper, num_params, options.rounds, together
                    by_rank = run_on_ranks(measure, world_size, *given, timeout=3000.0)
                    rows += rows_of(about, by_rank, VALUES * num_params)
                print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
