"""The core alone: `import fsdp_optim`, saves, loads and managed runs in a folder load nothing of what they do not need."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Mapping

from kit.forked import run
from parameterized import parameterized

PACKAGE = "fsdp_optim"
NOT_CORE = ("foreign", "buckets", "offline", "dcp", "checkpoint.trainers", "integrations", "testing", "cli")

BEGIN = """
import os, pathlib, sys, tempfile
import torch
import fsdp_optim

root = tempfile.mkdtemp()
model = torch.nn.Linear(3, 2)
optim = torch.optim.Adam(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optim.step()
"""

CALLS = {
    "import": "",
    "save and load": """
fsdp_optim.save(f"{root}/1", model, optim, step=1, state={"x": [torch.ones(2)], "own": fsdp_optim.per_rank(3)})
saved = fsdp_optim.save(f"{root}/1", model, optim, step=1, overwrite=True)
assert saved.path == pathlib.Path(root) / "1", saved.path
fsdp_optim.load(f"{root}/1", model, optim, options=fsdp_optim.LoadOptions(compare=True))
fsdp_optim.load(f"{root}/1")
""",
    "async_save": """
fsdp_optim.async_save(f"{root}/2", model, optim).wait()
fsdp_optim.wait_for_saves()
""",
    "manager": """
os.mkdir(f"{root}/run")  # a launcher has made it
for begin in (0, 4):
    with fsdp_optim.CheckpointManager(f"{root}/run", model, optim, every=2, keep_last=1) as manager:
        assert manager.resume() == begin
        for step in range(begin + 1, begin + 5):
            manager.step(step)
""",
    "listing": """
for step in (1, 2):
    fsdp_optim.save(f"{root}/list/step-{step}", model, optim, step=step)
assert [one.step for one in fsdp_optim.checkpoints(f"{root}/list")] == [2, 1]
assert fsdp_optim.latest(f"{root}/list").name == "step-2"
assert fsdp_optim.resume(f"{root}/list", model, optim).step == 2
""",
    "gather and load": """
full = fsdp_optim.gather_full_optim_state_dict(model, optim)
fsdp_optim.load_optim_state_dict(optim, fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))
""",
}


ASKED_FOR = {
    "foreign.dcp": 'fsdp_optim.save(f"{root}/dcp", model, optim, format="dcp")',
    "buckets.fsspec": 'fsdp_optim.save(f"file://{root}/url", model, optim)',
    "offline": 'fsdp_optim.save(f"{root}/seen", model)\nfsdp_optim.inspect(f"{root}/seen")',
    "foreign.torch": 'torch.save(model.state_dict(), f"{root}/a.pt")\nfsdp_optim.load(f"{root}/a.pt", model)',
}
"""By room, a call that needs it."""

LOOK = f"""
def look(what):
    found = [name for name in sys.modules if f"{{name}}.".startswith({tuple(f"{PACKAGE}.{room}." for room in NOT_CORE)!r})]
    print(f"{{what}}:", *found)
"""


@functools.cache
def loaded() -> Mapping[str, list[str]]:
    """By call, one after the other in a fresh process, all modules of the other rooms that are loaded after it."""
    calls = [code + f"\nlook({what!r})\n" for what, code in [*CALLS.items(), *ASKED_FOR.items()]]
    done = run("\n".join([LOOK, BEGIN, *calls]))
    assert done.returncode == 0, done.stderr
    return {what: names.split() for what, _, names in (line.partition(":") for line in done.stdout.splitlines())}


FIRST_USE = """
import sys
import torch
before = {name.partition(".")[0] for name in sys.modules}, {name for name in sys.modules if name.startswith("torch")}
import fsdp_optim
small = {name for name in sys.modules if name.startswith("fsdp_optim")}
fsdp_optim.save
now = {name.partition(".")[0] for name in sys.modules}, {name for name in sys.modules if name.startswith("torch")}
print(*sorted(small))
print(*sorted(now[0] - before[0] - sys.stdlib_module_names))
print(*sorted(now[1] - before[1]))
"""


class FirstUseTest(unittest.TestCase):
    def test_it_loads_no_more_of_torch_and_two_small_packages(self) -> None:
        """`import fsdp_optim` loads the errors; the first name of it loads nothing that takes long."""
        done = run(FIRST_USE)
        self.assertEqual(done.returncode, 0, done.stderr)
        package, others, of_torch = done.stdout.split("\n")[:3]
        by_kit = {"fsdp_optim.arguments", "fsdp_optim.options"}
        self.assertEqual(set(package.split()) - by_kit, {"fsdp_optim", "fsdp_optim.errors"})
        private = "_sysconfigdata"  # of the standard library, with the name of the platform
        loaded = {name for name in others.split() if not name.startswith(private)}
        self.assertEqual(loaded - {"fsdp_optim"}, {"msgspec", "xxhash"})
        self.assertEqual(of_torch.split(), [])


MOST_MODULES, MOST_DATACLASSES = 290, 184
"""Of this package, after the first save of a process: today's, with little room. Each takes some half a millisecond."""

FIRST_SAVE = f"""
{BEGIN}
import dataclasses, gc
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "stop" else None)
fsdp_optim.save
print(*collected)
fsdp_optim.save(root + "/1", model, optim, options=fsdp_optim.SaveOptions(progress=False))
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fsdp_optim"]
classes = [
    value
    for module in modules
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__ and dataclasses.is_dataclass(value)
]
print(len(modules), len(classes))
"""


class FirstSaveTest(unittest.TestCase):
    def test_it_loads_few_modules_and_makes_few_dataclasses(self) -> None:
        """Which count, because a clock would blur; and no collection of all of torch's objects falls among the imports."""
        done = run(FIRST_SAVE)
        self.assertEqual(done.returncode, 0, done.stderr)
        collected, counts = [list(map(int, line.split())) for line in done.stdout.splitlines()[:2]]
        self.assertNotIn(2, collected)
        num_modules, num_dataclasses = counts
        self.assertLess(num_modules, MOST_MODULES)
        self.assertGreater(num_modules, MOST_MODULES - 25, "lower the bound")
        self.assertLess(num_dataclasses, MOST_DATACLASSES)
        self.assertGreater(num_dataclasses, MOST_DATACLASSES - 25, "lower the bound")


class CoreAloneTest(unittest.TestCase):
    @parameterized.expand(list(CALLS))
    def test_nothing_else_is_loaded(self, what: str) -> None:
        self.assertEqual(loaded()[what], [])

    @parameterized.expand(list(ASKED_FOR))
    def test_what_is_asked_for_is_loaded(self, room: str) -> None:
        before = loaded()[{"foreign.dcp": list(CALLS)[-1]}.get(room, "foreign.dcp")]
        self.assertEqual([name for name in before if name.startswith(f"{PACKAGE}.{room}")], [])
        self.assertTrue([name for name in loaded()[room] if name.startswith(f"{PACKAGE}.{room}")])


if __name__ == "__main__":
    unittest.main()
