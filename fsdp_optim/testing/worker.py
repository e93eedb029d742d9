"""The worker's side of a pool of ranks: a process that runs one task after another, each as one rank of a new world."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import operator
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not re-exported
from torch.utils.hooks import RemovableHandle

from fsdp_optim.errors import FsdpOptimError
from fsdp_optim.testing.fairscale_cpu import forget_fairscale_groups

_SEED = 0


class RemoteError(FsdpOptimError, RuntimeError):
    """Stands for an exception of a rank that could not be pickled; `type_name` is its class."""

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


@dataclass(frozen=True)
class Task:
    """One rank's part of one call: a function, and the world in which to run it."""

    rank: int
    world_size: int
    backend: str
    call_id: int
    timeout: float
    sys_path: list[str]
    cwd: str
    payload: bytes  # fn, args, kwargs; apart, because it can be read only after sys.path is set


@dataclass
class Outcome:
    """The outcome of one rank: a value, or an error with its traceback."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""


def worker_main(connection: Connection, store_port: int, sees_gpus: bool, environment: dict[str, str]) -> None:
    """Run a worker: receive a task, send its outcome, wait for the other ranks, leave the world, and repeat."""
    os.environ.clear()  # a server process that this one was forked from may be older than the caller's variables
    os.environ.update(environment)
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


def _outcome_of(task: Task, store: TCPStore) -> bytes:
    """Run the task and return the pickled outcome. Every exception of the task becomes part of the outcome."""
    try:
        sys.path[:] = task.sys_path
        os.chdir(task.cwd)
        fn, args, kwargs = pickle.loads(task.payload)
        _enter_world(task, store)
        return pickle.dumps(Outcome(value=fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit too: it is the caller who must hear of it
        text = traceback.format_exc()
        try:
            message = pickle.dumps(Outcome(error=error, text=text))
            pickle.loads(message)  # some exceptions can be written but not read
        except Exception:  # whatever an exception's class raises when it is pickled
            name = type(error).__name__
            message = pickle.dumps(Outcome(error=RemoteError(f"{name}: {error}", name), text=text))
        return message


def _enter_world(task: Task, store: TCPStore) -> None:
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
    gc.freeze()  # the remaining objects stay: the next collection does not walk them again


def _take_fsdp_apart() -> bool:
    """Cut the references that keep unused models of torch FSDP and fairscale FSDP alive; return whether there were any.

    A parameter holds its model, by the hook that sees its gradient and by its list of originals; the model holds the
    parameter. A part of these cycles is in C++, where garbage collection does not see them. Models would live as long as
    the process, with their process groups and the threads of these.
    """
    has_models = False
    for candidate in gc.get_objects():  # what this world has made: what was there before is frozen, and not listed
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for name in ("_post_backward_hook_state", "_shard_bwd_hook"):  # of torch and of fairscale
            if name in candidate.__dict__:
                has_models = True
                handle = candidate.__dict__.pop(name)[-1]
                hooks = handle.hooks_dict_ref() if type(handle) is RemovableHandle else None
                handle.remove()
                if hooks is not None:  # fairscale forgets the handle of a hook when it adds another
                    hooks.clear()
        if "_param_infos" in candidate.__dict__:  # a flat parameter, of either
            has_models = True
            candidate.__dict__.clear()
    return has_models


def _forget_dtensor_meshes() -> None:
    """Empty DTensor's caches, which would return meshes of earlier worlds, whose process groups are gone."""
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
