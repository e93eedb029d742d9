"""A rank that comes late, and a host of the store that ends at once: in real processes, whose stderr is looked at."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import unittest
from pathlib import Path

import pytest
from kit import forked
from kit.forked import TRAINING, start
from kit.servers import free_port
from parameterized import parameterized

WORLD = 3
TESTS = Path(__file__).parents[1]
PROGRAM = """
import os, sys, time
sys.path.insert(0, {tests!r})
from datetime import timedelta
import torch.distributed as dist
import fsdp_optim
from kit.trained import Trained
from kit.optimizers import adam
from fsdp_optim.transport import meeting
words = {words!r} or sys.argv[1:]
rank, folder, call, delay, late = int(words[0]), words[1], words[2], float(words[3]), int(words[4])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=words[5], RANK=str(rank), WORLD_SIZE="{world}")
dist.init_process_group("gloo")
trained = Trained("FSDP2", adam, 1)
both = trained.model, trained.optim
if call in ("load", "resume"):
    fsdp_optim.save(folder + "/saved", *both, options=fsdp_optim.SaveOptions(durable=False))
if rank == late:
    time.sleep(delay)
steps, read, conclude = [], meeting.Meeting._read, meeting.Meeting.conclude
def slowly(self, name):  # the other ranks read the last verdict late
    time.sleep(3.0 if rank and steps[-1].endswith((": committed", ": installed", ": waited")) else 0.0)
    return read(self, name)
def concluding(self, statement):
    steps.append(statement.step)
    return conclude(self, statement)
if late < 0:
    meeting.Meeting._read, meeting.Meeting.conclude = slowly, concluding
if call == "save":
    fsdp_optim.save(folder + "/new", *both, options=fsdp_optim.SaveOptions(durable=False))
elif call == "load":
    fsdp_optim.load(folder + "/saved", *both)
elif call == "resume":
    fsdp_optim.resume(folder, *both)
elif call == "gather":
    trained.gather(None)
elif call == "async_save":
    handle = fsdp_optim.async_save(folder + "/new", *both, options=fsdp_optim.SaveOptions(durable=False))
    handle.wait()
elif call == "manager":
    manager = fsdp_optim.CheckpointManager(folder, *both, every=1, options=fsdp_optim.ManagerOptions(durable=False))
    manager.step(1)
    manager.close()
"""


SPAWNING = """
import runpy, sys
import torch.multiprocessing as mp

def main(rank, program, *args):
    sys.argv = [program, str(rank), *args]
    runpy.run_path(program)

if __name__ == "__main__":
    method, *arguments = {words!r}
    mp.start_processes(main, tuple(arguments), nprocs={world}, start_method=method)
"""

SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
time.sleep(1000)
"""
LOSING = """
import os, sys, time
sys.path.insert(0, {tests!r})
from datetime import timedelta
import torch.distributed as dist
import fsdp_optim
from fsdp_optim.checkpoint.save import background
from kit.trained import Trained
from kit.optimizers import adam
rank, folder, port = {words!r}
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
trained = Trained("FSDP2", adam, 1)
both = trained.model, trained.optim
manager = fsdp_optim.CheckpointManager(folder + "/run", *both, every=1, options=fsdp_optim.ManagerOptions(durable=False))
manager.step(1)
manager.wait()
fsdp_optim.save(folder + "/saved", *both, options=fsdp_optim.SaveOptions(durable=False))
write = background._write
def held(*args):
    while not os.path.exists(folder + "/gone"):
        time.sleep(0.05)
    return write(*args)
background._write = held
handle = fsdp_optim.async_save(folder + "/behind", *both, options=fsdp_optim.SaveOptions(durable=False))
dist.barrier()
open(f"{{folder}}/ready-{{rank}}", "w").close()
while not os.path.exists(folder + "/gone"):
    time.sleep(0.05)
calls = {{
    "async_save": handle.wait,
    "gather_full_optim_state_dict": lambda: trained.gather(None),
    "save": lambda: fsdp_optim.save(folder + "/new", *both),
    "load": lambda: fsdp_optim.load(folder + "/saved", *both),
    "resume": lambda: fsdp_optim.resume(folder, *both),
    "convert": lambda: fsdp_optim.convert(folder + "/saved", folder + "/converted"),
    "CheckpointManager.step": lambda: manager.step(2),
    "CheckpointManager.rollback": lambda: manager.rollback(to=1),
    "CheckpointManager.wait": manager.close,
}}
for name, call in calls.items():
    try:
        call()
    except fsdp_optim.FsdpOptimError as error:
        words = f"rank {{rank}}: {{name}}", "rendezvous store", f":{{port}}", "has ended"
        assert all(word in str(error) for word in words), (name, error)
        if name == "async_save":
            assert "behind" in str(error), error
    else:
        raise AssertionError(f"{{name}} has not failed")
print("all have raised", flush=True)
os._exit(0)
"""


def run(folder: str, call: str, delay: float, late: int) -> list[tuple[int, str]]:
    """The exit code and stderr of each rank."""
    port = str(free_port())
    ranks = [
        start(
            PROGRAM.format(tests=str(TESTS), world=WORLD, words=[str(rank), folder, call, str(delay), str(late), port]),
            preload=TRAINING,
        )
        for rank in range(WORLD)
    ]
    return [(int(rank.wait(100).returncode or 0), rank.stderr) for rank in ranks]


class LateRanksTest(unittest.TestCase):
    def check(self, call: str, delay: float, late: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for rank, (code, said) in enumerate(run(folder, call, delay, late)):
                self.check_quiet(code, said, f"rank {rank}")

    def check_quiet(self, code: int, said: str, what: str) -> None:
        self.assertEqual(code, 0, f"{what}: {said}")
        for words in ("waitForInput", "timed out", "[c10d]", "DistNetworkError", "terminate called", "Traceback"):
            self.assertNotIn(words, said, what)

    def test_torch_writes_nothing_while_ranks_wait(self) -> None:
        self.check("save", 7.0, 2)

    @parameterized.expand(
        [(call, late) for call in ("load", "gather", "async_save", "manager") for late in range(WORLD)]
    )
    @pytest.mark.slow
    def test_torch_writes_nothing_whoever_is_late(self, call: str, late: int) -> None:
        self.check(call, 7.0, late)

    def test_the_host_of_the_store_leaves_last(self) -> None:
        self.check("save", 0.0, -1)

    @parameterized.expand(["load", "resume", "gather", "async_save", "manager"])
    @pytest.mark.slow
    def test_the_host_of_the_store_leaves_last_after_each_call(self, call: str) -> None:
        self.check(call, 0.0, -1)

    def test_the_host_of_the_store_leaves_last_of_spawned_processes(self) -> None:
        self.check_started("spawn", "manager")

    @parameterized.expand([("spawn", "save"), ("fork", "save"), ("fork", "manager")])
    @pytest.mark.slow
    def test_the_host_of_the_store_leaves_last_of_started_processes(self, method: str, call: str) -> None:
        self.check_started(method, call)

    def check_started(self, method: str, call: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.py")
            program.write_text(PROGRAM.format(tests=str(TESTS), world=WORLD, words=[]))
            words = [method, str(program), folder, call, "0", "-1", str(free_port())]
            done = forked.run(SPAWNING.format(world=WORLD, words=words))
            self.check_quiet(int(done.returncode or 0), done.stderr, method)

    def test_a_lost_store_is_an_error_that_names_the_call_and_the_rank(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            server = start(SERVER.format(port=port))
            ranks = [
                start(LOSING.format(tests=str(TESTS), words=(rank, folder, port)), preload=TRAINING)
                for rank in range(2)
            ]
            ready = [Path(folder, f"ready-{rank}") for rank in range(2)]
            while not all(each.exists() for each in ready) and all(
                Path(f"/proc/{each.pid}").exists() for each in ranks
            ):
                time.sleep(0.05)
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            Path(folder, "gone").touch()
            for rank, process in enumerate(ranks):
                process.wait(100)
                self.assertIn("all have raised", process.stdout, f"rank {rank}: {process.stderr[-3000:]}")


if __name__ == "__main__":
    unittest.main()
