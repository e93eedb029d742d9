"""The bench's faults: hosts that are killed, stopped, cut off, far away, or have another time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import unittest

import pytest
from parameterized import parameterized

from hosts.bench import Bench
from hosts.case import TICKS, TORCH, BenchTest
from hosts.file_systems import FileSystem, OneKernel
from hosts.gluster import Gluster
from hosts.sshfs import Sshfs

pytestmark = pytest.mark.hosts

CLOCK = """
import threading, time
begin = time.monotonic()
time.sleep(0.1)
threading.Event().wait(0.1)
print(time.time(), begin, time.monotonic())
"""
ECHO = """
import socket
listener = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1 << 20):
            if len(data) == 1:
                connection.sendall(data)
"""
PING = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def ping():
    begin = time.perf_counter()
    connection.sendall(b"a")
    connection.recv(1)
    return time.perf_counter() - begin
for _ in range(int(sys.argv[2])):
    print(1000 * ping(), flush=True)
    time.sleep(float(sys.argv[3]))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
begin = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(int(sys.argv[2]) / (time.perf_counter() - begin))
"""


class TimedTest(BenchTest):
    def echo(self, bench: Bench) -> str:
        """Start a server on the first host; its address."""
        bench.hosts[0].start(sys.executable, "-c", ECHO, log="echo.log")
        self.until(lambda: "ready" in (bench.folder / "echo.log").read_text(), "the server has not started")
        return bench.hosts[0].address


class FaultTest(TimedTest):
    def num_ticks(self, text: str) -> int:
        return text.count("tick")

    def test_two_benches_have_networks_of_their_own(self) -> None:
        first, second = (self.bench(2, OneKernel()) for _ in range(2))
        self.assertEqual(self.echo(first), second.hosts[0].address)
        first.hosts[1].command(sys.executable, "-c", PING, first.hosts[0].address, "1", "0")
        with self.assertRaisesRegex(OSError, "refused"):
            second.hosts[1].command(sys.executable, "-c", PING, second.hosts[0].address, "1", "0")

    def test_a_host_is_killed(self) -> None:
        bench = self.bench(2, OneKernel())
        run = bench.run(self.program(bench, TICKS), preload=TORCH)
        run.wait_for("tick 1 ")
        run.kill_host(1)
        self.until(lambda: run.codes[2:] == [-signal.SIGKILL] * 2, "ranks 2 and 3 live on")
        self.assertEqual(run.codes[:2], [None, None])
        run.signal(0, signal.SIGTERM)
        self.until(lambda: run.codes[:2] == [-signal.SIGTERM, None], "rank 0 lives on, or rank 1 does not")

    def test_a_host_is_stopped_and_goes_on(self) -> None:
        bench = self.bench(2, OneKernel())
        run = bench.run(self.program(bench, TICKS), preload=TORCH)
        run.wait_for("tick 1 ")
        run.stop_host(1)
        stopped, running = run.output(3), run.output(0)
        self.until(lambda: self.num_ticks(run.output(0)) > self.num_ticks(running) + 20, "host 0 is stopped too")
        self.assertEqual(run.output(3), stopped)
        run.continue_host(1)
        self.until(lambda: len(run.output(3)) > len(stopped), "host 1 does not continue")

    def test_a_host_is_stopped_with_its_mount(self) -> None:
        bench = self.bench(2, Sshfs())
        bench.hosts[0].path("/shared/a").write_text("hello")
        run = bench.run(self.program(bench, TICKS), ranks_per_host=1, preload=TORCH)
        run.wait_for("tick 1 ")
        for with_mount in (False, True):
            run.stop_host(1, mount=with_mount)
            reading = bench.hosts[1].start("ls", "/shared", log=f"listing-{with_mount}.log")
            if with_mount:
                with self.assertRaises(subprocess.TimeoutExpired):
                    reading.wait(0.5)
                run.continue_host(1)
            self.assertEqual(reading.wait(30), 0)
            self.assertEqual((bench.folder / f"listing-{with_mount}.log").read_text(), "a\n")

    def test_a_host_is_cut_off_and_joined_again(self) -> None:
        for with_relay in (False, True):
            bench = self.bench(2, OneKernel())
            address = self.echo(bench)
            bench.delay(2 if with_relay else 0)
            bench.hosts[1].start(sys.executable, "-c", PING, address, "100000", "0.01", log="pings")
            pings = bench.folder / "pings"
            self.until(lambda log=pings: log.read_text().count("\n") > 5, "no connection")
            bench.cut(1)
            time.sleep(0.1)
            before = pings.read_text()
            time.sleep(0.5)
            self.assertEqual(pings.read_text(), before)
            bench.heal(1)
            self.until(lambda log=pings, text=before: len(log.read_text()) > len(text), "the connection is lost")

    @parameterized.expand([(fs.name, fs) for fs in (Gluster(), Sshfs())], name_func=lambda f, n, p: f"{f.__name__}_{n}")
    def test_a_host_that_is_cut_off_waits_for_its_files(self, _: str, file_system: FileSystem) -> None:
        bench = self.bench(2, file_system)
        bench.hosts[0].path("/shared/a").write_text("hello")
        bench.cut(1)
        reading = bench.hosts[1].start("cat", "/shared/a", log="read")
        with self.assertRaises(subprocess.TimeoutExpired):
            reading.wait(1)
        bench.heal(1)
        self.assertEqual(reading.wait(60), 0)
        self.assertEqual((bench.folder / "read").read_text(), "hello")

    def test_a_host_is_lost(self) -> None:
        bench = self.bench(2, Gluster())
        run = bench.run(self.program(bench, TICKS), preload=TORCH)
        run.wait_for("tick 1 ")
        bench.lose(1)
        self.until(lambda: run.codes == [None, None, -9, -9], "host 1 is not lost")
        self.until(lambda: not bench.hosts[1].processes(), "what serves the mount lives on")
        bench.hosts[0].command("touch", "/shared/still-here")

    def test_a_clock_is_ahead(self) -> None:
        bench = self.bench(3, OneKernel(), clock_offsets={1: 300, 2: -120})
        run = bench.run(self.program(bench, CLOCK), ranks_per_host=1, preload=TORCH)
        clocks = [[float(word) for word in text.split()] for text in run.succeed()]
        self.assertEqual([round((clock[0] - clocks[0][0]) / 60) for clock in clocks], [0, 5, -2])
        self.assertEqual([round((clock[1] - clocks[0][1]) / 60) for clock in clocks], [0, 0, 0])
        for _, begin, end in clocks:
            self.assertGreaterEqual(end - begin, 0.2)

    def test_ranks_meet_though_their_clocks_differ(self) -> None:
        bench = self.bench(2, OneKernel(), clock_offsets={1: -300})
        printed = bench.run("all_reduce", ranks_per_host=1, preload=TORCH).succeed()
        self.assertEqual([text.rpartition(": ")[2] for text in printed], ["3\n"] * 2)


class DelayTest(TimedTest):
    """Shortest times are compared: a busy machine can only add to the others."""

    def ping(self, bench: Bench, address: str) -> float:
        """The shortest round trip of a TCP connection in milliseconds."""
        printed = bench.hosts[1].command(sys.executable, "-c", PING, address, "20", "0")
        return min(map(float, printed.split()))

    def speed(self, bench: Bench, address: str, num_bytes: int) -> float:
        """Bytes in a second through a TCP connection."""
        return float(bench.hosts[1].command(sys.executable, "-c", SEND, address, str(num_bytes)))

    def test_round_trips_take_longer(self) -> None:
        bench = self.bench(2, OneKernel())
        address = self.echo(bench)
        for milliseconds in (10, 50):
            bench.delay(milliseconds)
            shortest = self.ping(bench, address)
            self.assertGreaterEqual(shortest, milliseconds)
            self.assertLess(shortest, milliseconds + 10)
        bench.delay(0)
        self.assertLess(self.ping(bench, address), 10)

    def test_connections_go_on_where_the_delay_changes(self) -> None:
        bench = self.bench(2, OneKernel())
        address = self.echo(bench)
        bench.hosts[1].start(sys.executable, "-c", PING, address, "100000", "0.01", log="pings")
        pings = bench.folder / "pings"
        self.until(lambda: pings.read_text().count("\n") > 5, "no connection")
        for milliseconds in (30, 60, 0):
            bench.delay(milliseconds)
            begin = len(pings.read_text())
            self.until(
                lambda begin=begin, least=milliseconds: any(
                    least <= float(line) < least + 10 for line in pings.read_text()[begin:].split("\n")[1:-1]
                ),
                f"no round trip of {milliseconds} ms",
            )

    @parameterized.expand([(0,), (50,)])
    def test_a_link_has_100_megabytes_in_a_second(self, milliseconds: int) -> None:
        bench = self.bench(2, OneKernel())
        address = self.echo(bench)
        bench.delay(milliseconds, 100e6)
        speeds = []
        for _ in range(5):
            speeds.append(self.speed(bench, address, 100_000_000))
            if speeds[-1] > 60e6:
                break
        self.assertLess(max(speeds), 101e6)
        self.assertGreater(max(speeds), 60e6, speeds)


if __name__ == "__main__":
    unittest.main()
