"""Ranks of a file's own, which find a trainer's package imported: they are forked from a server that has imported it once.

    LOADED = ("kit.loaded.verl",)  # in a file of tests/integrations, whose conftest asks for it

Each rank would take seconds to import such a package. The ranks are new processes: they have nothing of other files' ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver, util
from typing import Any
from unittest import mock

from fsdp_optim.testing import RankPool
from kit.scripts import serve_from

RANKS = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "fairscale.nn", "fsdp_optim.testing.worker")
SPAWN = util.spawnv_passfds


@contextlib.contextmanager
def own_ranks(loaded: Sequence[str] = ()) -> Iterator[None]:
    """New processes for the calls of `run_on_ranks` inside; they end with it. `loaded`: modules that they find imported."""
    for name in loaded:
        if find_spec(name) is None:  # a server passes over a module that is not there
            raise ModuleNotFoundError(f"{name}, which ranks are to find imported")
    with contextlib.ExitStack() as stack:
        if loaded:
            stack.enter_context(mock.patch.multiple(forkserver, **_server(tuple(loaded), os.getpid())))
        pool = stack.enter_context(RankPool())
        stack.enter_context(mock.patch("fsdp_optim.testing.ranks._shared_pool", return_value=pool))
        yield


def forked_ranks() -> contextlib.AbstractContextManager[Any]:
    """The server of the ranks inside is forked from one that has torch (`kit.scripts`), so that it need not import torch."""
    return mock.patch.multiple(forkserver, **_server((), os.getpid()))


class _Server(forkserver.ForkServer):
    """A server process of `multiprocessing` that is no child of this one."""

    def __init__(self) -> None:
        super().__init__()
        self._starting = threading.Lock()  # two pools may start at the same time

    def ensure_running(self) -> None:
        with self._starting:
            if self._forkserver_pid is None:  # type: ignore[attr-defined]  # it lasts as long as this process
                with mock.patch("multiprocessing.util.spawnv_passfds", _start):
                    super().ensure_running()


def _start(path: Any, command: Sequence[str], fds: Sequence[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`, for a server that has what all ranks find imported."""
    if "forkserver" not in command[-1]:  # the tracker of resources, which is started before the first server
        return SPAWN(path, command, fds)
    return serve_from(command[-1], ("torch._dynamo", *RANKS), fds)


@functools.cache
def _server(loaded: tuple[str, ...], pid: int) -> dict[str, Any]:
    """The functions of `multiprocessing.forkserver` for a server with these modules, which all files with the same ones share."""
    server = _Server()

    def set_forkserver_preload(modules: Sequence[str]) -> None:
        server.set_forkserver_preload([*modules, *loaded])
        server.ensure_running()

    return {"set_forkserver_preload": set_forkserver_preload, "connect_to_new_process": server.connect_to_new_process}
