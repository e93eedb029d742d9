"""The house's rules for its own code: which room may use which, what only some may do, and what must not be loaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

from kit.forked import run
from kit.source_tree import (
    FILES,
    MODULES,
    PACKAGE,
    ROOT,
    floor_of,
    imports,
    imports_among,
    is_for_type_checkers,
    nodes,
    nodes_of,
    owner_of,
    tree_of,
)
from parameterized import parameterized


def room_of(module: str) -> str:
    """`fsdp_optim.state.dicts.full` is in the room `state.dicts`, `fsdp_optim.plan.table` in `plan`."""
    names = module.split(".")[1:3]
    return ".".join(names) if len(names) == 2 and (ROOT.joinpath(*names) / "__init__.py").exists() else floor_of(module)


def rooms_used(file: Path) -> set[str]:
    return {room_of(module) for module in imports(file) if module.split(".")[0] == PACKAGE}


def floors_used(file: Path) -> set[str]:
    return {floor_of(module) for module in imports(file) if module.split(".")[0] == PACKAGE}


# Which rooms a room may use besides itself. Arrows run one way: nothing here may close a circle.
_USES = """
errors:
formats:
machine:
state:
storage:
wire:
boundary: errors
layout: errors
layout.views: errors layout
arguments: errors layout.views
registry: errors
saying: errors
results: errors saying
storage.base: errors
transport.job: errors machine
buckets.objects: errors storage.base wire
options: arguments errors layout.views
plan: errors layout
storage.posix: errors machine storage.base
buckets.fsspec: buckets.objects errors storage.base
buckets.s3: buckets.objects errors storage.base
buckets: buckets.fsspec buckets.objects buckets.s3 storage.base storage.posix
offline:
tensors: errors layout plan
prints: plan tensors
transport: errors layout options plan tensors transport.job wire
formats.base: errors layout registry results storage.base tensors
move: errors layout plan tensors transport
view: errors layout tensors
adapters: arguments errors layout layout.views options registry tensors view
model_views: adapters errors layout layout.views options tensors view
foreign: errors formats.base storage.base tensors
formats.own: arguments errors formats.base results storage.base tensors
state.values: errors layout tensors view
foreign.archive: errors foreign formats.base layout storage.base tensors
state.dicts: errors layout options state.values tensors view
foreign.dcp: errors foreign foreign.archive formats.base layout registry storage.base tensors
state.live: errors layout options plan state.dicts state.values tensors view
foreign.hugging_face: errors foreign foreign.dcp formats.base formats.own storage.base
state.merged: errors layout layout.views options state.dicts state.live state.values tensors view
foreign.torch: arguments errors foreign foreign.archive foreign.hugging_face formats.base formats.own options storage.base
    tensors
foreign.deepspeed: arguments errors foreign foreign.archive foreign.torch formats.base layout storage.base tensors
foreign.per_rank: arguments errors foreign foreign.archive foreign.torch formats.base layout storage.base tensors
canonical: errors layout layout.views view
verbs: adapters arguments canonical errors layout layout.views model_views move options results saying state.dicts state.live
    state.merged state.values tensors transport view
checkpoint.common: adapters arguments boundary errors formats.base formats.own layout layout.views move options plan prints
    registry results saying state.dicts state.live state.merged state.values storage.base storage.posix tensors transport
    verbs view
checkpoint.catalog: arguments checkpoint.common errors formats.base formats.own options registry results storage.base
    storage.posix
checkpoint.views: adapters checkpoint.common errors formats.base layout layout.views plan results state.dicts state.values
    tensors
checkpoint.load: adapters checkpoint.common checkpoint.views errors formats.base layout layout.views move options plan
    results saying state.dicts state.live state.merged state.values storage.base tensors transport verbs view
checkpoint: adapters arguments checkpoint.common checkpoint.load errors formats.base layout move options results state.live
    state.merged tensors transport verbs
checkpoint.save: adapters arguments checkpoint.catalog checkpoint.common checkpoint.load errors formats.base layout move
    options plan prints results saying state.live storage.base storage.posix tensors transport verbs wire
checkpoint.proof: adapters arguments boundary checkpoint.common errors formats.base formats.own layout move options plan
    prints results saying state.live state.values storage.base tensors transport verbs wire
checkpoint.run: arguments boundary checkpoint.catalog checkpoint.common checkpoint.load checkpoint.proof checkpoint.save
    errors formats.base options registry results saying storage.base storage.posix tensors transport verbs wire
checkpoint.trainers: checkpoint.common checkpoint.save errors formats.own options storage.base storage.posix tensors
    transport verbs wire
offline.conversion: adapters arguments checkpoint.common checkpoint.load checkpoint.save checkpoint.views errors
    foreign.torch formats.base formats.own layout move options registry results state.dicts state.live state.values
    storage.base storage.posix tensors transport wire
offline.looking: arguments checkpoint.catalog checkpoint.common errors formats.base formats.own layout results storage.base
    tensors
offline.pages: checkpoint.common errors results saying storage.base storage.posix
offline.combining: arguments checkpoint.common checkpoint.load errors formats.base formats.own layout move offline.conversion
    results state.values tensors transport wire
offline.values: adapters arguments checkpoint.common checkpoint.load checkpoint.views errors foreign.archive formats.base
    layout layout.views offline.conversion offline.pages options plan prints results state.dicts state.values storage.base
    tensors
offline.keeping: arguments checkpoint.catalog checkpoint.common errors foreign.archive formats.base formats.own layout move
    offline.conversion offline.values options registry results storage.base tensors
api: adapters boundary checkpoint checkpoint.catalog checkpoint.common checkpoint.load checkpoint.proof checkpoint.run
    checkpoint.save formats.base layout.views model_views options registry results state.dicts state.live storage.posix
    tensors transport verbs
plugins: adapters buckets.objects checkpoint.common checkpoint.proof checkpoint.trainers errors foreign.dcp foreign.deepspeed
    foreign.per_rank foreign.torch formats.base formats.own layout options registry saying state.live storage.base
    storage.posix tensors view
(top): api boundary errors
dcp.dicts: adapters checkpoint.common checkpoint.load errors formats.base layout move options state.live state.merged
    state.values tensors transport verbs view
dcp.storage: arguments checkpoint.catalog checkpoint.common checkpoint.load errors foreign.archive foreign.dcp formats.base
    formats.own layout move registry storage.base tensors
dcp.trees: adapters arguments boundary checkpoint.common checkpoint.load checkpoint.save checkpoint.views dcp.dicts
    dcp.storage errors foreign.dcp formats.base layout layout.views options results state.dicts storage.base storage.posix
    tensors
dcp: boundary dcp.dicts dcp.storage dcp.trees registry tensors
cli: (top) api errors registry saying
cli.commands: api cli errors plugins registry
fairscale: api errors options state.dicts state.live tensors verbs
testing: adapters api buckets.objects errors formats.base layout plan storage.base tensors transport view
__main__: cli
integrations.common: (top) plugins
integrations.hugging_face: (top) integrations.common plugins
integrations: (top) integrations.common integrations.hugging_face plugins
"""


def read_arrows(text: str) -> dict[str, set[str]]:
    """`room: room room`, continued on indented lines; (top) is fsdp_optim/__init__.py."""
    lines = text.replace("\n    ", " ").strip().splitlines()
    rooms = {room: set(uses.split()) for room, _, uses in (line.partition(":") for line in lines)}
    return {room.replace("(top)", ""): {use.replace("(top)", "") for use in uses} for room, uses in rooms.items()}


ARROWS = read_arrows(_USES)
JOIN_THE_PARTS = {"verbs", "checkpoint", "offline", "api", "dcp", "fairscale", "plugins"}
NOT_CORE = {"foreign", "buckets", "offline", "dcp", "checkpoint.trainers", "integrations", "testing", "cli"}
"""What a save and a load in a folder do not need. The core reaches it by the registry, which has its dotted names."""
DOORS = {"plugins", "__main__"}  # of other packages, and of the command line
PARTS = {"adapters", "transport", "formats"}
OF_TORCHS_STORAGE = {  # torch calls the storage classes, and takes their results
    f"torch.distributed.checkpoint{name}" for name in (".filesystem", ".metadata", ".planner", ".storage")
}
OF_TORCHS_CALLS = {  # which are made where the caller gives a planner
    f"torch.distributed.checkpoint.{name}"
    for name in ("metadata", "planner", "state_dict_loader", "state_dict_saver", "storage")
}
OF_DISTRIBUTED = {
    **{
        f"{PACKAGE}.dcp.storage.{name}": OF_TORCHS_STORAGE
        for name in ("box_writing", "planned_boxes", "reader", "torch_metadata", "writer")
    },
    **{f"{PACKAGE}.dcp.trees.{name}": OF_TORCHS_CALLS for name in ("loading", "saving")},
    f"{PACKAGE}.dcp": {  # torch's own classes, for type checkers
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.stateful",
    },
    f"{PACKAGE}.tensors.dtensors": {  # types alone
        "torch.distributed.tensor",
        "torch.distributed.tensor.placement_types",
        "torch.distributed.device_mesh",
    },
}
PROTOCOLS = {f"{PACKAGE}.storage.base", f"{PACKAGE}.buckets.objects.base"}
OF_CLIENTS = {  # packages of an object store's client; the process that its connections or a claim belong to
    f"{PACKAGE}.buckets.fsspec.opening": {"fsspec"},
    f"{PACKAGE}.buckets.s3.client": {"boto3", "botocore", "os"},
    f"{PACKAGE}.buckets.s3.errors": {"botocore", "urllib3"},
    f"{PACKAGE}.buckets.blocks": {"xxhash", "os", "pathlib", "shutil"},  # a folder of this machine
    f"{PACKAGE}.buckets.cached": {"os"},  # the type of a path
    f"{PACKAGE}.buckets.schemes": {"pathlib"},  # file://
}
FILE_SYSTEM = {"os", "fcntl", "shutil", "pathlib", "stat", "tempfile", "glob"}
OF_OS = {"PathLike", "environ", "fspath", "fsencode", "fsdecode", "getpid"}  # none of them asks the file system
ON_PATHS = {  # methods of a path that ask the file system, or change it
    *("mkdir", "rmdir", "unlink", "touch", "rename", "symlink_to", "hardlink_to", "chmod", "iterdir", "glob", "rglob"),
    *("exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "resolve", "read_text", "read_bytes", "write_text"),
    *("write_bytes", "expanduser", "samefile"),
}


def is_among(room: str, rooms: Set[str]) -> bool:
    """Whether a room, or the room that it is in, is one of these."""
    return room in rooms or room.split(".")[0] in rooms


def is_module_inside(name: object) -> bool:
    """Whether a text is the name of a module of this package that a plug-in may not import, as `import_module` takes it."""
    return isinstance(name, str) and name in MODULES and floor_of(name) not in ("", "plugins", "integrations")


def in_circles(uses: Mapping[str, Set[str]]) -> set[str]:
    """The names that are in a circle, or that use one that is."""
    left = set(uses)
    while ready := {name for name in left if not uses[name] & left}:
        left -= ready
    return left


class TestArrows(unittest.TestCase):
    def test_every_room_is_known_and_uses_only_what_it_may(self) -> None:
        wrong = []
        for module, file in MODULES.items():
            room = room_of(module)
            assert room in ARROWS, f"{file}: a room that is not in the plan; add it here and in docs/internals.md"
            wrong += [f"{module} imports {used}" for used in rooms_used(file) - ARROWS[room] - {room}]
        assert not wrong, wrong

    def test_no_room_is_a_long_list(self) -> None:
        """Beyond some twenty files a room is divided by subject. At the top lies what is under all rooms, besides the doors."""
        nums = Counter(file.parent for file in FILES if file.name != "__init__.py")
        self.assertEqual({str(folder): num for folder, num in nums.items() if num > (13 if folder == ROOT else 22)}, {})

    def test_every_arrow_is_used(self) -> None:
        used: dict[str, set[str]] = {room: set() for room in ARROWS}
        for module, file in MODULES.items():
            used[room_of(module)] |= rooms_used(file)
        unused = {room: arrows - used[room] for room, arrows in ARROWS.items() if arrows - used[room]}
        self.assertEqual(unused, {})

    def test_the_core_imports_nothing_else(self) -> None:
        """Not in a function either, nor for types; `tests/unit/test_core_alone.py` looks at what is loaded."""
        core = {room: uses for room, uses in ARROWS.items() if not is_among(room, NOT_CORE | DOORS)}
        wrong = {
            room: imported for room, uses in core.items() if (imported := {u for u in uses if is_among(u, NOT_CORE)})
        }
        assert not wrong, wrong

    def test_integrations_come_by_the_doors(self) -> None:
        """What our own plug-ins need is public, so that those of other packages have it too. Not in a function either."""
        doors, wrong = {PACKAGE, f"{PACKAGE}.plugins"}, []
        for module, file in MODULES.items():
            if floor_of(module) == "integrations":
                used = {name for name in imports(file) if name.split(".")[0] == PACKAGE} - doors
                wrong += [f"{module} imports {name}" for name in used if floor_of(name) != "integrations"]
                wrong += [
                    f"{module}, line {node.lineno}: {node.value}"
                    for node in nodes_of(file)
                    if isinstance(node, ast.Constant) and is_module_inside(node.value)
                ]
        assert not wrong, wrong
        self.assertTrue(is_module_inside(f"{PACKAGE}.checkpoint.save"))
        self.assertFalse(is_module_inside(f"{PACKAGE}.integrations.peft"))
        self.assertFalse(is_module_inside(f"{PACKAGE}.save(...)"))

    def test_nothing_uses_the_integrations(self) -> None:
        """Each imports the trainer that it joins, which only users of that trainer have."""
        assert not [room for room, uses in ARROWS.items() if "integrations" in uses]

    def test_the_arrows_close_no_circle(self) -> None:
        assert not in_circles(ARROWS), f"a circle among {in_circles(ARROWS)}"

    def test_no_circle_among_files(self) -> None:
        """Also inside a room; an import in a function, or for types alone, counts, because it only hides a circle."""
        uses = {module: imports(file) & set(MODULES) - {module} for module, file in MODULES.items()}
        uses = {module: used - {PACKAGE} for module, used in uses.items() if module != PACKAGE}
        assert not in_circles(uses), f"a circle among {in_circles(uses)}"

    def test_circles_are_seen(self) -> None:
        self.assertEqual(in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}), {"a", "b", "c"})
        self.assertEqual(in_circles({"a": {"b"}, "b": {"c"}, "c": set()}), set())

    @parameterized.expand(
        [
            ("from fsdp_optim.plan import Copy",),
            ("def f():\n    from fsdp_optim import plan",),
            ("from .. import plan",),
            ("if TYPE_CHECKING:\n    from fsdp_optim.plan import Copy",),
            ("def f():\n    if typing.TYPE_CHECKING:\n        import fsdp_optim.plan",),
        ]
    )
    def test_every_kind_of_import_counts(self, code: str) -> None:
        file = ROOT / "verbs" / "made_up.py"
        self.assertIn(f"{PACKAGE}.plan", imports_among(nodes(ast.parse(code)), file))
        is_at_import = code.startswith("from")
        modules = imports_among(nodes(ast.parse(code), at_import=True), file)
        self.assertEqual(f"{PACKAGE}.plan" in modules, is_at_import)

    def test_only_verbs_and_api_join_the_parts(self) -> None:
        for module, file in MODULES.items():
            if len(floors_used(file) & PARTS) > 1:
                assert floor_of(module) in JOIN_THE_PARTS, f"{module} joins {floors_used(file) & PARTS}"

    def test_only_verbs_and_api_know_a_kind_of_store(self) -> None:
        """Formats read and write through the protocol, so that they work with any store; so does what proves a store."""
        for module, file in MODULES.items():
            if floor_of(module) not in {"storage", "buckets", *JOIN_THE_PARTS}:
                known = {used for used in imports(file) if floor_of(used) in ("storage", "buckets")} - PROTOCOLS
                assert not known, f"{module} imports {known}"

    def test_stores_know_bytes_and_names(self) -> None:
        """No tensors, no arrays; and a store that is no folder has nothing to do with the file system."""
        for module, file in MODULES.items():
            if floor_of(module) in ("storage", "buckets"):
                outside = {used.split(".")[0] for used in imports(file)} - set(sys.stdlib_module_names) - {PACKAGE}
                assert outside <= OF_CLIENTS.get(module, set()), f"{module} imports {outside}"
                at_import = {used.split(".")[0] for used in imports(file, at_import=True)}
                assert at_import <= {*sys.stdlib_module_names, PACKAGE, "xxhash"}, (
                    f"{module} imports {at_import} at once"
                )
                if not module.startswith(f"{PACKAGE}.storage.posix"):
                    files = imports(file) & FILE_SYSTEM - OF_CLIENTS.get(module, set())
                    assert not files, f"{module} imports {files}"

    def test_files_are_touched_in_storage_only(self) -> None:
        """Elsewhere a path is a value: its type, `os.PathLike`, is all that is used of `os`."""
        wrong = []
        for module, file in MODULES.items():
            if floor_of(module) in (
                "storage",
                "buckets",
                "testing",
                "machine",
            ):  # machine: /proc, and descriptors of connections
                continue
            wrong += [f"{module} imports {used}" for used in imports(file) & (FILE_SYSTEM - {"os", "pathlib"})]
            for node in nodes_of(file):
                if isinstance(node, ast.Attribute) and owner_of(node) == "os" and node.attr not in OF_OS:
                    wrong.append(f"{module}, line {node.lineno}: os.{node.attr}")
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ON_PATHS:
                    wrong.append(f"{module}, line {node.lineno}: {ast.unparse(node.func)}")
            if floor_of(module) in ("formats", "foreign") and imports(file) & FILE_SYSTEM:
                wrong.append(f"{module} imports {imports(file) & FILE_SYSTEM}")
        assert not wrong, wrong

    @parameterized.expand([("layout",), ("plan",), ("errors",)])
    def test_pure_rooms_know_no_torch(self, room: str) -> None:
        """Nor any other package but numpy: pure values, so that any world size is tested in one process."""
        for module, file in MODULES.items():
            if floor_of(module) == room:
                outside = {used.split(".")[0] for used in imports(file)} - set(sys.stdlib_module_names) - {PACKAGE}
                assert outside <= {"numpy"}, f"{file} imports {outside}"

    def test_one_adapter_does_not_know_another(self) -> None:
        wrappers = {"fairscale", "fsdp1", "dtensor", "checkpointable", "replicated"}
        for wrapper in wrappers:
            file = ROOT / "adapters" / f"{wrapper}.py"
            if file.exists():
                others = {f"{PACKAGE}.adapters.{other}" for other in wrappers - {wrapper}}
                assert not imports(file) & others, f"{file} imports {imports(file) & others}"

    def test_collectives_are_called_in_transport_only(self) -> None:
        collectives = {
            *("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp", "broadcast", "all_reduce", "reduce"),
            *("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier"),
            *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "new_group"),
            *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
        }
        for module, file in MODULES.items():
            for node in nodes_of(file):
                if isinstance(node, ast.Attribute) and owner_of(node) in ("dist", "torch.distributed"):
                    assert not node.attr.endswith(("_object", "_object_list")), f"{module}: dist.{node.attr}"
                    if floor_of(module) != "transport":
                        assert node.attr not in collectives, f"{module}, line {node.lineno}: dist.{node.attr}"

    def test_torch_distributed_is_imported_in_transport_only(self) -> None:
        """And where groups are read: in adapters. Others name the type of a group, or are in the list, with a reason."""
        for module, file in MODULES.items():
            if floor_of(module) in ("transport", "adapters", "testing", "integrations"):
                continue
            imported = {name for name in imports(file) if name.startswith("torch.distributed")}
            if any(isinstance(node, ast.Attribute) and node.attr == "ProcessGroup" for node in nodes_of(file)):
                imported -= {"torch.distributed"}
            assert imported <= OF_DISTRIBUTED.get(module, set()), f"{module} imports {imported}"

    def test_who_is_who_is_asked_in_transport_only(self) -> None:
        """`World` says which rank this is, so that ranks need not be processes. Adapters read the groups of wrappers."""
        wrong = []
        for module, file in MODULES.items():
            if floor_of(module) in (
                "transport",
                "adapters",
                "testing",
                "integrations",
            ):  # trainers have such ranks only
                continue
            for node in nodes_of(file):
                is_asked = isinstance(node, ast.Attribute) and owner_of(node) in ("dist", "torch.distributed")
                if is_asked and node.attr != "ProcessGroup" and module != f"{PACKAGE}.options":  # which names a group
                    wrong.append(f"{module}, line {node.lineno}: dist.{node.attr}")
        assert not wrong, wrong


DIVIDED_BY_HAND = {"fsdp_optim.tensors.memory", "fsdp_optim.buckets.objects.writer"}
"""`Budget` itself; and a store, which knows bytes and no `Budget`: there a function with a name divides."""


def is_budget(node: ast.AST) -> bool:
    """Whether an expression is a number of bytes of a budget: `bucket_nbytes`, `options.memory`, `budget.nbytes`."""
    if isinstance(node, ast.Attribute) and node.attr == "nbytes":
        return is_budget(node.value) or isinstance(node.value, ast.Call)  # budget.share(...).nbytes
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "memory" or "budget" in name.lower() or "bucket_nbytes" in name.lower()


def divisions_by_hand(tree: ast.AST) -> list[str]:
    """Where a budget is divided by another number than the bytes of an element."""
    divisions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div, ast.RShift)):
            is_by_element = ast.unparse(node.right).endswith("itemsize")
            if is_budget(node.left) and not is_by_element:
                divisions.append(f"line {node.lineno}: {ast.unparse(node)}")
    return divisions


RUN_PLANS = {
    "exchange": {"move.executor", "move.short", "transport.parcels"},  # and pickled values, which have no placement
    "copy_in_memory": {"state.live.local_dict"},  # a whole value that this rank cuts for itself
    "RankPlan": {"move.executor", "move.routes", "transport.messages"},
}


class TestOneExecutor(unittest.TestCase):
    @parameterized.expand(list(RUN_PLANS))
    def test_nobody_else_runs_plans(self, name: str) -> None:
        users = set()
        for module, file in MODULES.items():
            if floor_of(module) in ("testing", "plan") or module == f"{PACKAGE}.transport.base":
                continue
            imported = {
                alias.name for node in nodes_of(file) if isinstance(node, ast.ImportFrom) for alias in node.names
            }
            used = {node.attr for node in nodes_of(file) if isinstance(node, ast.Attribute)}  # memory.copy_in_memory
            if name in imported | (used if name.islower() else set()):
                users.add(module.removeprefix(f"{PACKAGE}."))
        self.assertEqual(users, RUN_PLANS[name])


class TestBudget(unittest.TestCase):
    def test_a_budget_is_shared_out_by_name(self) -> None:
        wrong = {m: divisions_by_hand(tree_of(f)) for m, f in MODULES.items() if m not in DIVIDED_BY_HAND}
        assert not any(wrong.values()), {module: lines for module, lines in wrong.items() if lines}

    @parameterized.expand(
        [
            ("bucket_nbytes // 2", 1),
            ("self.options.memory // (2 * SHARES)", 1),
            ("budget.nbytes / 2", 1),
            ("group.budget.nbytes >> 1", 1),
            ("budget.nbytes // value.dtype.itemsize", 0),
            ("budget.share(2, 'two').nbytes // 2", 1),
            ("budget.share(2, 'two').nbytes", 0),
            ("nbytes // 2", 0),
        ]
    )
    def test_divisions_are_seen(self, code: str, num: int) -> None:
        self.assertEqual(len(divisions_by_hand(ast.parse(code))), num)


def loaded_by(code: str) -> set[str]:
    """Modules that a Python process which has torch has loaded after some code."""
    done = run(f"{code}\nimport sys\nprint('\\n'.join(sys.modules))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


WRAPPERS = (
    *(
        "fairscale.",
        "deepspeed.",
        "accelerate.",
        "lightning.",
        "peft.",
        "torchtitan.",
        "verl.",
        "pytest.",
        "torch.nn.parallel.",
        "torch.distributed.fsdp.",
    ),
    *("torch.distributed._composable.", "torch.distributed.tensor.", "torch.distributed.checkpoint."),
    "torch.distributed.device_mesh.",
)


class TestImport(unittest.TestCase):
    def test_importing_the_package_loads_no_wrapper(self) -> None:
        bare, loaded = loaded_by("import torch"), loaded_by(f"import {PACKAGE}")
        more = loaded - bare
        wrong = {name for name in more if f"{name}.".startswith(WRAPPERS)}
        assert not wrong, sorted(wrong)
        assert f"{PACKAGE}.fairscale" not in loaded
        assert f"{PACKAGE}.testing" not in loaded
        assert not [name for name in loaded if name.startswith(f"{PACKAGE}.integrations")]

    def test_importing_the_package_is_cheap(self) -> None:
        """What a name needs is imported when the name is asked for: importing all of it takes half a second after torch."""
        for module, more in ((PACKAGE, []), (f"{PACKAGE}.plugins", ["plugins", "registry"])):
            code = f"import sys, {module}\nprint(*sys.modules)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
            loaded = {name for name in done.stdout.split() if name.split(".")[0] in (PACKAGE, "torch", "numpy", "tqdm")}
            self.assertEqual(loaded, {PACKAGE, *(f"{PACKAGE}.{name}" for name in ["errors", *more])})

    def test_names_are_there_before_they_are_asked_for(self) -> None:
        code = f"import {PACKAGE}\nprint(*dir({PACKAGE}))\nassert not hasattr({PACKAGE}, 'nothing')\n"
        done = run(f"{code}from {PACKAGE} import *\nload, CheckpointError")
        self.assertEqual(done.returncode, 0, done.stderr)
        import fsdp_optim

        self.assertEqual(done.stdout.split(), fsdp_optim.__all__)

    def test_the_door_of_plugins_has_what_it_names(self) -> None:
        """The table by which names are imported, the list, and what type checkers see."""
        from fsdp_optim import plugins

        file = ROOT / "plugins.py"
        block = next(node for node in tree_of(file).body if is_for_type_checkers(node))
        seen = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(block)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.assertEqual(plugins._WHERE, seen)
        self.assertEqual(plugins.__all__, sorted(seen))
        for name in plugins.__all__:
            self.assertIsNotNone(getattr(plugins, name))

    def test_asking_for_the_drop_in_loads_fairscale(self) -> None:
        loaded = loaded_by(f"from {PACKAGE}.fairscale import FullyShardedDataParallel")
        assert "fairscale" in loaded
        assert not [name for name in loaded if name.startswith("torch.distributed.fsdp.fully_sharded")]


class TestConcepts(unittest.TestCase):
    """docs/internals.md names every room, every placement and every end that there is, and no other."""

    text = (ROOT.parent / "docs" / "internals.md").read_text()

    def test_rooms(self) -> None:
        block = self.text.split("## Modules")[1].split("```")[1]
        left = " ".join(line[:46] for line in block.splitlines())
        named = set(re.findall(r"[a-z]\w+", left)) - {"base", "all"}
        floors = {room.split(".")[0] for room in ARROWS if room}
        self.assertEqual(named - floors, set())
        self.assertEqual(floors - named, {"__main__"})

    def test_sub_rooms(self) -> None:
        rooms = {room for room in ARROWS if "." in room}
        self.assertEqual(rooms - set(re.findall(r"`([a-z_]+\.[a-z_0-9]+)`", self.text)), set())

    def test_drawn_rooms(self) -> None:
        global_state = (ROOT.parent / "docs" / "rooms.svg").read_text()
        drawn = set(re.findall(r'class="n">(\w+)<', global_state))
        words = set(re.findall(r"\w+", " ".join(re.findall(r'class="[cs]">([^<]*)<', global_state))))
        floors = {room.split(".")[0] for room in ARROWS}
        self.assertEqual(drawn - floors, set())
        self.assertEqual(floors - drawn - words - {"", "__main__"}, set())

    @parameterized.expand([("End",), ("Placement",)])
    def test_classes(self, parent: str) -> None:
        families = {parent}
        classes = [node for file in FILES for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
        for _ in range(3):  # children, and theirs
            families |= {c.name for c in classes if {ast.unparse(base) for base in c.bases} & families}
        parents = {ast.unparse(base) for c in classes for base in c.bases}
        unnamed = {name for name in families - parents if f"`{name}`" not in self.text}
        self.assertEqual(unnamed, set())
