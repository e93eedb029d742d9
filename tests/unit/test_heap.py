"""Memory that a call has freed goes back to the system, where the process has grown."""

from __future__ import annotations

import subprocess
import sys
import unittest

_GROW = """
import sys
from contextlib import nullcontext
from fsdp_optim.heap import _resident_nbytes, returned_heap

def call():
    made = [bytearray(1000) for _ in range(num)]
    return made[::100]  # which stay between those that are freed

num = 100_000
before = _resident_nbytes()
with returned_heap() if sys.argv[1] == "returned" else nullcontext():
    kept = call()
print((_resident_nbytes() - before) >> 20)
"""
_FAILS = """
from unittest import mock
from fsdp_optim import heap

calls = []
with mock.patch.object(heap, "_trim", lambda: calls.append):
    with heap.returned_heap():
        pass
    few = len(calls)
    try:
        with heap.returned_heap():
            kept = [bytearray(1000) for _ in range(50_000)]
            raise ValueError
    except ValueError:
        print(few, len(calls))
"""


def printed(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True, text=True).stdout


@unittest.skipUnless(sys.platform == "linux", "only glibc keeps it so")
class HeapTest(unittest.TestCase):
    def test_what_is_freed_between_objects_that_stay_is_given_back(self) -> None:
        kept, returned = (int(printed(_GROW, how)) for how in ("kept", "returned"))
        self.assertGreater(kept, 80)
        self.assertLess(returned, 30)

    def test_only_where_the_process_has_grown_and_after_an_error_too(self) -> None:
        self.assertEqual(printed(_FAILS).split(), ["0", "1"])
