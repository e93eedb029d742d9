"""Memory that a long call has freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
import unittest
from unittest import mock

from fsdp_optim.boundary import tracebacks
from fsdp_optim.errors import StateError

_GROW = """
import sys
from fsdp_optim.boundary.heap import give_back

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) >> 8  # pages of 4 KiB

def call():
    made = [bytearray(1000) for _ in range(100_000)]
    return made[::100]  # which stay between those that are freed

before = resident()
kept = call()
if sys.argv[1] == "returned":
    give_back()
print(resident() - before)
"""


class HeapTest(unittest.TestCase):
    @unittest.skipUnless(sys.platform == "linux", "only glibc keeps it so")
    def test_what_is_freed_between_objects_that_stay_is_given_back(self) -> None:
        kept, returned = (
            int(subprocess.run([sys.executable, "-c", _GROW, how], capture_output=True, check=True, text=True).stdout)
            for how in ("kept", "returned")
        )
        self.assertGreater(kept, 80)
        self.assertLess(returned, 30)

    def test_after_long_calls_alone_with_errors_too(self) -> None:
        @tracebacks.public
        def call(fails: bool) -> None:
            if fails:
                raise StateError("no state")

        for long_s, number in ((1000.0, 0), (-1.0, 1)):
            with (
                mock.patch.object(tracebacks, "LONG_S", long_s),
                mock.patch.object(tracebacks, "give_back") as give_back,
            ):
                call(False)
                self.assertEqual(give_back.call_count, number)
                with self.assertRaises(StateError):
                    call(True)
                self.assertEqual(give_back.call_count, 2 * number)
