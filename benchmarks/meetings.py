"""Meetings of many ranks in the rendezvous store: messages, bytes and seconds as the number of ranks grows.

    python benchmarks/meetings.py [--simulated 2 8 64 512 4096] [--real 2 16 64 256] [--rounds 20] [--processes 4]

Simulated: each rank runs the library's own code on a store in simulated time, whose one server answers one message after the
other (`tests/kit/simulated_store.py`), with the costs of `Costs` there, twice those, and 50 us for every message. Ranks compute
in no time, all come at once, and a message travels for 50 us. Real: as many ranks, as threads of a few processes, meet in one
TCPStore in a process of its own; the server's processor time is what limits thousands of ranks, the time that a meeting takes
is mostly that of Python on the cores that all ranks share here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from kit.simulated_store import Costs, Simulation, StoreWorld
from measure import table

from fsdp_optim.transport import meeting
from fsdp_optim.transport.agree import agree, all_gather_bytes

KINDS: dict[str, Callable[[Any], object]] = {
    "agree": lambda world: agree(world.all(), "a step"),
    "a manager's step": lambda world: all_gather_bytes(
        world.all(), "step 3", b"" if world.rank else b"12", flags=0
    ).content_of(0),
    "8 bytes of each": lambda world: all_gather_bytes(world.all(), "told", b"%08d" % world.rank).content_of(0),
}
FLAT = Costs(answered=50e-6, sent=50e-6, woken=0.0, nbyte=0.0)
LIMIT = timedelta(seconds=600)


def simulated(sizes: list[int]) -> str:
    """Return the table of simulated meetings."""
    lines = []
    for size in sizes:
        simulation = Simulation(size)
        simulation.run(KINDS["agree"])  # the first meeting creates what later ones use again
        for kind, program in KINDS.items():
            reports = [simulation.run(program, costs) for costs in (Costs(), Costs().times(2), FLAT)]
            usage = reports[0].usage
            most = max(usage, key=lambda each: each.num_messages)
            lines.append(
                (
                    kind,
                    f"{size:,}",
                    usage[-1].num_messages,
                    most.num_messages,
                    f"{sum(each.num_messages for each in usage):,}",
                    f"{max(each.sent_nbytes + each.received_nbytes for each in usage) / 1000:,.1f}",
                    *(f"{report.seconds * 1000:,.1f}" for report in reports),
                )
            )
    lines.sort(key=lambda line: list(KINDS).index(line[0]))
    headers = ["meeting", "ranks", "messages of a leaf", "most of a rank", "of all", "most kB of a rank"]
    return table([*headers, "ms", "server twice as slow", "50 us a message"], lines)


def serve(port: Any, ready: Any, over: Any) -> None:
    """Serve a store, in a process of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.value = store.port
    ready.set()
    over.wait()


def attend(port: int, ranks: range, size: int, rounds: int, together: Barrier, seconds: Any) -> None:
    """Run some ranks as threads of this process."""
    meeting._QUIET = 600.0  # seconds; ranks whose process is slow to begin are not looked for
    threads = [threading.Thread(target=rank_of, args=(port, rank, size, rounds, together, seconds)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rank_of(port: int, rank: int, size: int, rounds: int, together: Barrier, seconds: Any) -> None:
    """One rank: some meetings one after the other."""
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    world = StoreWorld(lambda: client, rank, size)
    world.board.add("connected", 1)
    together.wait()
    agree(world.all(), "the first")
    together.wait()
    for _ in range(rounds):
        began = time.perf_counter()
        agree(world.all(), "a step")
        if rank == 0:
            seconds.append(time.perf_counter() - began)
    together.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((tasks / name / "schedstat").read_text().split()[0]) for name in os.listdir(tasks)) / 1e9


def real(sizes: list[int], rounds: int, num_processes: int) -> str:
    """Return the table of real meetings."""
    lines = []
    context = multiprocessing.get_context("spawn")
    for size in sizes:
        port, ready, over = context.Value("i", 0), context.Event(), context.Event()
        server = context.Process(target=serve, args=(port, ready, over))
        server.start()
        ready.wait()
        together = context.Barrier(size + 1)
        with context.Manager() as manager:
            seconds = manager.list()
            step = -(-size // num_processes)
            parts = [range(first, min(first + step, size)) for first in range(0, size, step)]
            processes = [
                context.Process(target=attend, args=(port.value, part, size, rounds, together, seconds))
                for part in parts
            ]
            for process in processes:
                process.start()
            together.wait()  # all have connected
            together.wait()  # all have met once
            before = processor_seconds(server.pid or 0)
            together.wait()
            used = processor_seconds(server.pid or 0) - before
            for process in processes:
                process.join()
            median = statistics.median(seconds)
        over.set()
        server.join()
        a_rank = used / rounds / size
        row = (f"{size:,}", f"{median * 1000:.2f}", f"{used / rounds * 1000:.2f}", f"{a_rank * 1e6:.1f}")
        lines.append((*row, f"{a_rank * 4096:.2f}"))
        print(*lines[-1], file=sys.stderr, flush=True)
    headers = ["ranks", "ms of a meeting", "of them the server", "us of the server a rank", "s for 4,096 such ranks"]
    return table(headers, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, nargs="*", default=[2, 8, 64, 512, 4096])
    parser.add_argument("--real", type=int, nargs="*", default=[2, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    if options.simulated:
        print(simulated(options.simulated), flush=True)
    if options.real:
        print(real(options.real, options.rounds, options.processes))


if __name__ == "__main__":
    main()
