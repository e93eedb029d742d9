"""The rendezvous store of the job, on connections of this library's own.

A store's client is one connection, which a waiting call holds: work in the background must not wait for the main thread,
nor for torch. And torch waits a quarter of an hour for a host that is cut off; the connections here give up after
`GIVE_UP_AFTER`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not re-exported

from fsdp_optim.errors import StoreLostError, WrapperError
from fsdp_optim.machine import connections_to, limit_silence
from fsdp_optim.transport.job.leaving import Leaving

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GIVE_UP_AFTER = 20.0
"""Seconds without an answer of the host of the store, after which that host is lost, cut off or stopped."""

_AGAIN_WITHIN = 7.0  # seconds for a new connection to a host that did not answer; calls fail at once after these

_OWN, _NEIGHBOURS = "fsdp_optim/own", "fsdp_optim/at the store"
_NO_VALUE = "fsdp_optim: there is no value"  # which no key has
T = TypeVar("T")


class JobStore:
    """Keys and values that all ranks of a job share, with the methods of torch's `Store` that this library uses.

    Several threads may use it. It connects at its first use, and again after a failure. Every method raises StoreLostError
    where the store is gone or its host does not answer; `get` and `multi_get` are for keys that exist.

    The cost of each method, where the store is far away: torch's client waits for no answer in `set`, `multi_set` and `append`,
    for two in `get` and `multi_get`, and for one in each other method.

    Args:
        find: gives the store of the job. It is kept unchanged, so that a store served by this process stays alive.
        leaving: the end of their use, which the objects of one rank share.

    Attributes:
        neighbours: the ranks on the host of the store, as text for errors.
        attended: what this rank remembers of its meetings, by the ranks that meet (`Meeting`).
    """

    def __init__(self, find: Callable[[], Store], leaving: Leaving | None = None) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._origin: Store | None = None
        self._attempt: Attempt[Store] | None = None
        self._parked: tuple[Attempt[None], Store] | None = None  # a connection on which a key is still waited for
        self._leaving = leaving or Leaving()
        self._leaving.num_users += 1
        weakref.finalize(self, self._leaving.end)
        self._prefix = ""
        self._where = self.neighbours = ""
        self._has_asked = self._has_told = False
        self.attended: dict[tuple[int, ...], Any] = {}

    @property
    def where(self) -> str:
        """The address of the store, for errors."""
        return self._where or "the rendezvous store"

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._call("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Give several keys a value each, in this order, in one message."""
        self._call("multi_set", list(keys), list(values))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of the value of a key, empty where it is missing."""
        self._call("append", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return bytes(self._call("get", key))

    def read(self, key: str) -> bytes | None:
        """Return the value of a key; None where it is missing."""
        value = bytes(self._call("compare_set", key, _NO_VALUE, _NO_VALUE))  # which changes nothing
        return None if value == _NO_VALUE.encode() else value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        return [bytes(value) for value in self._call("multi_get", list(keys))]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist."""
        return bool(self._call("check", list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to the number of a key, 0 where it is missing; return the sum."""
        return int(self._call("add", key, number))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Give a key a value if it has the expected value (or, for "", is missing); return the value that it has now."""
        return bytes(self._call("compare_set", key, expected, value))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._call("delete_key", key))

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for a key for at most `seconds`; return whether it exists. Other threads that use this object wait too.

        Where the key does not come in time, its connection waits on in a thread of its own, and is used again when the key is
        there: torch writes warnings to stderr where a wait of its client ends without the key.
        """
        with self._lock:
            store = self._connected()
            is_served = bool(self._where)  # else it is a file, or memory: a wait ends in time, without a warning
            limit = timedelta(days=1) if is_served else timedelta(seconds=seconds)
            waiting = Attempt(lambda: store.wait([key], limit), seconds if is_served else 2 * seconds)
            try:
                waiting.result()
                return True
            except dist.DistNetworkError as error:
                raise self._gave_up() from error
            except RuntimeError:
                pass  # the key is missing, or the store is gone, as the next call shows
            except BaseException as error:  # TimeoutError, or an interrupt of this rank
                self._park(waiting, store)
                if not isinstance(error, TimeoutError):
                    raise
        return self.check([key])

    def _park(self, waiting: Attempt[None], store: Store) -> None:
        """Leave the connection to a call that still waits on it, and reuse the connection of an earlier call that has ended."""
        self._leaving.let_go(store)
        earlier, self._parked, self._store = self._parked, (waiting, store), None
        self._take_back(earlier)

    def _take_back(self, parked: tuple[Attempt[None], Store] | None) -> bool:
        """Use a connection on which a call has waited, if the call has ended and the store is still there."""
        if parked is None or not parked[0].has_ended:
            return False
        with contextlib.suppress(RuntimeError):
            parked[0].result()
            self._store = parked[1]
            self._leaving.use(parked[1])
        return True

    def note_neighbours(self) -> str:
        """Return the ranks on the host of the store as text, for errors; "" where they are unknown. They are read once.

        Called when all ranks have connected.
        """
        if not self._has_asked:
            ranks = sorted({int(rank) for rank in (self.read(_NEIGHBOURS) or b"").decode().split(",") if rank})
            if ranks:
                self.neighbours = f", which runs rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))},"
        self._has_asked = True
        return self.neighbours

    def _call(self, method: str, *args: Any) -> Any:
        with self._lock:  # no call starts on a connection on which the answer to another call is still to come
            store = self._connected()
            try:
                return getattr(store, method)(*args)
            except RuntimeError as error:  # torch's DistError is one
                raise self._gave_up() from error

    def _gave_up(self) -> StoreLostError:
        """Drop the connection, because an old answer may still come on it; the next call makes a new one."""
        self._leaving.let_go(self._store)
        self._store = None
        return self._lost()

    def _lost(self) -> StoreLostError:
        return StoreLostError(
            f"the rendezvous store of the job at {self.where} does not answer: its host{self.neighbours} is lost, cut off or "
            "stopped, or the process that serves it (rank 0, or the launcher) has ended"
        )

    def _connected(self) -> Store:
        if self._store is None and self._take_back(self._parked):
            self._parked = None
        if self._store is None:
            if self._attempt is None:
                patience = min(_AGAIN_WITHIN, GIVE_UP_AFTER) if self._where else GIVE_UP_AFTER
                self._attempt = Attempt(self._connect, patience)
            try:
                self._store = self._attempt.result()
            except (RuntimeError, OSError) as error:
                raise self._lost() from error
            finally:
                if self._attempt.has_ended:
                    self._attempt = None
        return self._store

    def _connect(self) -> Store:
        origin = self._origin = self._origin or self._find()
        root = origin
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        if not isinstance(root, TCPStore):
            # It is in a file, or in the memory of this process: there is no connection that could wait.
            return PrefixStore(_OWN, origin)
        if self._where:  # where no process listens any more, torch would try again and again
            socket.create_connection((root.host, root.port), timeout=GIVE_UP_AFTER).close()
        self._where = f"{root.host}:{root.port}"
        if not self._prefix:  # asked for once: torch's own connection may wait for a host that is lost
            self._prefix = bytes(origin.compare_set(f"{_OWN}/prefix", "", secrets.token_hex(8))).decode()
        before = set(connections_to(root.port))
        client = TCPStore(
            root.host, root.port, is_master=False, timeout=timedelta(seconds=GIVE_UP_AFTER), wait_for_workers=False
        )
        store = PrefixStore(f"{_OWN}/{self._prefix}", client)
        for fd in set(connections_to(root.port)) - before:
            if limit_silence(fd, GIVE_UP_AFTER) and dist.is_initialized() and not self._has_told:
                with contextlib.suppress(RuntimeError):  # a store in which nothing can be appended
                    store.append(_NEIGHBOURS, f"{dist.get_rank()},")  # type: ignore[attr-defined]
                self._has_told = True
        if dist.is_initialized():
            self._leaving.joins(origin, dist.get_rank(), dist.get_world_size(), root.port)
            self._leaving.use(store)
        return store


class Attempt(Generic[T]):
    """A call in a thread of its own, which begins at once.

    Args:
        patience: seconds from now on, after which `result` does not wait any more.
    """

    def __init__(self, call: Callable[[], T], patience: float) -> None:
        self._call = call
        self._until = time.monotonic() + patience
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="fsdp_optim: connecting", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_set()

    def result(self) -> T:
        """Return the result of the call. Raises its error, or TimeoutError where it has not ended in time; the call continues."""
        if not self._ended.wait(max(self._until - time.monotonic(), 0.0)):
            raise TimeoutError("no answer yet")
        if self._error is not None:
            raise self._error
        return self._made[0]


def rendezvous_store() -> Store:
    """Return the store in which any ranks of the job can meet without a collective call.

    The store of a user's process group would not do: ranks with different values of `process_group=` must find each other,
    so that all of them raise the error.

    Raises WrapperError where torch.distributed is not initialized.
    """
    world = dist.group.WORLD
    if world is None:
        raise WrapperError("torch.distributed is not initialized, and this model lives on several ranks")
    if hasattr(world, "get_group_store"):
        return world.get_group_store()
    return dist.distributed_c10d._get_process_group_store(world)  # torch < 2.8 has no public way
