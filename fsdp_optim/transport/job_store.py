"""The rendezvous store of the job, on connections of this library's own.

A store's client is one connection, which a waiting call holds: what goes on in the background must not wait for the main thread,
nor for torch. And torch waits a quarter of an hour for a host that is cut off; the connections here give up after
`GIVE_UP_AFTER`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not re-exported

from fsdp_optim.errors import StoreLostError
from fsdp_optim.machine import connections_to, limit_silence

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GIVE_UP_AFTER = 20.0
"""Seconds without an answer of the host of the store, after which that host is lost or cut off."""

_OWN, _NEIGHBOURS = "fsdp_optim/own", "fsdp_optim/at the store"


class JobStore:
    """Keys and values that all ranks of a job share, with the methods of torch's `Store` that this library uses.

    Several threads may use it. It connects when it is used first, and again after a failure. Every method raises StoreLostError
    where the store is gone or its host does not answer; `get` and `multi_get` are for keys that are there.

    Args:
        find: gives the store of the job, which stays as it is. It is kept, so that a store which this process serves stays there.

    Attributes:
        neighbours: the ranks on the host of the store, as text for errors.
    """

    def __init__(self, find: Callable[[], Store]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._origin: Store | None = None
        self._where = self.neighbours = ""
        self._has_asked = False

    @property
    def where(self) -> str:
        """The address of the store, for errors."""
        return self._where or "the rendezvous store"

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._call("get", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return [bytes(value) for value in self._call("multi_get", list(keys))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there."""
        return bool(self._call("check", list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to the number of a key, 0 where it is missing; return the sum."""
        return int(self._call("add", key, number))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Give a key a value if it has the expected one (or, for "", is missing); return the value that it has now."""
        return bytes(self._call("compare_set", key, expected, value))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._call("delete_key", key))

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for a key for at most `seconds`; return whether it is there. Other threads that use this object wait too."""
        try:
            self._connected().wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return self.check([key])  # raises an error if the store is gone
        return True

    def note_neighbours(self) -> str:
        """The ranks on the host of the store as text, for errors; "" where nobody knows. They are read once.

        Called when all ranks have connected.
        """
        if not self._has_asked and self.check([_NEIGHBOURS]):
            ranks = sorted({int(rank) for rank in self.get(_NEIGHBOURS).decode().split(",") if rank})
            self.neighbours = f", which runs rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))},"
        self._has_asked = True
        return self.neighbours

    def _call(self, method: str, *args: Any) -> Any:
        store = self._connected()
        try:
            return getattr(store, method)(*args)
        except RuntimeError as error:  # torch's DistError is one
            with self._lock:
                if self._store is store:
                    self._store = None
            raise self._lost() from error

    def _lost(self) -> StoreLostError:
        return StoreLostError(
            f"the rendezvous store of the job at {self.where} does not answer: its host{self.neighbours} is lost or cut off, or "
            "the process that serves it (rank 0, or the launcher) has ended"
        )

    def _connected(self) -> Store:
        with self._lock:
            if self._store is None:
                try:
                    self._store = self._connect()
                except RuntimeError as error:
                    raise self._lost() from error
            return self._store

    def _connect(self) -> Store:
        origin = self._origin = self._origin or self._find()
        root = origin
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        if not isinstance(root, TCPStore):
            return PrefixStore(
                _OWN, origin
            )  # in a file, or in the memory of this process: no connection that could wait
        self._where = f"{root.host}:{root.port}"
        prefix = bytes(origin.compare_set(f"{_OWN}/prefix", "", secrets.token_hex(8))).decode()
        before = set(connections_to(root.port))
        made = TCPStore(
            root.host, root.port, is_master=False, timeout=timedelta(seconds=GIVE_UP_AFTER), wait_for_workers=False
        )
        store = PrefixStore(f"{_OWN}/{prefix}", made)
        for fd in set(connections_to(root.port)) - before:
            if limit_silence(fd, GIVE_UP_AFTER) and dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # a store in which nothing can be appended
                    store.append(_NEIGHBOURS, f"{dist.get_rank()},")  # type: ignore[attr-defined]
        return store
