"""Processes that are forked from a server which has imported what they need: in a tenth of the time that imports would take.

    done = run("import os; print(os.getpid())")              # code, as subprocess.run([sys.executable, "-c", ...])
    started = start("...", preload=LIBRARY)                  # the same, not waited for
    started.wait(timeout=90)
    done = run_program("examples/train.py", "--root", folder)        # a program of this repository
    done = launch(2, "examples/pipeline.py", "--root", folder)       # on ranks, as torchrun starts them
    with own_ranks(("kit.loaded.verl",)): ...                        # the ranks of run_on_ranks
    assert not done.returncode, done.stderr

There is a server for each choice of modules, `preload`. Each is forked from the one that has the first module of its choice only,
and those from the one that has torch. The processes of `make test-all` share them through a hub (`shared_servers`): a module is
imported once for all of them, and each gets a server of its own, forked from the one with these modules. Code is run as a file,
as `__main__`, and ends with the interpreter: exit handlers run, and threads are waited for. This module is what the servers run,
so that at its top it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parents[1]
LIBRARY = ("torch", "kit.loaded.library")
"""The modules that code finds imported which calls this library, or one of its commands."""

BUCKETS = (*LIBRARY, "boto3")
"""The modules that code finds imported which reads and writes buckets of S3."""

TRAINING = ("torch._dynamo", "kit.loaded.library", "kit.checkpoints")
"""The modules that scripts which train find imported: one choice, so that the scripts share a server."""

WITHOUT_FAIRSCALE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
"""The modules that scripts find imported which train as if fairscale were not installed."""

BASE = ("torch",)
"""The imports of the server that the others are forked from."""

LONGEST = 200_000  # bytes of an order: what one packet carries


@dataclasses.dataclass
class Started:
    """A process that has been started; `returncode` as of `subprocess.Popen`, once it has ended."""

    pid: int
    _reply: socket.socket
    _folder: tempfile.TemporaryDirectory[str]
    returncode: int | None = None
    stdout: str = ""
    stderr: str = ""

    def wait(self, timeout: float = 120.0) -> Started:
        """Wait for its end; kill it where it does not end in time."""
        with self._reply, self._folder:
            if not select.select([self._reply], [], [], timeout)[0]:
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = int(self._reply.recv(64))
            self.stdout, self.stderr = (Path(self._folder.name, name).read_text() for name in ("out", "err"))
        return self


def run(code: str, timeout: float = 120.0, **options: Any) -> Started:
    """Run Python code until it ends; `options` as of `start`."""
    return start(code, **options).wait(timeout)


def start(
    code: str,
    preload: Sequence[str] = ("torch",),
    path: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Started:
    """Start Python code. `preload`: modules that it finds imported; `path`: where else it finds modules."""
    folder = tempfile.TemporaryDirectory()
    script = Path(folder.name, "script.py")
    script.write_text(code)
    order = {
        "script": str(script),
        "path": [str(entry) for entry in path],
        "cwd": os.getcwd(),
        "environment": dict(os.environ if environment is None else environment),
    }
    server = _server(tuple(preload), os.getpid())
    with open(Path(folder.name, "out"), "wb") as out, open(Path(folder.name, "err"), "wb") as err:
        pid, reply = _send(server, order, out.fileno(), err.fileno())
    return Started(pid, reply, folder)


def serve_from(code: str, preload: Sequence[str], fds: Sequence[int]) -> int:
    """Start Python code that serves until its caller ends, with open files that it finds under these numbers; its process id."""
    order = {"code": code, "path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ), "fds": list(fds)}
    pid, reply = _send(_server(tuple(preload), os.getpid()), order, 1, 2, *fds)
    reply.close()
    return pid


def _send(server: socket.socket, order: Mapping[str, Any], *fds: int) -> tuple[int, socket.socket]:
    """Have a process forked that follows an order; its number, and where its exit code will come.

    `fds`: its output and its errors, and for one that becomes a server the connection to that.
    """
    message = json.dumps(order).encode()
    if len(message) > LONGEST:
        raise ValueError(f"an order of {len(message)} bytes is longer than {LONGEST}")
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with child_end:
        socket.send_fds(server, [message], [child_end.fileno(), *fds])
    return int(own_end.recv(64)), own_end


@functools.cache
def _server(preload: tuple[str, ...], pid: int) -> socket.socket:
    """The connection to a server of this process."""
    own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server_end:
        if HUB in os.environ:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hub:
                hub.connect(os.environ[HUB])
                socket.send_fds(hub, [json.dumps(preload).encode()], [1, 2, server_end.fileno()])
        elif preload == BASE:
            _start_process(own_end, server_end, *preload)
        else:
            base = _server(preload[:1] if len(preload) > 1 else BASE, pid)
            _send(base, {"preload": preload}, 1, 2, server_end.fileno())[1].close()
    atexit.register(own_end.close)
    return own_end


def _start_process(own_end: socket.socket, server_end: socket.socket, *arguments: str) -> None:
    """Run this file as a program with one end of a connection. It ends, and is waited for, when this process ends."""
    command = [sys.executable, "-m", "kit.forked", str(server_end.fileno()), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    process = subprocess.Popen(command, pass_fds=[server_end.fileno()], env=environment)

    def end() -> None:
        own_end.close()
        process.wait()

    atexit.register(end)


# ------------------------------------------------------------------------------------------ a hub


HUB = "FORKED_HUB"
"""The variable with the address of the hub, for the processes that are started by the one that has made it."""


def shared_servers() -> None:
    """Have the processes that this one starts share the servers of a hub, which ends with this process."""
    folder = tempfile.mkdtemp(prefix="hub-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(os.path.join(folder, "door"))
        door.listen(64)
        own_end, hub_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with hub_end:
            _start_process(own_end, hub_end)
        socket.send_fds(own_end, [b"door"], [door.fileno()])
    atexit.register(shutil.rmtree, folder)
    os.environ[HUB] = os.path.join(folder, "door")


def serve_at_door(caller: socket.socket) -> None:
    """Give each process that comes to the door a server with the modules that it names, until the caller ends."""
    _, (fd,), _, _ = socket.recv_fds(caller, 64, 1)
    making = threading.Lock()

    def give(guest: socket.socket) -> None:
        with guest:
            preload, fds, _, _ = socket.recv_fds(guest, LONGEST, 3)
        with making:
            server = _server(tuple(json.loads(preload)), os.getpid())
        _send(server, {"preload": []}, *fds)[1].close()  # once the server has imported its modules
        for each in fds:
            os.close(each)

    with socket.socket(fileno=fd) as door:
        while caller not in select.select([caller, door], [], [])[0]:
            threading.Thread(target=give, args=(door.accept()[0],), daemon=True).start()


# ------------------------------------------------------------------------------------------ programs


PROGRAM = """
import runpy, sys
from kit.imports import hide
for package in {hidden!r}:
    hide(package)
import torch
torch.set_num_threads(1)
sys.argv[:] = {words!r}
runpy.run_path({path!r}, run_name="__main__")
"""


def launch(
    num_ranks: int,
    program: str | Path,
    *arguments: str,
    preload: Sequence[str] = TRAINING,
    hidden: Sequence[str] = (),
    timeout: float = 300.0,
) -> Started:
    """Run a program of this repository on CPUs, as torchrun does, until all ranks have ended.

    Returns the first of them that failed, or else rank 0. `hidden`: as of `start_ranks`.
    """
    ranks = start_ranks(num_ranks, program, *arguments, preload=preload, hidden=hidden)
    end = time.monotonic() + timeout
    done = [started.wait(max(end - time.monotonic(), 0.0)) for started in ranks]
    return next((ended for ended in done if ended.returncode), done[0])


def start_ranks(
    num_ranks: int,
    program: str | Path,
    *arguments: str,
    preload: Sequence[str] = TRAINING,
    hidden: Sequence[str] = (),
) -> list[Started]:
    """Start a program of this repository on CPUs, as torchrun does; the processes of its ranks, which are not waited for.

    `hidden`: packages that the program cannot find, of which `preload` must load none.
    """
    from kit.servers import free_port

    path = str(TESTS.parent / program)
    code = PROGRAM.format(words=[path, *arguments], path=path, hidden=list(hidden))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in map(str, range(num_ranks)):
        environment = {**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(start(code, preload=preload, environment=environment))
    return ranks


def run_program(
    program: str | Path, *arguments: str, preload: Sequence[str] = TRAINING, timeout: float = 300.0
) -> Started:
    """Run a program of this repository in one process without a launcher."""
    path = str(TESTS.parent / program)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return start(PROGRAM.format(words=[path, *arguments], path=path, hidden=[]), preload, environment=environment).wait(
        timeout
    )


# ------------------------------------------------------------------------------------------ ranks


RANKS = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "fairscale.nn", "fsdp_optim.testing.worker"),
    *(
        "kit.loaded.library",
        "kit.checkpoints",
        "pytest",
        "parameterized",
    ),  # which most files of tests import on each rank
    *("kit.cases", "kit.shards", "kit.setups", "kit.training", "torch.distributed.optim"),
)
SPAWN = util.spawnv_passfds


@contextlib.contextmanager
def own_ranks(loaded: Sequence[str] = ()) -> Iterator[None]:
    """New processes for the calls of `run_on_ranks` inside; they end with it. `loaded`: modules that they find imported.

        LOADED = ("kit.loaded.verl",)  # in a file of tests/integrations, whose conftest asks for it

    They have nothing of other files' ranks.
    """
    from fsdp_optim.testing import RankPool

    for name in loaded:
        if find_spec(name) is None:  # a server passes over a module that is not there
            raise ModuleNotFoundError(f"{name}, which ranks are to find imported")
    with contextlib.ExitStack() as stack:
        if loaded:
            stack.enter_context(mock.patch.multiple(forkserver, **_ranks_from(tuple(loaded), os.getpid())))
        pool = stack.enter_context(RankPool())
        stack.enter_context(mock.patch("fsdp_optim.testing.ranks._shared_pool", return_value=pool))
        yield


def forked_ranks() -> contextlib.AbstractContextManager[Any]:
    """The server of the ranks inside is forked from one that has torch (`run`), so that it need not import torch."""
    return mock.patch.multiple(forkserver, **_ranks_from((), os.getpid()))


class _ForkServer(forkserver.ForkServer):
    """A server process of `multiprocessing` that is no child of this one."""

    def __init__(self) -> None:
        super().__init__()
        self._starting = threading.Lock()  # two pools may start at the same time

    def ensure_running(self) -> None:
        with self._starting:
            if self._forkserver_pid is None:  # type: ignore[attr-defined]  # it lasts as long as this process
                with mock.patch("multiprocessing.util.spawnv_passfds", _start_forkserver):
                    super().ensure_running()


def _start_forkserver(path: Any, command: Sequence[str], fds: Sequence[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`, for a server that has what all ranks find imported."""
    if "forkserver" not in command[-1]:  # the tracker of resources, which is started before the first server
        return SPAWN(path, command, fds)
    return serve_from(command[-1], ("torch._dynamo", *RANKS), fds)


@functools.cache
def _ranks_from(loaded: tuple[str, ...], pid: int) -> dict[str, Any]:
    """The functions of `multiprocessing.forkserver` for a server with these modules, which all files with the same ones share."""
    server = _ForkServer()

    def set_forkserver_preload(modules: Sequence[str]) -> None:
        server.set_forkserver_preload([*modules, *loaded])
        server.ensure_running()

    return {"set_forkserver_preload": set_forkserver_preload, "connect_to_new_process": server.connect_to_new_process}


# ------------------------------------------------------------------------------------------ the server's side


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Returns in the child, with its order; in the server, with None, when nobody can give more."""
    children: dict[int, socket.socket] = {}
    while True:
        if select.select([control], [], [], 0.02 if children else None)[0]:
            message, fds, _, _ = socket.recv_fds(control, LONGEST, 8)
            if not message:
                return None
            pid = os.fork()
            reply, out, err, *more = fds
            if pid == 0:
                for connection in (control, *children.values()):
                    connection.close()
                os.dup2(out, 1)
                os.dup2(err, 2)
                for fd in (reply, out, err):
                    os.close(fd)
                return {**json.loads(message), "files": more}
            for fd in (out, err, *more):
                os.close(fd)
            children[pid] = socket.socket(fileno=reply)
            children[pid].send(str(pid).encode())
            if more:  # a server, whose end nobody waits for
                children.pop(pid).close()
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with children.pop(pid) as reply:
                    reply.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(order: Mapping[str, Any]) -> None:
    """Take over what a process that is started by itself has from its caller."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    sys.path[:0] = order["path"]
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in order["files"]]  # the numbers may be in use among themselves
    for fd, number in zip(aside, order.get("fds", ()), strict=True):
        os.dup2(fd, number)
    for fd in {*aside, *order["files"]} - set(order.get("fds", ())):
        os.close(fd)


def run_order(order: Mapping[str, Any]) -> None:
    """Run the code or the script of an order."""
    become(order)
    if "code" in order:
        exec(order["code"], {"__name__": "__main__"})
    else:
        sys.argv = [order["script"]]
        runpy.run_path(order["script"], run_name="__main__")


if __name__ == "__main__":
    got: dict[str, Any] | None = {"preload": sys.argv[2:], "files": [int(sys.argv[1])]}
    if not sys.argv[2:]:
        serve_at_door(socket.socket(fileno=int(sys.argv[1])))
        got = None
    while got is not None and "preload" in got:
        gc.disable()
        for name in got["preload"]:
            __import__(name)
        gc.collect()
        gc.enable()
        gc.freeze()  # a forked process then ends in a third of the time: it need not walk, and so copy, what was imported
        got = serve(socket.socket(fileno=got["files"][0]))
    if got is not None:
        run_order(got)
