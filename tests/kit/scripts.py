"""Python code in a process of its own that ends as any other: forked from a server that has torch, in a tenth of the time.

    done = run("import os; print(os.getpid())")        # as subprocess.run([sys.executable, "-c", ...]), for the result
    started = start("...", preload=("torch", "fsdp_optim"))
    started.wait(timeout=90)

A process that imports torch takes seconds of a core to start. There is a server for each choice of what scripts find imported.
Each is forked from the one that has the first module of its choice only, and those from the one that has torch.
The code is run as a file, as `__main__`, and ends with the interpreter: exit handlers run, and threads are waited for.
"""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KIT = Path(__file__).parents[1]
TRAINING = ("torch._dynamo", "fsdp_optim", "kit.checkpoints")
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
        "path": [str(one) for one in path],
        "cwd": os.getcwd(),
        "environment": dict(os.environ if environment is None else environment),
    }
    server = _server(tuple(preload), os.getpid())
    with open(Path(folder.name, "out"), "wb") as out, open(Path(folder.name, "err"), "wb") as err:
        pid, ours = _send(server, order, out.fileno(), err.fileno())
    return Started(pid, ours, folder)


def serve_from(code: str, preload: Sequence[str], fds: Sequence[int]) -> int:
    """Start Python code that serves until its caller ends, with open files that it finds under these numbers; its process id."""
    order = {"code": code, "path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ), "fds": list(fds)}
    pid, ours = _send(_server(tuple(preload), os.getpid()), order, 1, 2, *fds)
    ours.close()
    return pid


def _send(server: socket.socket, order: Mapping[str, Any], *fds: int) -> tuple[int, socket.socket]:
    """Have a process forked that follows an order; its number, and where its exit code will come.

    `fds`: its output and its errors, and for one that becomes a server the connection to that.
    """
    message = json.dumps(order).encode()
    if len(message) > LONGEST:
        raise ValueError(f"an order of {len(message)} bytes is longer than {LONGEST}")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(server, [message], [theirs.fileno(), *fds])
    return int(ours.recv(64)), ours


@functools.cache
def _server(preload: tuple[str, ...], pid: int) -> socket.socket:
    """The connection to a server of this process."""
    first = preload[:1] if len(preload) > 1 else BASE
    base = _server(first, pid) if preload != BASE else None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if base is not None:
            _send(base, {"preload": preload}, 1, 2, theirs.fileno())[1].close()
            atexit.register(ours.close)
            return ours
        command = [sys.executable, "-m", "kit.scripts", str(theirs.fileno()), *preload]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(KIT), str(KIT.parent)])}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


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
                for one in (control, *children.values()):
                    one.close()
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
