"""Run functions on ranks that are threads of this process, without other processes and without torch.distributed."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp_optim.errors import RankTimeoutError
from fsdp_optim.testing.ranks import RanksFailed, listed_ranks
from fsdp_optim.transport.in_process import InProcessTransport, InProcessWorld, Shared
from fsdp_optim.transport.world import entered, world_here

T = TypeVar("T")

_LAST_MOMENT = 5.0  # seconds for ranks to end when nobody waits for them any more


def run_on_threads(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    grace: float = 10.0,
    transport: Callable[[Shared], InProcessTransport] = InProcessTransport,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` threads at once, each of which is a rank; the list has one result per rank.

    The calls of this library that `fn` makes are those of a rank: `fsdp_optim.testing.thread_rank()` says which. Nothing else
    knows of ranks: wrappers that need process groups cannot be used, and torch's random numbers are those of the process.
    `fn` need not be importable, and arguments and results are shared, not copied.

    Args:
        fn, world_size, args, kwargs: the function, the number of ranks, and the arguments of `fn` on each of them.
        timeout: seconds for all ranks to finish.
        grace: seconds that the others must finish after one rank has failed.
        transport: makes what carries the bytes of a rank, to test one that fails.

    Raises:
        RanksFailed: any rank raised.
        RankTimeoutError: some ranks did not finish in time. A thread cannot be killed: one that does not wait for other ranks
            runs on.
    """
    shared = Shared(world_size)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    texts: dict[int, str] = {}
    changed = threading.Condition()

    def run(rank: int) -> None:
        world = InProcessWorld(shared, rank)
        world.transport = transport(shared)
        try:
            with entered(world):
                result = fn(*args, **kwargs)
        except BaseException as error:  # SystemExit too: the caller must hear of it
            text = traceback.format_exc()
            with changed:
                errors[rank], texts[rank] = error, text
                changed.notify_all()
        else:
            with changed:
                results[rank] = result
                changed.notify_all()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline, is_short = time.monotonic() + timeout, False
    with changed:
        while len(results) + len(errors) < world_size and time.monotonic() < deadline:
            if errors and not is_short:
                is_short, deadline = True, min(deadline, time.monotonic() + grace)
            changed.wait(max(deadline - time.monotonic(), 0.0))
        unfinished = [rank for rank in range(world_size) if rank not in results and rank not in errors]
        failed = sorted(errors)
    shared.end()
    for thread in threads:
        thread.join(_LAST_MOMENT)
    name = getattr(fn, "__qualname__", repr(fn))
    report = "".join(f"\n\n--- rank {rank}:\n{text.rstrip()}" for rank, text in sorted(texts.items()))
    if unfinished and not failed:
        raise RankTimeoutError(
            f"{name}: {listed_ranks(unfinished)} of {world_size} did not finish within {timeout:g} s.{report}"
        )
    if errors:
        raise RanksFailed(f"{name}: {listed_ranks(sorted(errors))} of {world_size} failed.{report}", errors)
    return [results[rank] for rank in range(world_size)]


def thread_rank() -> int:
    """Return the rank that this thread is, inside `run_on_threads`."""
    return world_here().rank
