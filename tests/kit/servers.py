"""Object stores on loopback, in processes of their own: moto's server, and rclone over a folder.

with serving("moto") as options:                 # plain values, which ranks in other processes can be given
    bucket = S3Bucket(new_bucket(options), options)

`shared("moto")` gives the options of a server for all tests of this process, each of which makes a bucket of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Server = Literal["moto", "rclone"]
Options = dict[str, Any]

ACCESS_KEY, SECRET_KEY = "testing-access", "testing-secret-3141592653"
PART_NBYTES = 1024
"""The least size of a part, so that tests need no large ones."""

PAGE_KEYS = 20
"""How many objects moto gives on a page of a listing."""

_START_SECONDS = 60
_NUMBERS = itertools.count()


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def options_for(port: int) -> Options:
    """Storage options for a server on a port of loopback."""
    return {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "region_name": "us-east-1",
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "part_nbytes": PART_NBYTES,
        "retry_seconds": 20,
    }


@contextlib.contextmanager
def serving(kind: Server) -> Iterator[Options]:
    """A server that has no buckets yet; the storage options for it."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):  # another process may take the port first
            port = free_port()
            with _running(_command(kind, port, folder), folder) as process:
                if _answers(process, port):
                    yield options_for(port)
                    return
        raise RuntimeError(f"{kind} does not answer: {Path(folder, 'log').read_text()[-2000:]}")


@functools.cache
def shared(kind: Server) -> Options:
    """A server that serves until this process ends; the storage options for it."""
    held = contextlib.ExitStack()
    options = held.enter_context(serving(kind))
    atexit.register(held.close)
    return options


def port_of(options: Options) -> int:
    """The port of the server that storage options are for."""
    return int(options["endpoint_url"].rpartition(":")[2])


def new_bucket(options: Options) -> str:
    """Make a bucket with a name that this server does not have; the name."""
    name = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    _client(options["endpoint_url"], options["aws_secret_access_key"]).create_bucket(Bucket=name)
    return name


@functools.cache
def _client(endpoint_url: str, secret: str) -> Any:
    import boto3

    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": secret}
    return boto3.Session().client("s3", endpoint_url=endpoint_url, region_name="us-east-1", **keys)


def _command(kind: Server, port: int, folder: str) -> list[str]:
    if kind == "moto":
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    data = Path(folder) / "data"
    data.mkdir(exist_ok=True)
    binary = Path(sys.executable).parent / "rclone"
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    return [str(binary), "serve", "s3", str(data), *address, "--config", ""]


@contextlib.contextmanager
def _running(command: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with an environment that has no credentials; it is stopped for sure."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_", "MOTO_"))}
    env |= {
        "S3_UPLOAD_PART_MIN_SIZE": "1",
        "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE_KEYS),
        "PYTHONWARNINGS": "ignore",
        "HOME": folder,
    }
    with open(Path(folder) / "log", "wb") as log:
        # The shell ends the server also when this process is killed: then its input ends.
        guarded = ["/bin/sh", "-c", '"$@" & server=$!; read end; kill -9 $server; wait $server', "server", *command]
        process = subprocess.Popen(guarded, env=env, stdout=log, stderr=log, stdin=subprocess.PIPE, cwd=folder)
        try:
            yield process
        finally:
            process.communicate()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; whether it does."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse().read()
            return True
        connection.close()
        time.sleep(0.05)
    return False
