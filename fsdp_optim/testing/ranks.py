"""Run functions on local ranks: a pool of processes, where each is one rank of a world that lasts for one call."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util  # the exit handler of this module joins children: import it first, so that our handler runs before
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not re-exported

from fsdp_optim.errors import FsdpOptimError, RankTimeoutError
from fsdp_optim.testing.worker import Outcome, Task, worker_main

T = TypeVar("T")


class RanksFailed(FsdpOptimError, RuntimeError):
    """One or more ranks raised or died.

    The message holds every such rank's traceback; `errors` maps rank to error.

    The errors are the ranks' own exception objects where these can be pickled, otherwise a `RemoteError`.
    A rank that died is a `WorkerDied`, a rank that had to be killed because it waited for the others a
    `RankTimeoutError`.
    """

    def __init__(self, message: str, errors: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[int, BaseException] = dict(errors or {})


class WorkerDied(FsdpOptimError, RuntimeError):
    """A rank's process ended inside the call, `exit_code` as in `multiprocessing.Process` (-9 is SIGKILL)."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_on_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    grace: float = 10.0,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` local processes at once; the list has one result per rank.

    This is `RankPool.run` on a pool that is shared by this process, made at the first call and closed at
    exit.

    Args:
        fn, world_size, args, kwargs, timeout, backend, grace: as for `RankPool.run`.

    Returns:
        The results of `fn`, in the order of the ranks.

    Raises:
        RanksFailed: a rank raised an error, or its process ended.
        RankTimeoutError: some ranks did not finish in time.
    """
    pool = _shared_pool(os.getpid())  # a forked child must not talk to its parent's workers
    return pool.run(fn, world_size, *args, timeout=timeout, backend=backend, grace=grace, **kwargs)


@functools.cache
def _shared_pool(pid: int) -> RankPool:
    return RankPool()


class RankPool:
    """A pool of live worker processes, each of which is one rank of a world that lasts for one call of `run`.

    Workers are started when a call needs more of them than there are, and stay alive. A process that imports
    torch takes seconds to start, so they are forked from a server process (`multiprocessing`'s "forkserver")
    that has imported torch, what the caller has imported of its wrappers, and nothing else; where there is no
    such server they are spawned. A script that uses a pool needs the usual `if __name__ == "__main__":`. Close
    a pool by `close()` or by using it as a context; one that is still open at exit is closed then.
    """

    def __init__(self) -> None:
        self._workers: dict[bool, list[_Worker]] = {False: [], True: []}  # by whether they see GPUs
        self._store: TCPStore | None = None
        self._calls = 0
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        backend: str = "gloo",
        grace: float = 10.0,
        **kwargs: Any,
    ) -> list[T]:
        """Run `fn(*args, **kwargs)` on ranks 0 to `world_size - 1`; the list has one result per rank.

        On each rank torch.distributed is initialised with a new default group of exactly these ranks, and
        destroyed when all of them are through; fairscale's cached groups are forgotten, and models of torch
        FSDP and fairscale FSDP that `fn` keeps somewhere are of no use any more. torch, random and numpy start
        from the same seed on every rank, with one thread per rank. The workers take over `sys.path` and the
        working directory of the caller. Anything else that `fn` leaves behind in its process (monkeypatches,
        environment variables, default dtypes) stays for later calls: nobody tracks it.

        `fn`, arguments and results travel as pickled bytes, tensors by value, so `fn` must be importable: a
        function at module level, or a `functools.partial` of one (which is also how to give it arguments that
        are named `timeout`, `backend` or `grace`). With a backend that has no "nccl" in its name the workers
        see no GPU, so that such calls do the same on every machine; with "nccl" rank r uses GPU r modulo
        their number.

        Raises `RanksFailed` when any rank raises or dies. The others can finish within `grace` seconds; a
        second after the failure the failed rank's connections are closed, so that most of those that wait for
        it get an error of their own. Raises `RankTimeoutError` (a `TimeoutError`) when some ranks have not
        finished after `timeout` seconds, not counting the start of workers; it names them and says what the
        others did. A worker that had to be killed is replaced at the next call. No call hangs.

        Args:
            fn: the function, at module level.
            world_size: the number of ranks.
            args, kwargs: the arguments of `fn`, the same on each rank.
            timeout: seconds for all ranks to finish, not counting the start of workers.
            backend: the backend of torch.distributed's default group.
            grace: seconds that the others must finish after one rank has failed.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        payload = pickle.dumps((fn, args, kwargs))
        with self._lock:
            if self._closed or self._owner != os.getpid():
                raise RuntimeError("this pool is closed, or belongs to the process that forked this one")
            workers = self._ready_workers(world_size, sees_gpus="nccl" in backend)
            call = _Call(workers, timeout, grace)
            try:
                call.start(payload, backend, self._calls)
                call.finish()
            finally:
                self._calls += 1
                call.kill_unfinished()
        return call.results(getattr(fn, "__qualname__", repr(fn)))

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are alive, in the order of the ranks that they become."""
        alive = [worker.process for group in self._workers.values() for worker in group if worker.is_alive()]
        return [process.pid for process in alive if process.pid is not None]

    def close(self) -> None:
        """End the workers. A closed pool cannot run anything; closing it again does nothing."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        workers = [worker for group in self._workers.values() for worker in group]
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.kill()
        self._workers = {False: [], True: []}
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ready_workers(self, world_size: int, sees_gpus: bool) -> list[_Worker]:
        if self._store is None:  # first call
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            atexit.register(self.close)
        alive = [worker for worker in self._workers[sees_gpus] if worker.is_alive()]
        new = [_Worker(self._store.port, sees_gpus) for _ in range(world_size - len(alive))]
        try:
            for worker in new:
                worker.wait_until_ready()
        except BaseException:  # also Ctrl-C: a worker whose greeting is unread must not be used
            for worker in new:
                worker.kill()
            raise
        self._workers[sees_gpus] = alive + new
        return self._workers[sees_gpus][:world_size]


# ----------------------------------------------------------------------------------------------------
# The caller's side of a pool

_START_LIMIT = 120.0  # seconds that a new process may take to import torch; 2 to 4 are usual
_END_LIMIT = 5.0  # seconds that a dismissed process may take to end; less than one is usual
_LINGER = 1.0  # seconds between the first failure and closing the failed ranks' connections
_POLL = 0.2  # seconds between two looks at whether the processes are alive


_ALWAYS = ("fsdp_optim.testing.worker", "torch._dynamo")  # the latter is what the first step of any optimizer imports
_IF_LOADED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "fairscale.nn")


def _context() -> ForkServerContext | SpawnContext:
    """Return the context of a server process that forks workers; it starts with the first, and imports what is loaded here."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_ALWAYS, *(name for name in _IF_LOADED if name in sys.modules)])
    return context


class _Worker:
    """The caller's end of one worker process."""

    def __init__(self, store_port: int, sees_gpus: bool) -> None:
        context = _context()
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, store_port, sees_gpus, dict(os.environ))
        self.process: BaseProcess = context.Process(target=worker_main, args=arguments, name="fsdp_optim rank")
        self.process.start()
        worker_end.close()  # so that we see the end of the stream when the worker dies

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def dismiss(self) -> None:
        """Let the worker end by itself, which clears up what it has shared with other processes."""
        self.connection.close()

    def kill(self) -> None:
        if self.connection.closed:
            self.process.join(_END_LIMIT)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def wait_until_ready(self) -> None:
        try:
            if self.connection.poll(_START_LIMIT):
                self.connection.recv_bytes()
                return
            reason = f"did not start within {_START_LIMIT:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            reason = f"ended while starting, exit code {self.process.exitcode}"
        self.kill()
        raise WorkerDied(
            f"a worker process {reason}. A script that starts ranks needs `if __name__ == '__main__':` around its "
            "own work, because each worker imports it.",
            self.process.exitcode,
        )


@dataclass
class _Call:
    """One call of `RankPool.run`: the ranks are `workers`, by index."""

    workers: Sequence[_Worker]
    timeout: float
    grace: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    _deadline: float = 0.0
    _released: set[int] = field(default_factory=set)
    _free: set[int] = field(default_factory=set)  # ranks whose worker can take the next call
    _first_failure: float | None = None

    def start(self, payload: bytes, backend: str, call_id: int) -> None:
        self._deadline = time.monotonic() + self.timeout
        size, cwd = len(self.workers), os.getcwd()
        for rank, worker in enumerate(self.workers):
            task = Task(rank, size, backend, call_id, self.timeout, sys_path=sys.path, cwd=cwd, payload=payload)
            try:
                worker.connection.send_bytes(pickle.dumps(task))
            except OSError:
                self._record_death(rank)

    def finish(self) -> None:
        """Wait until every rank has an outcome, is past its time, or is past the grace; then free the workers."""
        while len(self.outcomes) < len(self.workers) and time.monotonic() < self._end():
            self._receive(self._end())
            if self._first_failure is not None and time.monotonic() >= self._first_failure + _LINGER:
                self._release()
        self._release()
        end = time.monotonic() + max(self.grace, 1.0)
        while self._released - self._free and time.monotonic() < end:
            self._receive(end)

    def kill_unfinished(self) -> None:
        """Kill every worker that cannot take another call: stuck, dead, or interrupted."""
        for rank, worker in enumerate(self.workers):
            if rank not in self._free:
                worker.kill()

    def results(self, name: str) -> list[Any]:
        """Return the values by rank. Raises the error of the call if a rank failed."""
        errors = {rank: o.error for rank, o in sorted(self.outcomes.items()) if o.error is not None}
        unfinished = [rank for rank in range(len(self.workers)) if rank not in self.outcomes]
        if not errors and not unfinished:
            return [self.outcomes[rank].value for rank in range(len(self.workers))]
        if unfinished and (self._first_failure is None or self._deadline <= self._first_failure + self.grace):
            raise RankTimeoutError(
                f"{name}: {listed_ranks(unfinished)} of {len(self.workers)} did not finish within "
                f"{self.timeout:g} s and had to be killed.{self._report()}"
            )
        for rank in unfinished:
            error = RankTimeoutError(f"killed {self.grace:g} s after another rank failed: it had not finished")
            errors[rank] = error
            self.outcomes[rank] = Outcome(error=error, text=f"{type(error).__name__}: {error}\n")
        failed = f"{listed_ranks(sorted(errors))} of {len(self.workers)} failed"
        raise RanksFailed(f"{name}: {failed}.{self._report()}", errors)

    def _end(self) -> float:
        if self._first_failure is None:
            return self._deadline
        return min(self._deadline, self._first_failure + self.grace)

    def _release(self) -> None:
        """Let the ranks that have reported leave their process groups."""
        for rank in sorted(set(self.outcomes) - self._released):
            self._released.add(rank)
            try:
                self.workers[rank].connection.send_bytes(b"leave")
            except OSError:
                self._released.discard(rank)  # the worker died: there is nobody to wait for

    def _receive(self, until: float) -> None:
        """Take in messages and deaths that are there, or the first to come before `until` and within `_POLL`."""
        awaited = {
            self.workers[rank].connection: rank
            for rank in range(len(self.workers))
            if rank not in self.outcomes or rank in self._released - self._free
        }
        ready = wait(list(awaited), max(0.0, min(_POLL, until - time.monotonic())))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = awaited[connection]
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                self._record_death(rank)
                continue
            if rank in self.outcomes:
                self._free.add(rank)
            else:
                self._record(rank, _read_outcome(message))
        if not ready:  # a death ends the stream, unless a child of the dead process holds its end open
            for connection, rank in awaited.items():
                if not self.workers[rank].is_alive() and not connection.poll():
                    self._record_death(rank)

    def _record(self, rank: int, outcome: Outcome) -> None:
        self.outcomes[rank] = outcome
        if outcome.error is not None and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _record_death(self, rank: int) -> None:
        self._released.discard(rank)
        if rank in self.outcomes:
            return  # the worker had finished its work, and died when leaving: it will be replaced
        process = self.workers[rank].process
        process.join(1.0)
        error = WorkerDied(f"the process of this rank died, exit code {process.exitcode}", process.exitcode)
        self._record(rank, Outcome(error=error, text=f"{type(error).__name__}: {error}\n"))

    def _report(self) -> str:
        """Return a report of each rank's error; ranks with the same traceback share one paragraph."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, outcome in sorted(self.outcomes.items()):
            ranks_by_text.setdefault(outcome.text or f"returned {_short(outcome.value)}\n", []).append(rank)
        return "".join(f"\n\n--- {listed_ranks(ranks)}:\n{text.rstrip()}" for text, ranks in ranks_by_text.items())


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return some ranks as an error names them."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _read_outcome(message: bytes) -> Outcome:
    try:
        outcome = pickle.loads(message)
    except Exception as error:  # whatever a result's class raises here, the rank did not deliver
        return Outcome(error=error, text=f"its result cannot be read here:\n{traceback.format_exc()}")
    assert isinstance(outcome, Outcome)
    return outcome
