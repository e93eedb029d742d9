"""Ranks of a file's own, which find a trainer's package imported: they are forked from a server that has imported it once.

    LOADED = ("kit.loaded.verl",)  # in a file of tests/integrations, whose conftest asks for it

Each rank would take seconds to import such a package. The ranks are new processes: they have nothing of other files' ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import Any
from unittest import mock

from fsdp_optim.testing import RankPool


@contextlib.contextmanager
def own_ranks(loaded: Sequence[str] = ()) -> Iterator[None]:
    """New processes for the calls of `run_on_ranks` inside; they end with it. `loaded`: modules that they find imported."""
    for name in loaded:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"{name}, which ranks are to find imported")  # a server passes over what is not there
    with contextlib.ExitStack() as stack:
        if loaded:
            stack.enter_context(mock.patch.multiple(forkserver, **_server(tuple(loaded), os.getpid())))
        pool = stack.enter_context(RankPool())
        stack.enter_context(mock.patch("fsdp_optim.testing.ranks._shared_pool", return_value=pool))
        yield


@functools.cache
def _server(loaded: tuple[str, ...], pid: int) -> dict[str, Any]:
    """The functions of `multiprocessing.forkserver` for a server with these modules, which all files with the same ones share."""
    server = forkserver.ForkServer()

    def set_forkserver_preload(modules: Sequence[str]) -> None:
        server.set_forkserver_preload([*modules, *loaded])
        with mock.patch.dict(
            os.environ, PYTHONPATH=os.pathsep.join(sys.path)
        ):  # which Python 3.11 does not tell a server
            server.ensure_running()

    return {"set_forkserver_preload": set_forkserver_preload, "connect_to_new_process": server.connect_to_new_process}
