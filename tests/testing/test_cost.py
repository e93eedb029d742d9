"""What tests cost: the processes that a test starts count, and those whose parent has ended before them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUSY = 0.5  # seconds of processor time
TEST = f"""
import os, subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < {BUSY}: pass"

def test_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_an_orphan(tmp_path):
    code = f"import os\\nif os.fork(): os._exit(0)\\n{{BURN}}\\nopen({{str(tmp_path / 'done')!r}}, 'w')"
    subprocess.run([sys.executable, "-c", code], check=True)
    while not (tmp_path / "done").exists():
        time.sleep(0.01)

def test_nothing():
    pass
"""


class CostTest(unittest.TestCase):
    def test_children_and_orphans_count(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_busy.py").write_text(TEST)
            command = [sys.executable, "-m", "tests.cost", "-q", "-p", "no:cacheprovider", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        costs = {name: float(cost) for cost, name in re.findall(r"([\d.]+) s  \S*::(\w+)", done.stdout)}
        self.assertEqual(set(costs), {"test_a_child", "test_an_orphan", "test_nothing"}, done.stdout)
        for name in ("test_a_child", "test_an_orphan"):
            self.assertGreater(costs[name], 0.9 * BUSY, done.stdout)
        self.assertLess(costs["test_nothing"], 0.5 * BUSY)
        user, system = re.findall(r"(\d+) s (?:user|system)", done.stdout.splitlines()[-1])
        self.assertGreaterEqual(int(user) + int(system), 1, done.stdout)


if __name__ == "__main__":
    unittest.main()
