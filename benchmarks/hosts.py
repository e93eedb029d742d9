"""Save and load on a network file system that two hosts share, beside plain writes and reads of the same bytes, and DCP.

    sudo python benchmarks/hosts.py [--rounds 3] [--blocks 2] [--delay 0] [--bandwidth 0] [--file-system gluster]

Two hosts of `tests/hosts` with two ranks each. The model: blocks of 8.3 M parameters, two by default, with weights and Adam state
in fp32 (200 MB). `plain write` has every rank write its shard to a file of its own, `plain read` has it read the file of
another rank. All writers flush to the disk. Before each call the hosts drop what they have cached of the files; the server,
which is on the same machine, does not.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # before this folder, where `hosts` would be this file

from hosts.bench import Bench, missing
from hosts.file_systems import Kit, OneKernel
from hosts.gluster import Gluster
from hosts.sshfs import Sshfs

# isort: split
from checkpoint import Calls, Subject, dcp_load, dcp_save, fresh, in_fsdp2, memcpy, rows_of, tidy
from measure import Series, run_in_turn, table

import fsdp_optim

FILE_SYSTEMS = {"gluster": Gluster, "sshfs": Sshfs, "kit": Kit, "one kernel": OneKernel}
ROOT = Path("/shared/bench")
PIECE = 8 << 20  # bytes of one plain read
HEADER = ("call", "who", "median s", "range s", "time / plain", "most extra MiB on a rank")


def write_own(subject: Subject, path: Path) -> None:
    """Write this rank's shard to a file of its own."""
    path.mkdir(exist_ok=True)
    with open(path / f"{dist.get_rank()}", "wb", buffering=0) as file:
        for tensor in subject.tensors():
            view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def read_own(path: Path) -> list[torch.Tensor]:
    """Read the file that the next rank has written, which is of this host or of the other one."""
    kept = []
    with open(path / f"{(dist.get_rank() + 1) % dist.get_world_size()}", "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            kept.append(torch.empty(min(PIECE, left), dtype=torch.uint8))
            left -= file.readinto(kept[-1].numpy())
    return kept


def forget(folder: Path) -> None:
    """Drop what this host's kernel has cached of the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    dist.barrier()


def made(blocks: int, *, step: bool = True) -> Subject:
    """The model on all ranks."""
    return Subject(lambda whole: in_fsdp2(whole[:blocks]), "big", step=step)


def saves(blocks: int, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    subject, handles = made(blocks), list[Any]()

    def stall() -> None:
        handles.append(fsdp_optim.async_save(ROOT / "async", subject.model, subject.optim, overwrite=True))

    def ours(**options: Any) -> object:
        asked = fsdp_optim.SaveOptions(**options)
        return fsdp_optim.save(ROOT / "ours", subject.model, subject.optim, overwrite=True, options=asked)

    contestants: Calls = {
        "fsdp_optim": ours,
        "fsdp_optim, no checksums": lambda: ours(checksums=False),
        "fsdp_optim, ranks write the same files": lambda: ours(strategy="in_place"),
        "plain write": lambda: write_own(subject, ROOT / "plain"),
        "DCP": lambda: dcp_save(subject, ROOT / "dcp", durable=True),
        "async_save's stall": stall,
        "async_save and its wait": lambda: (stall(), handles.pop().wait()),
        "one memcpy of the shard": lambda: memcpy(subject),
    }

    def before(name: str) -> None:
        tidy(ROOT, handles)
        dist.barrier()

    found = run_in_turn(contestants, rounds, before)
    before("")
    return found


def loads(blocks: int, rounds: int) -> dict[str, Series]:
    """Runs on every rank."""
    subject, new = made(blocks), made(blocks, step=False)
    fsdp_optim.save(ROOT / "ours", subject.model, subject.optim)
    write_own(subject, ROOT / "plain")
    dcp_save(subject, fresh(ROOT, "dcp"), durable=True)

    def before(name: str) -> None:
        new.optim.state.clear()
        forget(ROOT)

    return run_in_turn(
        {
            "fsdp_optim": lambda: fsdp_optim.load(ROOT / "ours", new.model, new.optim),
            "plain read": lambda: read_own(ROOT / "plain"),
            "DCP": lambda: dcp_load(new, ROOT / "dcp"),
            "DCP, over state that is there": lambda: dcp_load(subject, ROOT / "dcp"),
        },
        rounds,
        before,
    )


def as_rank(rounds: int, blocks: int) -> None:
    """The program of the ranks. Rank 0 prints the table."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        ROOT.mkdir()
    dist.barrier()
    rows = []
    for what, measure, floor in (("save", saves, "plain write"), ("load", loads, "plain read")):
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, measure(blocks, rounds))
        rows += rows_of(what, by_rank, floor)
    if dist.get_rank() == 0:
        print(table(HEADER, rows), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=2, help="of 8.4 M parameters, 96 MiB")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds that a round trip takes longer")
    parser.add_argument(
        "--bandwidth", type=float, default=0.0, help="bytes in a second of each host's link; 0: no limit"
    )
    parser.add_argument("--file-system", choices=FILE_SYSTEMS, default="gluster")
    options = parser.parse_args()
    file_system = FILE_SYSTEMS[options.file_system]()
    if missing(file_system):
        sys.exit(missing(file_system))
    with Bench(2, file_system) as bench:
        if options.delay or options.bandwidth:
            bench.delay(options.delay, options.bandwidth or None)
        run = bench.run(__file__, "rank", str(options.rounds), str(options.blocks), preload=("torch",))
        print(run.succeed(1800.0)[0], flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        as_rank(*map(int, sys.argv[2:]))
    else:
        main()
