"""A network of hosts in user space: packets pass late, as fast as a limit allows, or not at all.

    python -m hosts.relay eth0 '[{"pid": 123, "address": "10.77.0.1"}, ...]'

It makes an interface of that name in the network of each process and prints a line. Then it follows lines on standard input,
each with the whole state (`{"delay": 0.005, "bandwidth": 1e8, "cut": [1]}`: seconds one way, bytes in a second, numbers of
hosts), answers each with a line, and ends where there are no more.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hosts import namespaces

TUNSETIFF = 0x400454CA
TUN, NO_HEADER = 1, 0x1000
AT_ONCE = 64  # packets taken from one host before the others have their turn
LONGEST_QUEUE = 0.03  # seconds of packets that wait for a host's link; more are lost, as in a switch


class Relay:
    """Hosts by number, the packets on their way, and when each host's link is free again, out and in."""

    def __init__(self, name: str, hosts: Sequence[Mapping[str, Any]]) -> None:
        self._devices = [interface(name, host["pid"]) for host in hosts]
        self._numbers = {socket.inet_aton(host["address"]): number for number, host in enumerate(hosts)}
        self._on_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._free_out = [0.0] * len(hosts)
        self._free_in = [0.0] * len(hosts)
        self._lines = bytearray()
        self.follow({"delay": 0.0, "bandwidth": None, "cut": []})

    def follow(self, state: Mapping[str, Any]) -> None:
        self._delay = float(state["delay"])
        self._seconds_of_byte = 1 / state["bandwidth"] if state["bandwidth"] else 0.0
        self._cut = set(state["cut"])

    def run(self) -> None:
        """Pass packets until standard input ends."""
        number_of = {device: number for number, device in enumerate(self._devices)}
        while True:
            wait = max(self._on_way[0][0] - time.monotonic(), 0.0) if self._on_way else None
            ready = select.select([0, *self._devices], [], [], wait)[0]
            self._send_due()
            for descriptor in ready:
                if descriptor:
                    self._take(number_of[descriptor])
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """Follow the lines that have come; False where there will be no more."""
        data = os.read(0, 65536)
        self._lines += data
        *lines, rest = bytes(self._lines).split(b"\n")
        self._lines[:] = rest
        for line in lines:
            self.follow(json.loads(line))
            os.write(1, b"done\n")
        return bool(data)

    def _take(self, source: int) -> None:
        """Take what a host sends, and put it on its way."""
        for _ in range(AT_ONCE):
            try:
                packet = os.read(self._devices[source], 65536)
            except BlockingIOError:
                return
            except OSError:  # the interface is down
                return
            target = self._numbers.get(packet[16:20])
            if target is None or source in self._cut:
                continue
            now = time.monotonic()
            seconds = len(packet) * self._seconds_of_byte
            sent = max(now, self._free_out[source]) + seconds
            come = max(sent, self._free_in[target] + seconds) + self._delay
            if seconds and max(sent, come - self._delay) - now > LONGEST_QUEUE:
                continue
            self._free_out[source], self._free_in[target] = sent, come - self._delay
            heapq.heappush(self._on_way, (come, next(self._order), target, packet))

    def _send_due(self) -> None:
        """Give the hosts what has come to them by now."""
        now = time.monotonic()
        while self._on_way and self._on_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._on_way)
            if target not in self._cut:
                try:
                    os.write(self._devices[target], packet)
                except OSError:  # the interface is down: the packet is lost
                    continue


def interface(name: str, pid: int) -> int:
    """A new interface in the network of a process; what its host sends is read from the file that is returned."""
    namespaces.enter(pid, namespaces.NEW_NETWORK)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
    return device


if __name__ == "__main__":
    os.nice(-10)  # a busy machine adds no delay of its own
    relay = Relay(sys.argv[1], json.loads(sys.argv[2]))
    os.write(1, b"ready\n")
    relay.run()
