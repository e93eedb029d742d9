"""Which process a process is, when another one is surely gone, and how long a connection of this process waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from parameterized import parameterized

from fsdp_optim.machine import connections_to, identity_of_process, is_gone, is_neighbour, limit_silence

LIMIT = 60.0  # seconds; reached by nothing but a failure


@contextlib.contextmanager
def another_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is killed."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def without(path: str) -> Iterator[None]:
    """A system on which this file, and all below it, cannot be read."""
    real = Path.read_text

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        if str(self).startswith(path):
            raise FileNotFoundError(self)
        return real(self, *args, **kwargs)

    with mock.patch.object(Path, "read_text", read_text):
        yield


def changed(identity: str, place: int, word: str) -> str:
    """An identity with another word at a place: boot, namespace, pid, start."""
    words = identity.split()
    words[place] = word
    return " ".join(words)


def wait_until_it_has_ended(pid: int) -> None:
    """Return when a process has ended; it may still have its entry, until its parent asks for it."""
    deadline = time.monotonic() + LIMIT
    while identity_of_process(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"{pid} runs on")
        time.sleep(0.01)


class IdentityTest(unittest.TestCase):
    def test_of_this_process(self) -> None:
        identity = identity_of_process()
        self.assertEqual(identity, identity_of_process(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.assertEqual(identity.split()[0], boot)
        self.assertEqual(identity.split()[2], str(os.getpid()))

    def test_another_process_has_another_one(self) -> None:
        with another_process() as process:
            identity = identity_of_process(process.pid)
            self.assertEqual(len(identity.split()), 4)
            self.assertNotEqual(identity, identity_of_process())
            self.assertTrue(is_neighbour(identity))
            self.assertFalse(is_gone(identity))

    def test_a_process_with_an_odd_name(self) -> None:
        with another_process() as process:
            before = identity_of_process(process.pid)
            stat = Path(f"/proc/{process.pid}/stat").read_text().replace("(python", "(a b) Z (", 1)
            real = Path.read_text
            self.assertIn("(a b) Z (", stat)
            with mock.patch.object(
                Path, "read_text", lambda self, **_: stat if str(self).endswith(f"/{process.pid}/stat") else real(self)
            ):
                self.assertEqual(identity_of_process(process.pid), before)

    def test_it_ends_with_the_process_though_nobody_has_waited_for_it(self) -> None:
        with another_process() as process:
            identity = identity_of_process(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            wait_until_it_has_ended(process.pid)
            self.assertTrue(Path(f"/proc/{process.pid}").exists(), "the parent has waited for it")
            self.assertTrue(is_gone(identity))
        self.assertEqual(identity_of_process(process.pid), "")
        self.assertTrue(is_gone(identity))

    def test_a_stopped_process_is_not_gone(self) -> None:
        with another_process() as process:
            identity = identity_of_process(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            self.assertFalse(is_gone(identity))

    @parameterized.expand([("/proc/sys/kernel/random/boot_id",), ("/proc",)])
    def test_a_system_that_does_not_tell(self, path: str) -> None:
        identity = identity_of_process()
        with without(path):
            self.assertEqual(identity_of_process(), "")
            self.assertFalse(is_neighbour(identity))
            self.assertFalse(is_gone(identity))
            self.assertFalse(is_neighbour(""), "two machines that do not tell are not one")
            self.assertFalse(is_gone(""))


class GoneTest(unittest.TestCase):
    def test_a_pid_that_was_given_again(self) -> None:
        identity = identity_of_process()
        self.assertTrue(is_gone(changed(identity, 3, str(int(identity.split()[3]) - 1))))

    @parameterized.expand([("boot", 0), ("namespace", 1)])
    def test_of_another_machine_or_container_nobody_knows(self, _: str, place: int) -> None:
        there = changed(changed(identity_of_process(), 3, "1"), place, "1")  # here it would be gone
        self.assertFalse(is_neighbour(there))
        self.assertFalse(is_gone(there))

    @parameterized.expand([("",), ("a",), ("a b c d",), ("unknown 1 2",), ("\0",), ("1 2 3 4 5",)])
    def test_something_else(self, text: str) -> None:
        self.assertFalse(is_neighbour(text))
        self.assertFalse(is_gone(text))

    def test_a_pid_that_is_no_number(self) -> None:
        for pid in ("self", "-1", "1/../1", "½"):
            self.assertFalse(is_gone(changed(identity_of_process(), 2, pid)), pid)

    def test_where_other_users_processes_are_hidden(self) -> None:
        identity = changed(identity_of_process(), 3, "1")
        self.assertTrue(is_gone(identity))
        real = os.access
        with mock.patch.object(os, "access", lambda path, *args: path != "/proc/1/stat" and real(path, *args)):
            self.assertFalse(is_gone(identity))


class ConnectionsTest(unittest.TestCase):
    def connected(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, int]:
        """A connection on loopback, and the port that it leads to."""
        server, client = socket.socket(family, kind), socket.socket(family, kind)
        for end in (server, client):
            self.addCleanup(end.close)
        try:
            server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError as error:
            raise unittest.SkipTest(f"no such addresses here: {error}") from None
        if kind == socket.SOCK_STREAM:
            server.listen()
        client.connect(server.getsockname()[:2])
        return client, server.getsockname()[1]

    @parameterized.expand([("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6)])
    def test_those_to_a_port(self, _: str, family: int) -> None:
        client, port = self.connected(family)
        other, other_port = self.connected(family)
        self.assertEqual(list(connections_to(port)), [client.fileno()])
        self.assertEqual(list(connections_to(other_port)), [other.fileno()])
        self.assertTrue(client.send(b"still open"))

    def test_nothing_else_counts(self) -> None:
        _, port = self.connected(kind=socket.SOCK_DGRAM)
        pair = socket.socketpair()
        for end in pair:
            self.addCleanup(end.close)
        self.assertEqual(list(connections_to(port)), [])

    def test_where_the_system_does_not_tell(self) -> None:
        _, port = self.connected()
        with mock.patch.object(os, "listdir", side_effect=FileNotFoundError):
            self.assertEqual(list(connections_to(port)), [])

    def test_calls_on_connections_wait_as_before(self) -> None:
        """Whatever timeout the program has chosen for sockets that it makes."""
        client, port = self.connected()
        self.addCleanup(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(5.0)
        self.assertEqual(list(connections_to(port)), [client.fileno()])
        limit_silence(client.fileno(), 7.5)
        self.assertTrue(os.get_blocking(client.fileno()))
        os.set_blocking(client.fileno(), False)
        limit_silence(client.fileno(), 7.5)
        self.assertFalse(os.get_blocking(client.fileno()))

    def test_silence_is_limited(self) -> None:
        client, _ = self.connected()
        self.assertTrue(limit_silence(client.fileno(), 7.5))
        self.assertEqual(client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)
        self.assertEqual(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 7500)
        probes = [
            client.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        self.assertLessEqual(probes[0] + probes[1] * probes[2], 20)
        self.assertTrue(client.send(b"still open"))

    def test_another_host(self) -> None:
        client, _ = self.connected()
        with mock.patch.object(socket.socket, "getpeername", return_value=("10.77.0.1", 1)):
            self.assertFalse(limit_silence(client.fileno(), 7.5))

    def test_what_is_no_connection(self) -> None:
        with Path(os.devnull).open() as file:
            self.assertFalse(limit_silence(file.fileno(), 1.0))
            os.fstat(file.fileno())  # still open


if __name__ == "__main__":
    unittest.main()
