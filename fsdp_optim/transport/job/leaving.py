"""The process that serves the rendezvous store leaves last: the others may still need to read the result of their last call.

Every rank notes that it leaves, when it makes no more calls: its process group is gone, or the interpreter ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
import weakref
from typing import TYPE_CHECKING

from fsdp_optim.machine import is_gone, listens_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HOST_WAITS = 5.0
"""Seconds that the host of the store waits for the other ranks, at most."""

_LOOK_EVERY = 0.02  # seconds


class Leaving:
    """The end of one rank's use of the store of a job. Several objects may share it: when the last object ends, the rank leaves.

    Attributes:
        num_users: the objects that share it, and have not ended.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self._connections: list[Store] = []
        self._origin: Store | None = None
        self._rank, self._size, self._port = 0, 1, 0

    def joins(self, origin: Store, rank: int, size: int, port: int) -> None:
        """Note that this rank uses the store of a job. `origin` is kept until the end, because this process may serve it."""
        if self._origin is None and multiprocessing.parent_process() is not None:
            self._leave_with_threads()
        self._origin, self._rank, self._size, self._port = origin, rank, size, port

    def use(self, connection: Store) -> None:
        """Take a connection to the store, on which no call waits."""
        self._connections.append(connection)

    def let_go(self, connection: Store | None) -> None:
        """Stop using a connection: it is lost, or a call waits on it."""
        self._connections = [known for known in self._connections if known is not connection]

    def end(self) -> None:
        """End one of the objects. The last notes that this rank leaves, and waits where this process serves the store."""
        self.num_users -= 1
        if not self.num_users:
            self._leave()

    def _leave_with_threads(self) -> None:
        """Leave when the threads of this process end, because a forked process of multiprocessing has no other end."""
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            self_ref = weakref.ref(self)

            def leave() -> None:
                leaving = self_ref()
                if leaving is not None:
                    leaving._leave()

            register(leave)

    def _leave(self) -> None:
        if not self._connections or self._size == 1:
            return
        store, self._connections = self._connections[-1], []
        with contextlib.suppress(RuntimeError):  # the store is gone
            if listens_on(self._port):
                self._wait(store)
            else:
                store.set(_key(self._rank), "")
        self._origin = None

    def _wait(self, store: Store) -> None:
        """Wait until all others that have made a call have left or ended. The end of processes of other machines is not seen."""
        deadline = time.monotonic() + HOST_WAITS
        others = [rank for rank in range(self._size) if rank != self._rank]
        others = others if store.check([pulse_key(rank) for rank in others]) else _met(store, others)
        while others and time.monotonic() < deadline and not store.check([_key(rank) for rank in others]):
            others = [rank for rank in others if not store.check([_key(rank)]) and not _has_ended(store, rank)]
            time.sleep(_LOOK_EVERY)


def _met(store: Store, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if store.check([pulse_key(rank)])]


def _has_ended(store: Store, rank: int) -> bool:
    """Return whether the process of a rank of this machine has ended without leaving."""
    return is_gone(bytes(store.get(pulse_key(rank))).decode().partition(" ")[2])


def pulse_key(rank: int) -> str:
    """Return the key with the last sign of life of a rank, which every rank has from its first meeting on (`Pulse`)."""
    return f"pulse/{rank}"


def _key(rank: int) -> str:
    return f"left/{rank}"
