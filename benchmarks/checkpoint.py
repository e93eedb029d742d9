"""Save and load of a whole checkpoint: fsdp_optim beside plain reads and writes of the same bytes, and beside its peers.

    python benchmarks/checkpoint.py [--rounds 3] [--worlds 2 4] [--models big small] [--folder DIR]

The model `big`: 12 blocks with 100 M parameters, weights and Adam state in fp32 (1.1 GiB). Every contestant saves weights and
state; each loads at `--worlds` ranks what it saved at another number of ranks. The contestants run in turn in the same
processes. `plain write` has every rank write its shard to its place in one file; `plain read` has it read its slice into
fresh memory. "durable" means fsync. Extra memory is the highest resident size during the call, over that before it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim.fairscale

sys.path.insert(0, str(Path(__file__).parent))

from gather import blocks_of
from measure import Series, run_in_turn, table

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

Calls = dict[str, Callable[[], object]]


def in_fsdp2(blocks: list[nn.Module]) -> nn.Module:
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def in_fsdp1(blocks: list[nn.Module]) -> nn.Module:
    cpu = torch.device("cpu")
    return TorchFSDP(nn.Sequential(*(TorchFSDP(block, device_id=cpu) for block in blocks)), device_id=cpu)


def in_fairscale(blocks: list[nn.Module]) -> nn.Module:
    wrapped = (fsdp_optim.fairscale.FullyShardedDataParallel(block) for block in blocks)
    model = fsdp_optim.fairscale.FullyShardedDataParallel(nn.Sequential(*wrapped))
    for module in model.modules():
        if isinstance(module, fsdp_optim.fairscale.FullyShardedDataParallel):
            module._lazy_init()
    return model


class Subject:
    """A wrapped model with Adam, and a place to save it to."""

    def __init__(self, wrap: Callable[[list[nn.Module]], nn.Module], kind: str, *, step: bool = True) -> None:
        self.model = wrap(blocks_of(kind))
        self.optim = torch.optim.Adam(self.model.parameters())
        for param in self.model.parameters() if step else ():
            param.grad = torch.ones_like(param)
        if step:
            self.optim.step()
            self.optim.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        found = [param.detach() for param in self.model.parameters()]
        found += [state[name] for state in self.optim.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [value.to_local() if hasattr(value, "to_local") else value for value in found]


def fresh(folder: Path, name: str) -> Path:
    """An empty path. Earlier files are removed first, outside the timed part of the next contestant."""
    path = folder / name
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def plain_write(subject: Subject, path: Path, *, durable: bool) -> None:
    tensors = subject.tensors()
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, sum(t.nbytes for t in tensors))
    if dist.get_rank() == 0:
        path.mkdir()
        with (path / "data").open("wb") as file:
            file.truncate(sum(sizes))
    dist.barrier()
    at = sum(sizes[: dist.get_rank()])
    fd = os.open(path / "data", os.O_WRONLY)
    for tensor in tensors:
        view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        while len(view):
            done = os.pwrite(fd, view, at)
            at, view = at + done, view[done:]
    if durable:
        os.fsync(fd)
    os.close(fd)


def plain_read(path: Path) -> list[torch.Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    size = (path / "data").stat().st_size
    at, stop = size * rank // world, size * (rank + 1) // world
    fd, kept = os.open(path / "data", os.O_RDONLY), []
    while at < stop:
        tensor = torch.empty(min(8 << 20, stop - at), dtype=torch.uint8)
        done = os.preadv(fd, [memoryview(tensor.numpy())], at)
        at += done
        kept.append(tensor)
    os.close(fd)
    return kept


def fairscale_save(subject: Subject, path: Path) -> None:
    steps = {param: state["step"] for param, state in subject.optim.state.items()}
    full = super(type(subject.model), subject.model).gather_full_optim_state_dict(subject.optim)  # type: ignore[misc]
    for param, step in steps.items():
        subject.optim.state[param]["step"] = step
    weights = subject.model.state_dict()
    if dist.get_rank() == 0:
        path.mkdir()
        torch.save({"model": weights, "optim": full}, path / "all.pt")


def fairscale_load(subject: Subject, path: Path) -> None:
    saved = torch.load(path / "all.pt", mmap=True)
    shard = super(type(subject.model), subject.model).get_shard_from_optim_state_dict(saved["optim"])  # type: ignore[misc]
    subject.optim.load_state_dict(shard)
    subject.model.load_state_dict(saved["model"])


def fsdp1_save(subject: Subject, path: Path) -> None:
    with TorchFSDP.state_dict_type(subject.model, StateDictType.FULL_STATE_DICT, *_full(rank0_only=False)):
        weights, state = subject.model.state_dict(), TorchFSDP.optim_state_dict(subject.model, subject.optim)
    if dist.get_rank() == 0:
        path.mkdir()
        torch.save({"model": weights, "optim": state}, path / "all.pt")


def fsdp1_load(subject: Subject, path: Path) -> None:
    saved = torch.load(path / "all.pt", mmap=True)
    with TorchFSDP.state_dict_type(subject.model, StateDictType.FULL_STATE_DICT, *_full(rank0_only=False)):
        subject.model.load_state_dict(saved["model"])
        subject.optim.load_state_dict(TorchFSDP.optim_state_dict_to_load(subject.model, subject.optim, saved["optim"]))


def _full(*, rank0_only: bool = True) -> tuple[Any, Any]:
    return (
        FullStateDictConfig(offload_to_cpu=rank0_only, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=rank0_only, rank0_only=rank0_only),
    )


def dcp_save(subject: Subject, path: Path, *, durable: bool) -> None:
    model, optim = get_state_dict(subject.model, subject.optim)
    dcp.save({"model": model, "optim": optim}, storage_writer=dcp.FileSystemWriter(path, sync_files=durable))


def dcp_load(subject: Subject, path: Path) -> None:
    model, optim = get_state_dict(subject.model, subject.optim)
    saved = {"model": model, "optim": optim}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(subject.model, subject.optim, model_state_dict=saved["model"], optim_state_dict=saved["optim"])


def memcpy(subject: Subject) -> list[torch.Tensor]:
    """The floor of an async save's stall: one copy of the shard into fresh memory."""
    return [tensor.clone() for tensor in subject.tensors()]


def saves(folder: Path, kind: str, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    with fairscale_on_cpu():
        fsdp2, fsdp1, fairscale = (Subject(wrap, kind) for wrap in (in_fsdp2, in_fsdp1, in_fairscale))
        handles: list[Any] = []

        def ours(subject: Subject, name: str, **options: Any) -> object:
            asked = fsdp_optim.SaveOptions(**options)
            return fsdp_optim.save(folder / name, subject.model, subject.optim, overwrite=True, options=asked)

        def stall() -> None:
            handles.append(fsdp_optim.async_save(folder / "async", fsdp2.model, fsdp2.optim, overwrite=True))

        def timed(call: Callable[[Path], object], name: str) -> Callable[[], object]:
            return lambda: call(folder / name)

        contestants: Calls = {
            "fsdp_optim, FSDP2, no checksums": lambda: ours(fsdp2, "bare", durable=False, checksums=False),
            "fsdp_optim, FSDP2": lambda: ours(fsdp2, "ours", durable=False),
            "fsdp_optim, fairscale": lambda: ours(fairscale, "ours-fairscale", durable=False),
            "fsdp_optim, FSDP2, durable": lambda: ours(fsdp2, "durable", durable=True),
            "plain write": timed(lambda path: plain_write(fsdp2, path, durable=False), "plain"),
            "plain write, durable": timed(lambda path: plain_write(fsdp2, path, durable=True), "plain-durable"),
            "DCP, FSDP2": timed(lambda path: dcp_save(fsdp2, path, durable=False), "dcp"),
            "DCP, FSDP2, durable": timed(lambda path: dcp_save(fsdp2, path, durable=True), "dcp-durable"),
            "FSDP1 full state dict + torch.save": timed(lambda path: fsdp1_save(fsdp1, path), "fsdp1"),
            "fairscale gather + torch.save": timed(lambda path: fairscale_save(fairscale, path), "fairscale"),
            "async_save's stall, FSDP2": stall,
            "one memcpy of the shard": lambda: memcpy(fsdp2),
        }
        found = run_in_turn(contestants, rounds, before=lambda name: tidy(folder, handles))
        tidy(folder, handles)
        return found


def tidy(folder: Path, handles: list[Any]) -> None:
    """Prepare a call: wait for saves under way, and remove files that a peer would not overwrite."""
    while handles:
        handles.pop().wait()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)


def last_saves(folder: Path, kind: str) -> None:
    """Save one checkpoint with each contestant, for the loads."""
    with fairscale_on_cpu():
        fsdp2 = Subject(in_fsdp2, kind)
        fsdp_optim.save(folder / "ours", fsdp2.model, fsdp2.optim, overwrite=True)
        plain_write(fsdp2, fresh(folder, "plain"), durable=False)
        dcp_save(fsdp2, fresh(folder, "dcp"), durable=False)
        fsdp1_save(Subject(in_fsdp1, kind), fresh(folder, "fsdp1"))
        fairscale_save(Subject(in_fairscale, kind), fresh(folder, "fairscale"))


def loads(folder: Path, kind: str, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    with fairscale_on_cpu():
        fsdp2, fsdp1, fairscale = (Subject(wrap, kind) for wrap in (in_fsdp2, in_fsdp1, in_fairscale))
        new = Subject(in_fsdp2, kind, step=False)
        optims = [new.optim, fsdp1.optim, fairscale.optim]

        def ours(**options: Any) -> object:
            asked = fsdp_optim.LoadOptions(**options)
            return fsdp_optim.load(folder / "ours", new.model, new.optim, options=asked)

        def resumed(name: str) -> None:
            """Bring the optimizers into their state after a restart: only the one that is loaded has state."""
            for optim in optims:
                optim.state.clear()

        return run_in_turn(
            {
                "fsdp_optim, FSDP2, verify=False": lambda: ours(verify=False),
                "fsdp_optim, FSDP2": ours,
                "plain read": lambda: plain_read(folder / "plain"),
                "DCP, FSDP2": lambda: dcp_load(new, folder / "dcp"),
                "DCP, FSDP2, over state that is there": lambda: dcp_load(fsdp2, folder / "dcp"),
                "FSDP1 torch.load + optim_state_dict_to_load": lambda: fsdp1_load(fsdp1, folder / "fsdp1"),
                "fairscale torch.load + get_shard": lambda: fairscale_load(fairscale, folder / "fairscale"),
            },
            rounds,
            before=resumed,
        )


def rows_of(what: str, by_rank: list[dict[str, Series]], floor: str) -> list[tuple[str, ...]]:
    least = by_rank[0][floor].median
    return [
        (
            what,
            name,
            f"{series.median:.3f}",
            f"{min(series.seconds):.3f} to {max(series.seconds):.3f}",
            f"{series.median / least:.2f}",
            f"{max(rank[name].median_mib for rank in by_rank):.0f}",
        )
        for name, series in by_rank[0].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["big"], help="of benchmarks/gather.py: big, small, shapes")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--only", choices=["save", "load"], default=None)
    options = parser.parse_args()
    header = ("call", "who", "median s", "range s", "time / plain", "most extra MiB on a rank")
    for kind, world_size in itertools.product(options.models, options.worlds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            place = Path(folder)
            rows = []
            if options.only != "load":
                by_rank = run_on_ranks(saves, world_size, place, kind, options.rounds, timeout=900.0)
                rows += rows_of(f"{kind}, save, {world_size} ranks", by_rank, "plain write")
            if options.only != "save":
                saved_at = 6 - world_size if world_size in (2, 4) else world_size + 1
                run_on_ranks(last_saves, saved_at, place, kind, timeout=900.0)
                by_rank = run_on_ranks(loads, world_size, place, kind, options.rounds, timeout=900.0)
                rows += rows_of(f"{kind}, load, {saved_at} to {world_size} ranks", by_rank, "plain read")
            print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
