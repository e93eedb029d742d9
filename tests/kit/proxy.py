"""A proxy between a client and an object store of the tests: it breaks the requests that a script names, and counts requests.

    with Proxy(port_of(options), [Fault("SlowDown", method="PUT", times=3)], seed=1) as proxy:
        bucket = S3Bucket(name, proxy.options(options))
        ...
    proxy.body_nbytes(method="GET", key="model.safetensors")

`nbytes_per_second` limits each connection, as large stores do.

Each request is answered by the first fault of the script that fits it and is not used up, or by the server. One request goes over
one connection. Requests reach the server as they are, with the Host that the client has signed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import re
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from kit.servers import Options

Kind = Literal[
    "SlowDown",  # 503, and the server does not see the request
    "TooMany",  # 429
    "ExpiredToken",  # 400
    "Answer",  # `status`, with `body`
    "ResetRequest",  # the connection breaks in the middle of the body of the request
    "ResetAnswer",  # the server has done what it was asked for, and the connection breaks in the middle of its answer
    "Damage",  # a byte of the body changes on the way; the answer is 400, as that of S3, where the checksum `found_by` shows it
    "Truncate",  # the body of the answer ends too early, and the connection is closed in order
    "Delay",  # `seconds` before the answer
    "Stale",  # the answer to the same request before
]

_BLOCK = 1 << 16


@dataclass
class Fault:
    """A fault, the requests that it meets, and how often.

    Attributes:
        method, key, query: the requests that it fits: a method, the end of a key, a part of the query; "" fits any.
        times: how many requests it breaks; -1: all.
        skip: how many requests that fit pass before.
        every: of the requests that fit, each which it breaks: 3 for the third, the sixth...
        share: the probability with which it breaks a request that fits.
        where: in which part of a body it breaks, from 0 to 1; None: anywhere.
        found_by: which checksum of the request shows damage: "crc32", or the "sha256" of its signature.
        then: what happens meanwhile.
    """

    kind: Kind
    method: str = ""
    key: str = ""
    query: str = ""
    times: int = 1
    skip: int = 0
    every: int = 1
    share: float = 1.0
    where: float | None = None
    found_by: Literal["crc32", "sha256"] = "crc32"
    seconds: float = 0.0
    status: int = 403
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    then: Callable[[], object] = str
    num_fit: int = field(default=0, init=False)
    num_done: int = field(default=0, init=False)


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    key: str
    query: str
    head: bytes
    nbytes: int
    waits: bool  # for `100 Continue`
    access_key: str


@dataclass(frozen=True)
class Seen:
    """One request that came, and the bytes of the bodies that passed."""

    method: str
    key: str
    query: str
    access_key: str
    sent: int
    received: int


class Proxy:
    """A proxy in this process, on threads, in front of a server on a port of loopback."""

    def __init__(
        self, port: int, script: Sequence[Fault] = (), *, seed: int = 0, nbytes_per_second: float | None = None
    ) -> None:
        self._nbytes_per_second = nbytes_per_second
        self.script, self.seen = list(script), list[Seen]()
        self.most_delayed = self._num_delayed = 0  # requests at the same time
        self.num_refused = 0  # bodies that did not fit their checksums
        self._to, self._rng, self._lock = port, random.Random(seed), threading.Lock()
        self._num_open, self._is_idle = 0, threading.Condition(self._lock)
        self._before: dict[str, bytes] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()

    def options(self, options: Options) -> Options:
        """Storage options that lead through this proxy."""
        return {**options, "endpoint_url": f"http://127.0.0.1:{self.port}"}

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def requests(self, *, method: str = "", key: str = "", query: str = "") -> list[Seen]:
        """The requests that came, by method, end of key and part of the query, when none is under way."""
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._num_open, 30)
            return [request for request in self.seen if _fits(request, method, key, query)]

    def num_requests(self, *, method: str = "", key: str = "", query: str = "") -> int:
        """How many came."""
        return len(self.requests(method=method, key=key, query=query))

    def body_nbytes(self, *, method: str, key: str = "") -> int:
        """The bytes of bodies that passed: of answers to GET, of requests otherwise."""
        passed = self.requests(method=method, key=key)
        return sum(request.received if method == "GET" else request.sent for request in passed)

    def by_key(self, method: str) -> Counter[str]:
        """The bytes of bodies that passed, by key."""
        counted: Counter[str] = Counter()
        for request in self.requests(method=method):
            counted[request.key] += request.received if method == "GET" else request.sent
        return counted

    def _start(self, run: Any, *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with self._kept(client), contextlib.suppress(OSError):
            request = _read_request(client)
            if request is not None:
                self._answer(client, request)

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _fault_for(self, request: _Request) -> Fault | None:
        with self._lock:
            for fault in self.script:
                if not fault.times or not _fits(request, fault.method, fault.key, fault.query):
                    continue
                if fault.kind == "Stale" and request.target not in self._before:
                    continue
                fault.num_fit += 1
                if fault.num_fit <= fault.skip or (fault.num_fit - fault.skip) % fault.every:
                    continue
                if self._rng.random() < fault.share:
                    fault.times -= 1
                    fault.num_done += 1
                    return fault
        return None

    def _answer(self, client: socket.socket, request: _Request) -> None:
        fault = self._fault_for(request)
        kind = "" if fault is None else fault.kind
        sent = received = 0
        with self._lock:
            self._num_open += 1
        try:
            if fault is not None:
                fault.then()
            if fault is not None and kind in ("SlowDown", "TooMany", "ExpiredToken", "Answer"):
                sent = self._refuse(client, request, fault)
            elif fault is not None and kind == "ResetRequest":
                sent = self._pass_body(client, None, request, int(request.nbytes * self._where(fault)))
                _reset(client)
            elif fault is not None and kind == "Damage":
                sent, received = self._damage(client, request, fault)
            elif kind == "Stale":
                sent = self._pass_body(client, None, request, request.nbytes)
                client.sendall(self._before[request.target])
            else:
                if fault is not None and kind == "Delay":
                    self._delay(fault.seconds)
                sent, received = self._forward(client, request, fault)
        finally:
            with self._is_idle:
                self._num_open -= 1
                self._is_idle.notify_all()
                self.seen.append(Seen(request.method, request.key, request.query, request.access_key, sent, received))

    def _delay(self, seconds: float) -> None:
        with self._lock:
            self._num_delayed += 1
            self.most_delayed = max(self.most_delayed, self._num_delayed)
        time.sleep(seconds)
        with self._lock:
            self._num_delayed -= 1

    def _where(self, fault: Fault) -> float:
        with self._lock:
            return self._rng.random() if fault.where is None else fault.where

    def _refuse(self, client: socket.socket, request: _Request, fault: Fault) -> int:
        known = {
            "SlowDown": (503, _error("SlowDown", "Please reduce your request rate.")),
            "TooMany": (429, _error("TooManyRequests", "Too many requests.")),
            "ExpiredToken": (400, _error("ExpiredToken", "The provided token has expired.")),
        }
        status, body = known.get(fault.kind, (fault.status, fault.body))
        sent = 0 if request.waits else self._pass_body(client, None, request, request.nbytes)
        head = [f"HTTP/1.1 {status} No", "Connection: close", "Content-Type: application/xml"]
        head += [f"{name}: {value}" for name, value in fault.headers.items()]
        if request.method == "HEAD":
            body = ""
        head.append(f"Content-Length: {len(body.encode())}")
        client.sendall("\r\n".join([*head, "", body]).encode())
        return sent

    def _damage(self, client: socket.socket, request: _Request, fault: Fault) -> tuple[int, int]:
        """Answer what S3 would to a body that came damaged; to one whose checksum is right, or that has none, the server does."""
        body = self._taken(client, request)
        if body:
            body[min(int(len(body) * self._where(fault)), len(body) - 1)] ^= 1
        code = _misfit(request.head, bytes(body), fault.found_by)
        if code is None:
            return self._forward(client, request, fault, bytes(body))
        with self._lock:
            self.num_refused += 1
        error = _error(code, f"The {fault.found_by} you specified did not match the calculated checksum.")
        head = f"HTTP/1.1 400 No\r\nConnection: close\r\nContent-Type: application/xml\r\nContent-Length: {len(error)}\r\n\r\n"
        client.sendall((head + error).encode())
        return len(body), 0

    def _taken(self, client: socket.socket, request: _Request) -> bytearray:
        """The whole body of a request."""
        if request.waits and request.nbytes:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        while len(body) < request.nbytes:
            block = client.recv(min(_BLOCK, request.nbytes - len(body)))
            if not block:
                raise ConnectionError("the client has gone")
            body += block
        return body

    def _pass_body(self, client: socket.socket, server: socket.socket | None, request: _Request, nbytes: int) -> int:
        """Take the beginning of the body of a request, and send it on, if there is a server to send it to."""
        if request.waits and request.nbytes:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        done, wait = 0, self._pace()
        while done < nbytes:
            block = client.recv(min(_BLOCK, nbytes - done))
            if not block:
                raise ConnectionError("the client has gone")
            if server is not None:
                server.sendall(block)
            done += len(block)
            wait(done)
        return done

    def _pace(self) -> Callable[[int], None]:
        """A function that waits until a connection may have passed so many bytes."""
        begin, limit = time.monotonic(), self._nbytes_per_second

        def wait(nbytes: int) -> None:
            if limit is not None:
                time.sleep(max(0.0, begin + nbytes / limit - time.monotonic()))

        return wait

    def _forward(
        self, client: socket.socket, request: _Request, fault: Fault | None, taken: bytes | None = None
    ) -> tuple[int, int]:
        """Let the server answer. `taken`: the body, if it was taken from the client already."""
        with socket.create_connection(("127.0.0.1", self._to)) as server, self._kept(server):
            server.sendall(request.head)
            if taken is not None:
                server.sendall(taken)
            sent = self._pass_body(client, server, request, request.nbytes) if taken is None else len(taken)
            answer, rest = _read_head(server)
            while answer.split(b" ", 2)[1:2] == [b"100"]:
                answer, rest = _read_head(server, rest)
            breaks = fault is not None and fault.kind in ("ResetAnswer", "Truncate")
            if not breaks:
                client.sendall(_closing(answer))
            length = _length_of(answer, request.method)
            keeps = request.method == "GET" and "list-type=2" in request.query
            body, received = [rest], len(rest)
            if breaks or keeps or length is None:  # small, or cut short anyway
                while length is None or received < length:
                    block = server.recv(_BLOCK)
                    if not block:
                        break
                    body.append(block)
                    received += len(block)
            whole = b"".join(body)
            if breaks:
                assert fault is not None
                cut = int(len(whole) * self._where(fault))
                if fault.kind == "Truncate" or request.nbytes == 0:
                    client.sendall(_closing(answer) + whole[:cut])
                if fault.kind == "ResetAnswer":
                    _reset(client)
                return sent, cut
            client.sendall(whole)
            wait = self._pace()
            while length is not None and received < length:
                block = server.recv(min(_BLOCK, length - received))
                if not block:
                    break
                client.sendall(block)
                received += len(block)
                wait(received)
            if keeps:
                self._before.setdefault(request.target, _closing(answer) + whole)
            return sent, received


def _fits(request: Any, method: str, key: str, query: str) -> bool:
    return method in ("", request.method) and request.key.endswith(key) and query in request.query


def _misfit(head: bytes, body: bytes, by: str) -> str | None:
    """The code of the answer to a body without the checksum that its head names; None where it has it, or the head names none."""
    if by == "sha256":
        signed = re.search(rb"(?im)^x-amz-content-sha256: *([0-9a-f]{64})\r$", head)
        fits = signed is None or bytes.fromhex(signed[1].decode()) == hashlib.sha256(body).digest()
        return None if fits else "XAmzContentSHA256Mismatch"
    declared = re.search(rb"(?im)^x-amz-checksum-crc32: *([^\r]*)\r$", head)
    return (
        None
        if declared is None or base64.b64decode(declared[1]) == zlib.crc32(body).to_bytes(4, "big")
        else "BadDigest"
    )


def _error(code: str, message: str) -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'


def _read_head(connection: socket.socket, data: bytes = b"") -> tuple[bytes, bytes]:
    """The head of a message, and the bytes of its body that came."""
    while b"\r\n\r\n" not in data:
        block = connection.recv(_BLOCK)
        if not block:
            return b"", b""
        data += block
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _read_request(client: socket.socket) -> _Request | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte: the body stays in the socket
        block = client.recv(1)
        if not block:
            return None
        head += block
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
    path, _, query = target.partition("?")
    key = unquote(path).lstrip("/").partition("/")[2]
    waits = re.search(rb"(?im)^expect: *100-continue\r$", head) is not None
    # The proxy answers `Expect` itself, and each connection has one request.
    passed = re.sub(rb"(?im)^(connection|expect):[^\r]*\r\n", b"", head)[:-2] + b"Connection: close\r\n\r\n"
    signed = re.search(rb"(?i)credential=([^/]*)/", head)
    access_key = signed[1].decode() if signed else ""
    return _Request(method, target, key, unquote(query), passed, _length_of(head, "") or 0, waits, access_key)


def _length_of(head: bytes, method: str) -> int | None:
    """The length of a body; None: until the connection ends, or in chunks."""
    if method == "HEAD" or head.split(b" ", 2)[1:2] in ([b"204"], [b"304"]):
        return 0
    declared = re.search(rb"(?im)^content-length: *(\d+)", head)
    return int(declared[1]) if declared else None


def _closing(head: bytes) -> bytes:
    return re.sub(rb"(?im)^connection:[^\r]*\r\n", b"", head)[:-2] + b"Connection: close\r\n\r\n"


def _reset(client: socket.socket) -> None:
    """Break a connection: its other end gets an error, not an end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
