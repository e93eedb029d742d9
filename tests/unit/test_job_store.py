"""The store of the job on connections of this library's own: its methods, a store that is lost, the ranks on its host."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import threading
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.compare import refused
from parameterized import parameterized
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fsdp_optim.errors import StoreLostError
from fsdp_optim.machine import connections_to
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport.job import JobStore, job_store, rendezvous_store
from fsdp_optim.transport.job.job_store import GIVE_UP_AFTER

KINDS = ("TCPStore", "TCPStore with a prefix", "FileStore", "HashStore")
LIMIT = timedelta(seconds=60)  # reached by nothing but a failure


class Served(unittest.TestCase):
    """Tests with a store that this process serves."""

    def setUp(self) -> None:
        self.server: Any = None
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def origin(self, kind: str = "TCPStore") -> Any:
        """The store of the job, as one rank finds it."""
        if kind == "HashStore":
            self.server = self.server or HashStore()
            return self.server
        if kind == "FileStore":
            return FileStore(str(self.folder / "store"), -1)
        if self.server is None:
            self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        client = TCPStore("127.0.0.1", self.server.port, is_master=False, wait_for_workers=False, timeout=LIMIT)
        return PrefixStore("a", PrefixStore("b", client)) if kind != "TCPStore" else client

    def stop_serving(self) -> None:
        self.server = None
        gc.collect()

    def own_connections(self, store: JobStore) -> set[int]:
        """The connections that a store makes when it is used first."""
        before = set(connections_to(self.server.port))
        store.add("first", 1)
        return set(connections_to(self.server.port)) - before


class MethodsTest(Served):
    @parameterized.expand([(kind,) for kind in KINDS])
    def test_each_keeps_what_it_says(self, kind: str) -> None:
        store, other = JobStore(lambda: self.origin(kind)), JobStore(lambda: self.origin(kind))
        store.set("text", "ä")
        store.set("bytes", b"\0\xff")
        self.assertEqual([other.get("text"), other.get("bytes")], ["ä".encode(), b"\0\xff"])
        self.assertEqual(other.multi_get(["bytes", "text"]), [b"\0\xff", "ä".encode()])
        self.assertEqual([other.check(["text", "bytes"]), other.check(["text", "no"])], [True, False])
        self.assertEqual([store.add("n", 2), other.add("n", 3), store.add("n", 0), store.add("m", 0)], [2, 5, 5, 0])
        self.assertEqual(store.compare_set("c", "", "1"), b"1")
        self.assertEqual(other.compare_set("c", "", "2"), b"1")
        self.assertEqual(other.compare_set("c", "1", "2"), b"2")
        self.assertEqual(store.get("c"), b"2")
        self.assertEqual([store.delete_key("c"), other.check(["c"])], [True, False])
        if kind != "FileStore":  # that of torch always says yes
            self.assertFalse(store.delete_key("c"))

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_reading_what_may_be_missing(self, kind: str) -> None:
        store, other = JobStore(lambda: self.origin(kind)), JobStore(lambda: self.origin(kind))
        self.assertIsNone(store.read("key"))
        self.assertFalse(other.check(["key"]), "it was made by the look")
        for value in (b"value", b"", b"0", bytes(range(256))):
            store.set("key", value)
            self.assertEqual(store.read("key"), value)  # an answer: now it is there for others too
            self.assertEqual([other.read("key"), other.get("key")], [value, value])

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_append(self, kind: str) -> None:
        store, other = JobStore(lambda: self.origin(kind)), JobStore(lambda: self.origin(kind))
        store.append("key", "a")
        store.append("key", b"b")
        self.assertEqual(store.get("key"), b"ab")
        other.append("key", "c")
        self.assertEqual(other.get("key"), b"abc")

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_what_is_waited_for(self, kind: str) -> None:
        store, other = JobStore(lambda: self.origin(kind)), JobStore(lambda: self.origin(kind))
        self.assertFalse(store.wait("key", 0.05))
        self.assertFalse(store.check(["key"]))
        timer = threading.Timer(0.05, other.set, ["key", "value"])
        timer.start()
        self.assertTrue(store.wait("key", 60.0))
        timer.join()
        self.assertTrue(store.wait("key", 0.05))

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_the_keys_of_others_are_not_touched(self, kind: str) -> None:
        origin = self.origin(kind)
        origin.set("key", "of the trainer")
        store = JobStore(lambda: origin)
        store.set("key", "of this library")
        self.assertEqual([origin.get("key"), store.get("key")], [b"of the trainer", b"of this library"])

    def test_stores_that_share_a_server_and_not_a_prefix_are_two(self) -> None:
        """As of a process group that was destroyed and made again."""
        root = self.origin()
        store, other = (JobStore(lambda name=name: PrefixStore(name, root)) for name in ("first", "second"))
        store.set("key", "value")
        self.assertFalse(other.check(["key"]))

    def test_it_connects_when_it_is_used(self) -> None:
        asked = []

        def find() -> Any:
            asked.append(True)
            return self.origin("HashStore")

        store = JobStore(find)
        self.assertEqual(asked, [])
        store.add("n", 1)
        store.add("n", 1)
        self.assertEqual(asked, [True])

    def test_many_threads(self) -> None:
        store = JobStore(self.origin)

        def count() -> None:
            for _ in range(50):
                store.add("n", 1)

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(store.add("n", 0), 400)

    def test_the_store_of_the_job_may_wait_meanwhile(self) -> None:
        """A call that waits on the connection of the trainer holds nothing up here."""
        origin = self.origin()
        store = JobStore(lambda: origin)
        store.add("n", 1)
        waiting = threading.Thread(target=lambda: origin.wait(["ready"], LIMIT))
        waiting.start()
        time.sleep(0.05)
        self.assertEqual(store.add("n", 1), 2)
        self.assertTrue(waiting.is_alive())
        self.server.set("ready", "")
        waiting.join(60)


CALLS: dict[str, Any] = {
    "set": lambda store: store.set("key", "value"),
    "get": lambda store: store.get("here"),
    "multi_get": lambda store: store.multi_get(["here"]),
    "check": lambda store: store.check(["here"]),
    "add": lambda store: store.add("n", 1),
    "compare_set": lambda store: store.compare_set("key", "", "value"),
    "delete_key": lambda store: store.delete_key("here"),
    "wait": lambda store: store.wait("missing", 60.0),
    "note_neighbours": lambda store: store.note_neighbours(),
}


class LostTest(Served):
    def test_every_method_names_the_store_that_is_gone(self) -> None:
        origin = self.origin()
        stores = {name: JobStore(lambda: origin) for name in CALLS}
        for store in stores.values():
            store.set("here", "")
        where = f"127.0.0.1:{self.server.port}"
        self.stop_serving()
        for name, call in CALLS.items():
            with self.subTest(name):
                # A message may still be taken by the system before it knows that nobody reads it.
                kinds = {"set": 2}.get(name, 1)
                for _ in range(kinds - 1):
                    try:
                        call(stores[name])
                    except StoreLostError:
                        break
                    time.sleep(0.05)
                refused(lambda: call(stores[name]), StoreLostError, "rendezvous store", where, "rank 0")  # noqa: B023
                refused(lambda: call(stores[name]), StoreLostError, "rendezvous store", where)  # noqa: B023

    def test_a_store_that_was_gone_before(self) -> None:
        origin = self.origin()
        self.stop_serving()
        store = JobStore(lambda: origin)
        for name, call in CALLS.items():
            with self.subTest(name):
                refused(lambda: call(store), StoreLostError, "rendezvous store")  # noqa: B023

    def test_it_connects_again(self) -> None:
        origin = self.origin()
        store = JobStore(lambda: origin)
        [own] = self.own_connections(store)
        socket.socket(fileno=os.dup(own)).shutdown(socket.SHUT_RDWR)  # the network was gone for a while
        with self.assertRaises(StoreLostError):
            store.add("n", 1)
        self.assertEqual(store.add("n", 1), 1)
        self.assertEqual(store.add("first", 0), 1, "it is another place than before")

    def test_its_connections_give_up(self) -> None:
        """Those of the trainer are left alone."""
        origin = self.origin()
        trainer_fds = set(connections_to(self.server.port))
        store = JobStore(lambda: origin)
        [own] = self.own_connections(store)
        limits = {fd: self.limit_of(fd) for fd in (own, *trainer_fds)}
        self.assertEqual(limits.pop(own), int(GIVE_UP_AFTER * 1000))
        self.assertEqual(set(limits.values()), {0})

    @staticmethod
    def limit_of(fd: int) -> int:
        connection = socket.socket(fileno=os.dup(fd))
        with connection:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def neighbours_of_each(folder: str) -> tuple[str, str, str]:
    """What each of three ranks says of the host of the store, twice, and in its error; rank 1 is on another host."""
    real = job_store.limit_silence

    def limited(fd: int, seconds: float) -> bool:
        return real(fd, seconds) and dist.get_rank() != 1

    with mock.patch.object(job_store, "limit_silence", limited):
        store = JobStore(rendezvous_store)
        store.add("n", 1)
        while store.add("n", 0) < 3:
            time.sleep(0.01)
        first = store.note_neighbours()
        with mock.patch.object(JobStore, "_call", side_effect=AssertionError("it asks again")):
            second = store.note_neighbours()
    return first, second, str(store._lost())


class NeighboursTest(Served):
    def test_the_ranks_on_the_host_of_the_store_are_named(self) -> None:
        neighbours = run_on_ranks(neighbours_of_each, 3, str(self.folder))
        if not neighbours[0][0]:
            self.skipTest("the ranks do not meet by TCP")
        for first, second, text in neighbours:
            self.assertEqual([first, second], [", which runs ranks 0, 2,"] * 2)
            self.assertIn("its host, which runs ranks 0, 2, is lost", text)

    def test_nobody_knows(self) -> None:
        store = JobStore(lambda: self.origin("HashStore"))
        self.assertEqual(store.note_neighbours(), "")
        self.assertEqual(store.where, "the rendezvous store")


if __name__ == "__main__":
    unittest.main()
