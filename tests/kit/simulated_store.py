"""A rendezvous store in simulated time: thousands of ranks meet in one process, and every message to the store is counted.

One server answers one message after the other, as a TCPStore does, in the order in which they arrive. Each rank is a thread with
a clock of its own; only one of them runs at a time, so that a run is the same each time. What a rank computes takes no time.

    def program(world):                                    # on each rank
        agree(world.group("a call", range(world.size)), "a step")

    report = simulated(program, 4096)
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from fsdp_optim.options import DEFAULT_TIMEOUT
from fsdp_optim.plan import Plans
from fsdp_optim.transport import RankGroup, meeting
from fsdp_optim.transport.base import World
from fsdp_optim.transport.job import JobStore, Pulse
from fsdp_optim.transport.store_control import StoreControl
from fsdp_optim.transport.turns import Turn, Turns

_STACK_NBYTES = 256 << 10


@dataclass(frozen=True)
class Costs:
    """Seconds that a message takes.

    Attributes:
        answered: of the server for a message that it answers.
        sent: of the server for a message without an answer.
        woken: of the server for the answer to a rank that has waited for a key, besides `answered` for its question.
        nbyte: of the server for each byte that it receives or sends.
        way: between a rank and the server, in each direction.
    """

    answered: float = 12e-6
    sent: float = 3e-6
    woken: float = 12e-6
    nbyte: float = 1e-9
    way: float = 50e-6

    def times(self, factor: float) -> Costs:
        """Return the costs of a server that takes so many times as long."""
        return Costs(self.answered * factor, self.sent * factor, self.woken * factor, self.nbyte * factor, self.way)


@dataclass
class Usage:
    """What one rank has asked of the store: messages by name, the messages that it waited for, and bytes in both directions."""

    messages: Counter[str] = field(default_factory=Counter)
    awaited: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0

    @property
    def num_messages(self) -> int:
        return sum(self.messages.values())


@dataclass(frozen=True)
class Report:
    """A run: usage by rank, the seconds of simulated time until the last rank was done, and those that the server was busy."""

    usage: list[Usage]
    seconds: float
    busy: float
    num_keys: int
    results: list[Any]


@dataclass
class _Client:
    """One rank: its clock, and the lock on which its thread waits for its turn."""

    rank: int
    now: float = 0.0
    usage: Usage = field(default_factory=Usage)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    reply: Any = None
    is_over: bool = False


class Server:
    """The server, and the scheduler of the ranks."""

    def __init__(self, costs: Costs) -> None:
        self.values: dict[str, bytes] = {}
        self.busy = self.free_at = 0.0
        self.costs = costs
        self._number = itertools.count()
        self._arriving: list[tuple[float, int, _Client, str, Any]] = []
        self._waiting: defaultdict[str, list[_Client]] = defaultdict(list)
        self._yielded = threading.Semaphore(0)

    def send(self, client: _Client, name: str, args: Any, nbytes: int, *, awaited: bool) -> Any:
        """Send a message; called by the thread of a rank. Returns the answer, if it is awaited."""
        client.usage.messages[name] += 1
        client.usage.sent_nbytes += nbytes
        client.usage.awaited += awaited
        arrives = client.now + self.costs.way
        heapq.heappush(self._arriving, (arrives, next(self._number), client, name, (args, nbytes, awaited)))
        if not awaited:
            return None
        self.stop(client)
        return client.reply

    def stop(self, client: _Client) -> None:
        """Let others run until this rank has its answer."""
        self._yielded.release()
        client.turn.acquire()

    def resume(self, client: _Client) -> None:
        """Let a rank run until it waits for an answer, or ends."""
        client.turn.release()
        self._yielded.acquire()

    def end(self, client: _Client) -> None:
        """End a rank."""
        client.is_over = True
        self._yielded.release()

    def run(self) -> None:
        """Answer all messages."""
        while self._arriving:
            arrived, _, client, name, (args, nbytes, awaited) = heapq.heappop(self._arriving)
            self._work(arrived, (self.costs.answered if awaited else self.costs.sent) + nbytes * self.costs.nbyte)
            done = getattr(self, f"_{name}")(client, *args)
            if done is not _LATER and awaited:
                self._answer(client, done)
            if name in _SETTING:
                self._wake(args[0] if name == "multi_set" else [args[0]])

    def _wake(self, keys: Sequence[str]) -> None:
        for key in keys:
            for waiting in self._waiting.pop(key, ()) if key in self.values else ():
                self._work(0.0, self.costs.woken)
                self._answer(waiting, None)

    def _work(self, arrived: float, seconds: float) -> None:
        self.free_at = max(self.free_at, arrived) + seconds
        self.busy += seconds

    def _answer(self, client: _Client, reply: Any) -> None:
        nbytes = sum(map(len, reply)) if isinstance(reply, list) else len(reply) if isinstance(reply, bytes) else 8
        client.usage.received_nbytes += nbytes
        self._work(0.0, nbytes * self.costs.nbyte)
        client.reply, client.now = reply, self.free_at + self.costs.way
        self.resume(client)

    # ------------------------------------------------------------------------------------ what the messages do

    def _set(self, _: _Client, key: str, value: bytes) -> None:
        self.values[key] = value

    def _multi_set(self, _: _Client, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def _append(self, _: _Client, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def _multi_get(self, _: _Client, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def _check(self, _: _Client, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def _add(self, _: _Client, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = b"%d" % total
        return total

    def _compare_set(self, _: _Client, key: str, expected: bytes, value: bytes) -> bytes:
        there = self.values.get(key)
        if there == expected or (there is None and not expected):
            self.values[key] = value
            return value
        return expected if there is None else there

    def _delete_key(self, _: _Client, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def _wait(self, client: _Client, key: str) -> Any:
        if key in self.values:
            return None
        self._waiting[key].append(client)
        return _LATER


_LATER = object()
_SETTING = ("set", "multi_set", "append", "add", "compare_set")


class SimulatedStore:
    """The store of the job on one rank, with the methods of `JobStore`."""

    where = neighbours = ""

    def __init__(self, server: Server, client: _Client) -> None:
        self._server, self._client = server, client
        self.attended: dict[tuple[int, ...], Any] = {}

    def _send(self, name: str, *args: Any, awaited: bool) -> Any:
        nbytes = sum(len(text) for arg in args for text in ([arg] if isinstance(arg, str | bytes) else _listed(arg)))
        return self._server.send(self._client, name, args, nbytes, awaited=awaited)

    def set(self, key: str, value: str | bytes) -> None:
        self._send("set", key, _bytes(value), awaited=False)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._send("multi_set", list(keys), [_bytes(value) for value in values], awaited=False)

    def append(self, key: str, value: str | bytes) -> None:
        self._send("append", key, _bytes(value), awaited=False)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def read(self, key: str) -> bytes | None:
        value: bytes = self._send("compare_set", key, b"\0", b"\0", awaited=True)
        return None if value == b"\0" else value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self.check(keys):  # torch's client waits for the keys, then reads them
            raise AssertionError(f"a rank would wait for keys that may never come: {keys}")
        values: list[bytes] = self._send("multi_get", list(keys), awaited=True)
        return values

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._send("check", list(keys), awaited=True))

    def add(self, key: str, number: int) -> int:
        return int(self._send("add", key, number, awaited=True))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return bytes(self._send("compare_set", key, _bytes(expected), _bytes(value), awaited=True))

    def delete_key(self, key: str) -> bool:
        return bool(self._send("delete_key", key, awaited=True))

    def wait(self, key: str, seconds: float) -> bool:
        self._send("wait", key, awaited=True)
        return True

    def note_neighbours(self) -> str:
        return ""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _listed(arg: Any) -> Sequence[str | bytes]:
    return arg if isinstance(arg, list) else ()


class StoreWorld(World):
    """One rank that is a thread, and meets the others in a store as ranks of a job do. No tensors move."""

    def __init__(self, find: Callable[[], Any], rank: int, size: int) -> None:
        self._keep(JobStore(find), JobStore(find), rank, tuple(range(size)))

    def _keep(self, calls: JobStore, board: JobStore, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank, self.size, self.calls, self.board = rank, (size := len(ranks)), calls, board
        self._ranks = ranks  # thousands of ranks in one process share them
        self.pulse, self.turns, self.plans = Pulse(board, rank, size), Turns(), Plans()
        self.control = StoreControl(calls, board)

    def ranks_of(self, process_group: Any) -> tuple[int, ...]:
        """Return all ranks."""
        return self._ranks

    def group_rank(self, process_group: Any) -> int:
        """Return the rank."""
        return self.rank

    def all(self, timeout: float = DEFAULT_TIMEOUT) -> RankGroup:
        """Return the group of all ranks."""
        return RankGroup(self, self._ranks, timeout=timeout, turn=Turn("a call", self._ranks))


class SimulatedWorld(StoreWorld):
    """One rank of a simulated world."""

    def __init__(self, server: Server, client: _Client, ranks: tuple[int, ...]) -> None:
        store: Any = SimulatedStore(server, client)
        self.client = client
        self._keep(store, store, client.rank, ranks)


class Simulation:
    """Ranks that stay, so that programs can be run on them one after the other."""

    def __init__(self, world_size: int, costs: Costs | None = None) -> None:
        self._server = Server(costs or Costs())
        self._clients = [_Client(rank) for rank in range(world_size)]
        ranks = tuple(range(world_size))
        self._worlds = [SimulatedWorld(self._server, client, ranks) for client in self._clients]

    def run(self, program: Callable[[SimulatedWorld], Any], costs: Costs | None = None) -> Report:
        """Run a program on all ranks, which begin at once. `costs`: those of this run and of later ones."""
        results: list[Any] = [None] * len(self._clients)
        self._server.busy = self._server.free_at = 0.0
        self._server.costs = costs or self._server.costs

        def body(world: SimulatedWorld) -> None:
            world.client.turn.acquire()
            try:
                results[world.rank] = program(world)
            except Exception as error:
                results[world.rank] = error
            finally:
                self._server.end(world.client)

        before = threading.stack_size(_STACK_NBYTES)
        # The simulated ranks wait in real time while other ranks run, and must not look for missing ranks then.
        with mock.patch.object(meeting, "_QUIET", sys.float_info.max):
            threads = [threading.Thread(target=body, args=(world,)) for world in self._worlds]
            for client in self._clients:
                client.usage, client.is_over, client.now = Usage(), False, 0.0
            for thread, client in zip(threads, self._clients, strict=True):
                thread.start()
                self._server.resume(client)
            threading.stack_size(before)
            self._server.run()
            waiting = [client.rank for client in self._clients if not client.is_over]
            if waiting:
                raise AssertionError(f"the ranks {waiting} wait for ever")
            for thread in threads:
                thread.join()
        seconds = max(client.now for client in self._clients)
        usage = [client.usage for client in self._clients]
        return Report(usage, seconds, self._server.busy, len(self._server.values), results)
