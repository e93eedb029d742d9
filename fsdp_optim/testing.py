"""Test sharded training without a GPU: fairscale FSDP on CPU, and functions on live local ranks.

    def steps_on_a_rank() -> float:                       # at module level, so that a worker can import it
        with fairscale_on_cpu():
            model = FullyShardedDataParallel(nn.Linear(8, 8))
            ...                                           # forward, backward, step, gather: as on GPUs
            return loss.item()

    losses = run_on_ranks(steps_on_a_rank, world_size=4)  # one result per rank

Importing this module loads torch, but neither fairscale nor pytest, and starts nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.util  # its exit handler joins children: import it first, so that ours runs before it
import operator
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not re-exported
from torch.utils.hooks import RemovableHandle

from fsdp_optim.errors import FsdpOptimError, RankTimeoutError

__all__ = [
    "RankPool",
    "RanksFailed",
    "RemoteError",
    "WorkerDied",
    "fairscale_on_cpu",
    "forget_fairscale_groups",
    "run_on_ranks",
]

T = TypeVar("T")

# ----------------------------------------------------------------------------------------------------
# fairscale FSDP without CUDA


def forget_fairscale_groups() -> None:
    """Empty fairscale's cache of process groups.

    The cache outlives `destroy_process_group`, and then hands out dead groups. Call this between two worlds
    of one process. Does nothing when fairscale is not loaded.
    """
    parallel = sys.modules.get("fairscale.internal.parallel")
    if parallel is not None and hasattr(parallel.get_process_group_cached, "_global_group_cache"):
        del parallel.get_process_group_cached._global_group_cache


class _CpuStream:
    """What fairscale asks of a CUDA stream, for a device that does everything at once and in order."""

    def wait_stream(self, stream: object) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _CpuStreams:
    """Stand-ins for `torch.cuda.current_stream`, `stream` and `synchronize`."""

    def __init__(self) -> None:
        self._stack = [_CpuStream()]

    def current(self, device: object = None) -> _CpuStream:
        return self._stack[-1]

    @contextlib.contextmanager
    def use(self, stream: _CpuStream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def synchronize(self, device: object = None) -> None:
        """There is nothing to wait for."""

    @classmethod
    def are_in_place(cls) -> bool:
        return isinstance(getattr(torch.cuda.current_stream, "__self__", None), cls)


@contextlib.contextmanager
def fairscale_on_cpu() -> Iterator[None]:
    """Let fairscale's `FullyShardedDataParallel` train over gloo on CPU.

    Build the model and use it inside the context. There:

    - `compute_device` defaults to the CPU, and gradients are reduced without buckets, whatever
      `bucket_cap_mb` says, because gloo refuses the bucketed form (the sums are the same);
    - `torch.cuda.current_stream`, `stream` and `synchronize`, `Tensor.record_stream` and `Tensor.pin_memory`
      do nothing, and so does `Tensor.cuda`, but only within `clip_grad_norm_`;
    - subclasses and `wrapper_cls` work as well, and so do all other arguments of the wrapper.

    Everything is put back on exit, also after an exception, and fairscale's cache of process groups is
    emptied on entering and leaving. Contexts may be nested: the outermost does the work. Where CUDA is
    available this changes nothing at all. The stand-ins belong to the process: do not enter from two threads
    at once.

    What fairscale itself cannot do, it cannot do here: `mixed_precision=True` turns float32 inputs into
    float16 even when `compute_dtype=torch.bfloat16`, so bfloat16 needs inputs that are integers or bfloat16
    already; and at world size 1 its gradients stay in the low precision unless `fp32_reduce_scatter` or
    `move_params_to_cpu` is set, which torch.optim refuses.
    """
    if torch.cuda.is_available() or _CpuStreams.are_in_place():
        yield
        return
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fsdp_module

    streams = _CpuStreams()
    wrapper = fsdp_module.FullyShardedDataParallel
    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (
            (torch.cuda, "current_stream", streams.current),
            (torch.cuda, "stream", streams.use),
            (torch.cuda, "synchronize", streams.synchronize),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
            (fsdp_module, "_get_default_cuda_device", lambda module: cpu),
            (wrapper, "_setup_streams", _with_cpu_streams(wrapper._setup_streams)),
            (wrapper, "clip_grad_norm_", _without_moving_to_cuda(wrapper.clip_grad_norm_)),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        forget_fairscale_groups()
        stack.callback(forget_fairscale_groups)
        yield


def _with_cpu_streams(setup_streams: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(setup_streams)
    def setup(fsdp: Any) -> None:
        is_first_time = fsdp._is_root and not fsdp._streams
        setup_streams(fsdp)
        if is_first_time:  # the children share both objects by now
            for name in ("fp32_to_fp16", "all_gather", "post_backward"):
                fsdp._streams[name] = _CpuStream()
            fsdp._reducer.bucket_cap_mb = 0

    return setup


def _without_moving_to_cuda(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor):
            return method(*args, **kwargs)

    return call


# ----------------------------------------------------------------------------------------------------
# Functions on live local ranks: what the caller sees


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


class RemoteError(FsdpOptimError, RuntimeError):
    """Stands for an exception of a rank that could not be pickled; `type_name` is its class."""

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


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
    """
    pool = _shared_pool(os.getpid())  # a forked child must not talk to its parent's workers
    return pool.run(fn, world_size, *args, timeout=timeout, backend=backend, grace=grace, **kwargs)


@functools.cache
def _shared_pool(pid: int) -> RankPool:
    return RankPool()


class RankPool:
    """A pool of live worker processes, each of which is one rank of a world that lasts for one call of `run`.

    Workers are spawned (not forked) when a call needs more of them than there are, and stay alive, because a
    process that imports torch takes seconds to start. A script that uses a pool needs the usual `if __name__
    == "__main__":`. Close a pool by `close()` or by using it as a context; one that is still open at exit is
    closed then.
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
        """The process ids of the workers that are alive, in the order of the ranks that they become."""
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
_SEED = 0


@dataclass(frozen=True)
class _Task:
    rank: int
    world_size: int
    backend: str
    call_id: int
    timeout: float
    sys_path: list[str]
    cwd: str
    payload: bytes  # fn, args, kwargs; apart, because it can be read only after sys.path is set


@dataclass
class _Outcome:
    """What one rank did: a value, or an error with its traceback."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""


class _Worker:
    """The caller's end of one worker process."""

    def __init__(self, store_port: int, sees_gpus: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_worker_main, args=(theirs, store_port, sees_gpus), name="fsdp_optim rank"
        )
        self.process.start()
        theirs.close()  # so that we see the end of the stream when the worker dies

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
    outcomes: dict[int, _Outcome] = field(default_factory=dict)
    _deadline: float = 0.0
    _released: set[int] = field(default_factory=set)
    _free: set[int] = field(default_factory=set)  # ranks whose worker can take the next call
    _first_failure: float | None = None

    def start(self, payload: bytes, backend: str, call_id: int) -> None:
        self._deadline = time.monotonic() + self.timeout
        for rank, worker in enumerate(self.workers):
            task = _Task(rank, len(self.workers), backend, call_id, self.timeout, sys.path, os.getcwd(), payload)
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
        """The values by rank, or the error that says what went wrong."""
        errors = {rank: o.error for rank, o in sorted(self.outcomes.items()) if o.error is not None}
        unfinished = [rank for rank in range(len(self.workers)) if rank not in self.outcomes]
        if not errors and not unfinished:
            return [self.outcomes[rank].value for rank in range(len(self.workers))]
        if unfinished and (self._first_failure is None or self._deadline <= self._first_failure + self.grace):
            raise RankTimeoutError(
                f"{name}: {_ranks(unfinished)} of {len(self.workers)} did not finish within "
                f"{self.timeout:g} s and had to be killed.{self._report()}"
            )
        for rank in unfinished:
            error = RankTimeoutError(f"killed {self.grace:g} s after another rank failed: it had not finished")
            errors[rank] = error
            self.outcomes[rank] = _Outcome(error=error, text=f"{type(error).__name__}: {error}\n")
        failed = f"{_ranks(sorted(errors))} of {len(self.workers)} failed"
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
                self._released.discard(rank)  # it died: there is nobody to wait for

    def _receive(self, until: float) -> None:
        """Take in messages and deaths: those that are there, or the first to come before `until` and within `_POLL`."""
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

    def _record(self, rank: int, outcome: _Outcome) -> None:
        self.outcomes[rank] = outcome
        if outcome.error is not None and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _record_death(self, rank: int) -> None:
        self._released.discard(rank)
        if rank in self.outcomes:
            return  # it had finished its work, and died when leaving: it will be replaced
        process = self.workers[rank].process
        process.join(1.0)
        error = WorkerDied(f"the process of this rank died, exit code {process.exitcode}", process.exitcode)
        self._record(rank, _Outcome(error=error, text=f"{type(error).__name__}: {error}\n"))

    def _report(self) -> str:
        """What each rank did; ranks with the same traceback share one paragraph."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, outcome in sorted(self.outcomes.items()):
            ranks_by_text.setdefault(outcome.text or f"returned {_short(outcome.value)}\n", []).append(rank)
        return "".join(f"\n\n--- {_ranks(ranks)}:\n{text.rstrip()}" for text, ranks in ranks_by_text.items())


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _read_outcome(message: bytes) -> _Outcome:
    try:
        outcome = pickle.loads(message)
    except Exception as error:  # whatever a result's class raises here, the rank did not deliver
        return _Outcome(error=error, text=f"its result cannot be read here:\n{traceback.format_exc()}")
    assert isinstance(outcome, _Outcome)
    return outcome


# ----------------------------------------------------------------------------------------------------
# The worker's side of a pool


def _worker_main(connection: Connection, store_port: int, sees_gpus: bool) -> None:
    """The life of one worker: task in, outcome out, wait for the others, leave the world, again."""
    # Ctrl-C is the caller's, who then kills the workers of the broken call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if not sees_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # more ranks than GPUs, where NCCL is new enough
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are local: no look-up of the host's name
    store = TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    gc.freeze()  # what torch brought stays: collecting after each call then takes milliseconds
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):  # the caller has closed the pool
        while True:
            task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_outcome_of(task, store))
            connection.recv_bytes()
            _leave_world()
            connection.send_bytes(b"free")


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _outcome_of(task: _Task, store: TCPStore) -> bytes:
    """Run the task; the pickled outcome. Nothing that the task raises gets past this function."""
    try:
        sys.path[:] = task.sys_path
        os.chdir(task.cwd)
        fn, args, kwargs = pickle.loads(task.payload)
        _enter_world(task, store)
        return pickle.dumps(_Outcome(value=fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit too: it is the caller who must hear of it
        text = traceback.format_exc()
        try:
            message = pickle.dumps(_Outcome(error=error, text=text))
            pickle.loads(message)  # some exceptions can be written but not read
        except Exception:  # whatever an exception's class raises when it is pickled
            name = type(error).__name__
            message = pickle.dumps(_Outcome(error=RemoteError(f"{name}: {error}", name), text=text))
        return message


def _enter_world(task: _Task, store: TCPStore) -> None:
    torch.set_num_threads(1)
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "nccl" in task.backend:
        torch.cuda.set_device(task.rank % torch.cuda.device_count())
    dist.init_process_group(
        task.backend,
        store=PrefixStore(f"call{task.call_id}", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout),
    )


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_fairscale_groups()
    _forget_dtensor_meshes()
    gc.collect()  # models are full of cycles, and they hold process groups
    if _take_fsdp_apart():
        gc.collect()
    gc.freeze()  # what is left stays: the next collection does not walk it again


def _take_fsdp_apart() -> bool:
    """Cut what keeps models of torch FSDP and fairscale FSDP alive that nobody uses any more; whether there were any.

    A parameter holds its model, by the hook that sees its gradient and by its list of originals; the model holds the
    parameter. A part of these cycles is in C++, where garbage collection does not see them. Models would live as long as
    the process, with their process groups and the threads of these.
    """
    found = False
    for thing in gc.get_objects():  # what this world has made: what was there before is frozen, and not listed
        if not issubclass(type(thing), torch.Tensor):
            continue
        for name in ("_post_backward_hook_state", "_shard_bwd_hook"):  # of torch and of fairscale
            if name in thing.__dict__:
                found = True
                handle = thing.__dict__.pop(name)[-1]
                hooks = handle.hooks_dict_ref() if type(handle) is RemovableHandle else None
                handle.remove()
                if hooks is not None:  # fairscale forgets the handle of a hook when it adds another
                    hooks.clear()
        if "_param_infos" in thing.__dict__:  # a flat parameter, of either
            found = True
            thing.__dict__.clear()
    return found


def _forget_dtensor_meshes() -> None:
    """Empty DTensor's caches: they find meshes by their ranks, return ones whose groups are gone, and keep these."""
    api = sys.modules.get("torch.distributed.tensor._api")
    if api is not None:
        api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for module, clear in (  # since torch 2.9 or so: some versions have some of them
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_redistribute", "_gen_transform_infos.cache_clear"),
        ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(AttributeError):
            operator.attrgetter(clear)(sys.modules.get(f"torch.distributed.tensor.{module}"))()
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # since torch 2.10
    if clear_fast_path is not None:
        clear_fast_path()
