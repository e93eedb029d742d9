"""Two hosts, where root and FUSE allow, in `make test-all`: background saves and a manager on what is like NFS at its worst."""

from __future__ import annotations

import unittest

from hosts.case import BenchTest
from hosts.file_systems import Kit

LIKE_NFS = Kit("--cache-seconds", "3", "--close-to-open", "--stale", "--silly-renames", "--locks", "local")


class TwoHostsTest(BenchTest):
    def test_background_saves_and_a_manager(self) -> None:
        bench = self.bench(2, LIKE_NFS)
        bench.run("checkpoints", "/shared/run", "background", "manager").succeed(200.0)


if __name__ == "__main__":
    unittest.main()
