"""The network between the hosts of a bench: a bridge in the ground's namespace, or a relay that delays what passes.

A host that is cut off has its link up: what it sends is lost, as where a switch between the hosts fails. So its processes
see no error of their own, only silence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hosts.host import LINK, PYTHON_PATH, Host

BITS = 16  # of the network's prefix
LARGEST_PACKET = 9000  # bytes


class Network:
    """Joins hosts from the start, without a delay. Hosts are meant by their place in `hosts`."""

    def __init__(self, ground: Host, hosts: Sequence[Host]) -> None:
        self._ground, self._hosts = ground, hosts
        self._cut: set[int] = set()
        self._relay: subprocess.Popen[bytes] | None = None
        self._speed: dict[str, float | None] = {"delay": 0.0, "bandwidth": None}
        _ip(ground, ["link add switch type bridge", "link set switch up"])
        for number, host in enumerate(hosts):
            wire = f"link add wire{number} mtu {LARGEST_PACKET} type veth peer name {LINK} mtu {LARGEST_PACKET}"
            _ip(ground, [f"{wire} netns {host.pid}", f"link set wire{number} master switch up"])
            _ip(host, ["link set lo up", *_up(host)])

    def cut(self, number: int) -> None:
        """Lose all packets from and to a host from now on."""
        self._cut.add(number)
        self._join(number)

    def heal(self, number: int) -> None:
        """Let packets from and to a host pass again."""
        self._cut.discard(number)
        self._join(number)

    def delay(self, milliseconds: float, bandwidth: float | None = None) -> None:
        """Let each round trip between two hosts take so many milliseconds longer.

        `bandwidth`: bytes in a second that each host can send, and as many that it can receive; None for no limit.
        The connections that exist continue through the relay. `delay(0)` takes the relay away.
        """
        self._speed = {"delay": milliseconds / 2000, "bandwidth": bandwidth}
        if milliseconds or bandwidth:
            if self._relay is None:
                self._relay = self._start_relay()
            self._tell_relay()
        elif self._relay is not None:
            self._end_relay()

    def _join(self, number: int) -> None:
        _ip(self._ground, [f"link set wire{number} {'nomaster' if number in self._cut else 'master switch'}"])
        if self._relay is not None:
            self._tell_relay()

    def _start_relay(self) -> subprocess.Popen[bytes]:
        for host in self._hosts:
            _ip(host, [f"link set {LINK} down", f"link set {LINK} name wire"])
        order = [{"pid": host.pid, "address": host.address} for host in self._hosts]
        relay = subprocess.Popen(
            [sys.executable, "-m", "hosts.relay", LINK, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            start_new_session=True,
        )
        _answer(relay)  # the interfaces are there
        for host in self._hosts:
            _ip(host, [f"link set {LINK} mtu {LARGEST_PACKET} txqueuelen 1000", *_up(host, "wire")])
        return relay

    def _tell_relay(self) -> None:
        assert self._relay is not None
        assert self._relay.stdin is not None
        state: Mapping[str, Any] = {**self._speed, "cut": sorted(self._cut)}
        self._relay.stdin.write(json.dumps(state).encode() + b"\n")
        self._relay.stdin.flush()
        _answer(self._relay)

    def _end_relay(self) -> None:
        self.close()
        for host in self._hosts:
            _ip(host, [f"link set wire name {LINK}", *_up(host)])

    def close(self) -> None:
        """End the relay; the interfaces end with the hosts."""
        if self._relay is not None:
            self._relay.stdin.close()  # type: ignore[union-attr]
            self._relay.stdout.close()  # type: ignore[union-attr]
            self._relay.wait(20)
            self._relay = None


def _up(host: Host, other: str = "") -> list[str]:
    """The commands that give a host's interface its address. `other`: the interface that has had it."""
    address = f"{host.address}/{BITS}"
    return [
        *([f"address flush dev {other}"] if other else []),
        f"link set {LINK} addrgenmode none",
        f"address replace {address} dev {LINK}",
        f"link set {LINK} up",
    ]


def _ip(host: Host, commands: Sequence[str]) -> None:
    """Run commands of `ip` in a host's network, where process ids are those of outside."""
    words = ["nsenter", "--target", str(host.pid), "--net", "ip", "-batch", "-"]
    done = subprocess.run(words, input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{host.name}: {'; '.join(commands)}: {done.stderr.strip()}")


def _answer(relay: subprocess.Popen[bytes]) -> None:
    assert relay.stdout is not None
    if not relay.stdout.readline():
        raise OSError(f"the relay ended with {relay.wait(20)}")
