"""The house's rules for its own code: which room may use which, and what must not be loaded."""

from __future__ import annotations

import ast
import functools
import re
import sys
import unittest
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

from kit.scripts import run
from parameterized import parameterized

PACKAGE = "fsdp_optim"
ROOT = Path(__file__).parents[1] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str:
    """`fsdp_optim.state.dicts.full` is on the floor `state`, `fsdp_optim.plan` on `plan`, fsdp_optim/__init__.py on ``."""
    return module.split(".")[1] if "." in module else ""


def room_of(module: str) -> str:
    """`fsdp_optim.state.dicts.full` is in the room `state.dicts`, `fsdp_optim.plan.table` in `plan`."""
    names = module.split(".")[1:3]
    return ".".join(names) if len(names) == 2 and (ROOT.joinpath(*names) / "__init__.py").exists() else floor_of(module)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes(tree: ast.AST, *, at_import: bool = False) -> Iterator[ast.AST]:
    """All nodes, with those that only type checkers see. `at_import`: only the nodes that run when the file is imported."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if at_import and (is_function or is_for_type_checkers(node)):
                continue
            yield node
            waiting.append(node)


@functools.cache
def nodes_of(file: Path, *, at_import: bool = False) -> list[ast.AST]:
    return list(nodes(tree_of(file), at_import=at_import))


def owner_of(node: ast.Attribute) -> str:
    """`torch.distributed` of `torch.distributed.send`; "" of what is no chain of names."""
    names: list[str] = []
    value = node.value
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return ".".join([value.id, *reversed(names)]) if isinstance(value, ast.Name) else ""


MODULES = {module_of(file): file for file in FILES}


@functools.cache
def imports(file: Path, *, at_import: bool = False) -> frozenset[str]:
    """Modules that a file imports, also for types alone, with the package's own ones by their full names."""
    return imports_among(nodes_of(file, at_import=at_import), file)


def imports_among(nodes: Iterable[ast.AST], file: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_of(file).split(".")
                package = package if file.name == "__init__.py" else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                one = f"{base}.{alias.name}"
                found.add(one if one in MODULES else base)
    return frozenset(found)


def rooms_used(file: Path) -> set[str]:
    return {room_of(module) for module in imports(file) if module.split(".")[0] == PACKAGE}


def floors_used(file: Path) -> set[str]:
    return {floor_of(module) for module in imports(file) if module.split(".")[0] == PACKAGE}


# Which rooms a room may use besides itself. Arrows run one way: nothing here may close a circle.
_USES = """
errors:
formats:
machine:
speed:
state:
storage:
elements: errors
results: errors
arguments: errors
layout: errors
options: arguments errors
storage.base: errors
transport.job: errors machine
buckets.objects: errors machine storage.base
plan: errors layout
storage.posix: errors machine storage.base
buckets.fsspec: buckets.objects errors storage.base
buckets.s3: buckets.objects errors storage.base
memory: plan
buckets: buckets.fsspec buckets.objects buckets.s3 errors storage.base storage.posix
dtensors: errors layout memory
transport: errors layout memory options plan transport.job
formats.base: dtensors elements errors layout memory storage.base
move: errors layout memory plan transport
view: dtensors errors layout memory
adapters: arguments dtensors elements errors layout memory options view
foreign: errors formats.base storage.base
formats.own: errors formats.base memory storage.base
state.values: dtensors elements errors layout memory view
foreign.archive: errors foreign formats.base layout memory storage.base
state.dicts: dtensors elements errors layout memory options state.values view
foreign.dcp: elements errors foreign foreign.archive formats.base formats.own layout memory storage.base
state.live: errors layout memory options plan state.dicts state.values view
foreign.hugging_face: errors foreign foreign.dcp formats.base formats.own storage.base
state.merged: errors layout memory options state.dicts state.live state.values view
foreign.torch: errors foreign foreign.archive foreign.hugging_face formats.base formats.own memory storage.base
verbs: adapters arguments dtensors elements errors layout memory move options results speed state.dicts state.live
    state.merged state.values transport view
foreign.deepspeed: errors foreign foreign.archive foreign.torch formats.base layout storage.base
foreign.per_rank: errors foreign foreign.archive foreign.torch formats.base layout memory storage.base
checkpoint.common: adapters arguments buckets elements errors foreign.dcp foreign.deepspeed foreign.hugging_face
    foreign.per_rank foreign.torch formats.base formats.own layout memory move options plan results speed
    state.dicts state.live state.merged state.values storage.base storage.posix transport transport.job verbs view
checkpoint.catalog: arguments buckets checkpoint.common errors foreign.torch formats.base results storage.base
    storage.posix
checkpoint.load: adapters checkpoint.common errors foreign foreign.archive formats.base layout memory move options
    plan results speed state.dicts state.live state.merged state.values storage.base transport verbs view
checkpoint: adapters checkpoint.common checkpoint.load errors formats.base layout memory move options results
    state.merged transport verbs
checkpoint.save: adapters checkpoint.catalog checkpoint.common checkpoint.load errors formats.base layout memory
    move options plan results speed state.dicts state.live storage.base storage.posix transport verbs
checkpoint.run: arguments buckets checkpoint.catalog checkpoint.common checkpoint.load checkpoint.save errors
    formats.base memory options results storage.posix transport verbs
checkpoint.trainers: adapters checkpoint.common checkpoint.load checkpoint.save errors formats.own memory options
    results state.live storage.base storage.posix transport
offline: adapters arguments buckets checkpoint.common checkpoint.load checkpoint.save errors foreign
    foreign.archive foreign.torch formats.base formats.own layout memory move options results state.dicts
    state.live state.values storage.base storage.posix transport
api: buckets checkpoint checkpoint.catalog checkpoint.common checkpoint.load checkpoint.run checkpoint.save memory
    offline options results state.dicts state.live storage.posix verbs
cli: api errors options
fairscale: api errors memory options state.dicts state.live verbs
integrations: (top) api buckets checkpoint checkpoint.common checkpoint.load checkpoint.run checkpoint.save
    checkpoint.trainers errors memory options results state.live storage.base storage.posix
testing: adapters api buckets.objects errors foreign formats.base layout memory plan storage.base transport view
(top): api errors
__main__: cli
"""


def read_arrows(text: str) -> dict[str, set[str]]:
    """`room: room room`, continued on indented lines; (top) is fsdp_optim/__init__.py."""
    lines = text.replace("\n    ", " ").strip().splitlines()
    rooms = {room: set(uses.split()) for room, _, uses in (line.partition(":") for line in lines)}
    return {room.replace("(top)", ""): {use.replace("(top)", "") for use in uses} for room, uses in rooms.items()}


ARROWS = read_arrows(_USES)
JOIN_THE_PARTS = {"verbs", "checkpoint", "offline", "api", "fairscale"}
PARTS = {"adapters", "transport", "formats"}


OF_DISTRIBUTED = {
    f"{PACKAGE}.foreign.dcp.writer": {
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.metadata",
    },  # pickled
    f"{PACKAGE}.dtensors": {  # types alone
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
    f"{PACKAGE}.buckets.mounted": {"pathlib"},  # file://
}
FILE_SYSTEM = {"os", "fcntl", "shutil", "pathlib", "stat", "tempfile", "glob"}
OF_OS = {"PathLike", "environ", "fspath", "fsencode", "fsdecode", "getpid"}  # none of them asks the file system
ON_PATHS = {  # methods of a path that ask the file system, or change it
    *("mkdir", "rmdir", "unlink", "touch", "rename", "symlink_to", "hardlink_to", "chmod", "iterdir", "glob", "rglob"),
    *("exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "resolve", "read_text", "read_bytes", "write_text"),
    *("write_bytes", "expanduser", "samefile"),
}


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
            assert room in ARROWS, f"{file}: a room that is not in the plan; add it here and in docs/concepts.md"
            wrong += [f"{module} imports {used}" for used in rooms_used(file) - ARROWS[room] - {room}]
        assert not wrong, wrong

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
        found = imports_among(nodes(ast.parse(code), at_import=True), file)
        self.assertEqual(f"{PACKAGE}.plan" in found, is_at_import)

    def test_only_verbs_and_api_join_the_parts(self) -> None:
        for module, file in MODULES.items():
            if len(floors_used(file) & PARTS) > 1:
                assert floor_of(module) in JOIN_THE_PARTS, f"{module} joins {floors_used(file) & PARTS}"

    def test_only_verbs_and_api_know_a_kind_of_store(self) -> None:
        """Formats read and write through the protocol, so that they work with any store; so does what proves a store."""
        for module, file in MODULES.items():
            if floor_of(module) not in {"storage", "buckets", "integrations", *JOIN_THE_PARTS}:
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
            found = {name for name in imports(file) if name.startswith("torch.distributed")}
            if any(isinstance(node, ast.Attribute) and node.attr == "ProcessGroup" for node in nodes_of(file)):
                found -= {"torch.distributed"}
            assert found <= OF_DISTRIBUTED.get(module, set()), f"{module} imports {found}"

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


DIVIDED_BY_HAND = {"fsdp_optim.memory", "fsdp_optim.buckets.objects.writer"}
"""`Budget` itself; and a store, which knows bytes and no `Budget`: there a function with a name divides."""


def is_budget(node: ast.AST) -> bool:
    """Whether an expression is a number of bytes of a budget: `bucket_nbytes`, `options.memory`, `budget.nbytes`."""
    if isinstance(node, ast.Attribute) and node.attr == "nbytes":
        return is_budget(node.value) or isinstance(node.value, ast.Call)  # budget.share(...).nbytes
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "memory" or "budget" in name.lower() or "bucket_nbytes" in name.lower()


def divisions_by_hand(tree: ast.AST) -> list[str]:
    """Where a budget is divided by another number than the bytes of an element."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div, ast.RShift)):
            is_by_element = ast.unparse(node.right).endswith("itemsize")
            if is_budget(node.left) and not is_by_element:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


RUN_PLANS = {
    "exchange": {"move", "transport.parcels"},  # the executor; pickled values, which have bytes and no placement
    "copy_in_memory": {"state.live.local_dict"},  # a whole value that this rank cuts for itself
    "RankPlan": {"move", "transport.messages"},
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


# Private names of the wrappers, and public ones that only their own adapter must know.
PRIVATE: dict[str, set[str]] = {
    "fairscale": {
        *("_fpw_module", "_is_sharded", "_orig_size", "_num_flatten_params", "numel_padded_per_param"),
        *("_full_param_padded", "_fp32_shard"),
        *("_get_shard", "_lazy_init", "_is_root", "_param_name_groups", "non_shared_params", "flat_params"),
        *("no_broadcast_optim_state", "uncollected_opt_state"),
    },
}


IN_FILES = {
    "fsdp_optim.foreign.per_rank.fairscale_shards": {"no_broadcast_optim_state"},
    "fsdp_optim.foreign.per_rank.fairscale_writer": {"no_broadcast_optim_state"},
}
"""Keys of fairscale's files that are called as its own names."""


def private_names_used(file: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(file):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value, node.lineno


IN_SEVERAL_ADAPTERS = {
    *("_fsdp_wrapped_module", "_param_infos", "_shared_param_infos"),  # of fairscale's FSDP, and of torch's
    *("_buffers", "_non_persistent_buffers_set", "_local_tensor"),  # of nn.Module and of DTensor
}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, and named so that no field is called alike
# torch has no public name for these.
PRIVATE_OF_TORCH = {
    "fsdp_optim.transport.job.rendezvous": {"_get_process_group_store"},
    "fsdp_optim.memory": {"_foreach_copy_"},
    "fsdp_optim.dtensors": {"_local_tensor"},  # to_local() costs ten times as much
    "fsdp_optim.verbs.iterate": {"_version"},
    "fsdp_optim.checkpoint.common.module_values": {"_version"},
    "fsdp_optim.state.values.classes": {"_optimizer"},  # of a wrapper around an optimizer
    "fsdp_optim.checkpoint.common.pending": {"_register_atexit"},  # of threading: before pools of threads end
    "fsdp_optim.transport.job.leaving": {"_register_atexit"},  # of threading: forked processes have no other end
    # The keys of values in files of others.
    "fsdp_optim.foreign.per_rank.olmo_local": {
        *("_flat_param", "_fqns", "_shapes", "_shard_indices", "_shard_param_offsets", "_shard_param_infos"),
    },
    "fsdp_optim.foreign.per_rank.torch_shards": {
        *("_local_tensor", "_spec", "_rank", "_layout", "_flatten_rank_map", "_coordinate_on_dim"),
        *("_tensor", "_StridedShard", "_Partial"),
    },
    "fsdp_optim.foreign.per_rank.rank_tensors": {"_spec", "_rank"},
    "fsdp_optim.foreign.archive.torch_globals": {"_metadata"},  # the versions of modules, beside a state dict
    "fsdp_optim.foreign.torch.reader": {"_metadata"},
    "fsdp_optim.foreign.torch.roles": {"_extra_state"},  # the last part of the names of values that modules add
    "fsdp_optim.foreign.archive.torch_zip": {
        "_utils",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    },  # the names in torch's files
    "fsdp_optim.foreign.dcp.writer": {
        "_StorageInfo"
    },  # the class in the metadata files of torch.distributed.checkpoint
}


def names_given(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner_of(node) == "self":
            yield node.attr


class TestPrivateNames(unittest.TestCase):
    def test_only_its_adapter_touches_a_wrappers_private_names(self) -> None:
        wrong = []
        for module, file in MODULES.items():
            if floor_of(module) == "testing":  # it is a stand-in for what fairscale asks of CUDA
                continue
            for wrapper, names in PRIVATE.items():
                if module != f"{PACKAGE}.adapters.{wrapper}":
                    wrong += [
                        f"{module}, line {line}: {name} of {wrapper}"
                        for name, line in private_names_used(file)
                        if name in names - IN_FILES.get(module, set())
                    ]
        assert not wrong, wrong

    def test_nobody_else_touches_what_others_keep_private(self) -> None:
        """Outside of the adapters, and of the plug-ins of trainers, a private name is one that this package has given."""
        files = {m: file for m, file in MODULES.items() if floor_of(m) not in ("adapters", "testing", "integrations")}
        ours = {name for file in files.values() for name in names_given(tree_of(file))}
        wrong = [
            f"{module}, line {line}: {name}"
            for module, file in files.items()
            for name, line in private_names_used(file)
            if name.startswith("_")
            and not name.startswith("__")
            and name not in ours | OF_NAMED_TUPLES | PRIVATE_OF_TORCH.get(module, set())
        ]
        assert not wrong, wrong

    def test_a_private_name_is_known_to_one_adapter(self) -> None:
        """Nor do the integrations know it. Names that two wrappers have given alike, and torch's own, may be in several."""
        files = {m: file for m, file in MODULES.items() if floor_of(m) in ("adapters", "integrations")}
        ours = {name for file in MODULES.values() for name in names_given(tree_of(file))} | OF_NAMED_TUPLES
        users: dict[str, set[str]] = {}
        for module, file in files.items():
            for name, _ in private_names_used(file):
                if name.startswith("_") and not name.startswith("__") and name not in ours | IN_SEVERAL_ADAPTERS:
                    users.setdefault(name, set()).add(module)
        wrong = {name: used for name, used in users.items() if len(used) > 1}
        wrong = {
            name: used for name, used in wrong.items() if {floor_of(module) for module in used} != {"integrations"}
        }
        assert not wrong, wrong
        assert len([name for name, used in users.items() if used <= {f"{PACKAGE}.adapters.fsdp1"}]) >= 4

    def test_the_names_are_real(self) -> None:
        """The list above is of fairscale's names: its adapter uses some of them, and fairscale has them."""
        used = {name for name, _ in private_names_used(ROOT / "adapters" / "fairscale.py")}
        assert len(used & PRIVATE["fairscale"]) >= 4, used & PRIVATE["fairscale"]
        import fairscale

        text = "".join(file.read_text() for file in Path(fairscale.__file__).parent.rglob("nn/**/*.py"))
        assert not [name for name in PRIVATE["fairscale"] if name not in text]

    def test_fairscale_is_imported_where_users_ask_for_it_only(self) -> None:
        for module, file in MODULES.items():
            at_import = {name.split(".")[0] for name in imports(file, at_import=True)}
            if "fairscale" in at_import:
                assert module == f"{PACKAGE}.fairscale", f"{module} imports fairscale"


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
        bare, ours = loaded_by("import torch"), loaded_by(f"import {PACKAGE}")
        more = ours - bare
        wrong = {name for name in more if f"{name}.".startswith(WRAPPERS)}
        assert not wrong, sorted(wrong)
        assert f"{PACKAGE}.api" in ours
        assert f"{PACKAGE}.fairscale" not in ours
        assert f"{PACKAGE}.testing" not in ours
        assert not [name for name in ours if name.startswith(f"{PACKAGE}.integrations")]

    def test_asking_for_the_drop_in_loads_fairscale(self) -> None:
        loaded = loaded_by(f"from {PACKAGE}.fairscale import FullyShardedDataParallel")
        assert "fairscale" in loaded
        assert not [name for name in loaded if name.startswith("torch.distributed.fsdp.fully_sharded")]


def public_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes, and public methods of public classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if "overload" in [ast.unparse(decorator) for decorator in node.decorator_list]:
                continue
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node, f"{prefix}{node.name}.")


READ_BY_USERS = (
    *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "api").glob("*.py"))),
    "adapters/base.py",
    "checkpoint/run/manager.py",
    "testing/adapter_conformance.py",
    "fairscale.py",
    "testing/conformance.py",
    "testing/fairscale_cpu.py",
    "testing/ranks.py",
    "testing/worker.py",
)  # there methods need a docstring too


MOST_LINES, MOST_LINES_OF_FUNCTION = 400, 60


EXAMPLES = {f"{PACKAGE}.foreign.torch.roles"}  # "a key such as model, net or module"


class TestHouse(unittest.TestCase):
    def test_no_file_is_long(self) -> None:
        lines = {file: file.read_text().count("\n") for file in FILES}
        long = {str(file.relative_to(ROOT)): num for file, num in lines.items() if num > MOST_LINES}
        assert not long, long
        assert max(lines.values()) > MOST_LINES // 2

    def test_functions_fit_on_a_screen(self) -> None:
        """Without their docstrings, which are the contract and may be long."""
        long = {}
        for file in FILES:
            for node in ast.walk(tree_of(file)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                    lines = (node.end_lineno or 0) - body[0].lineno + 1
                    if lines > MOST_LINES_OF_FUNCTION:
                        long[f"{file.relative_to(ROOT)}: {node.name}"] = lines
        assert not long, long

    @parameterized.expand(
        [("adapters/base.py",), ("formats/base/protocols.py",), ("storage/base",), ("transport/base.py",)]
    )
    def test_protocols_fit_on_a_screen(self, place: str) -> None:
        files = [file for file in FILES if str(file.relative_to(ROOT)).startswith(place)]
        classes = [node for file in files for node in tree_of(file).body if isinstance(node, ast.ClassDef)]
        protocols = [
            node for node in classes if {ast.unparse(base).split("[")[0] for base in node.bases} & {"Protocol", "ABC"}
        ]
        assert protocols, place
        long = {node.name: lines for node in protocols if (lines := (node.end_lineno or 0) - node.lineno + 1) > 100}
        assert not long, long

    def test_lists_are_shortened_by_one_function(self) -> None:
        """Which names the number that it leaves out; a list that is cut in silence looks whole."""
        cut = []
        for module, file in MODULES.items():
            for node in nodes_of(file):
                is_join = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    (", '.join", "; '.join", "n'.join")
                )
                if is_join and any(isinstance(part, ast.Slice) for arg in node.args for part in ast.walk(arg)):
                    cut += [f"{module}, line {node.lineno}"] if module not in EXAMPLES else []
        assert not cut, cut

    def test_a_list_is_shortened(self) -> None:
        from fsdp_optim.errors import shortened

        self.assertEqual(shortened("abc", 3), "a, b, c")
        self.assertEqual(shortened("abcde", 3), "a, b, c and 2 more")
        self.assertEqual(shortened(["a: 1", "b: 2", "c: 3"], 2, "\n"), "a: 1\nb: 2\nand 1 more")
        self.assertEqual(shortened(iter((1, 2, 3)), 1, "; "), "1; and 2 more")
        self.assertEqual(shortened([]), "")

    def test_no_file_is_named_utils(self) -> None:
        named = [file for file in FILES if file.stem.strip("_") in ("utils", "util", "helpers", "common", "misc")]
        assert not named, named

    def test_every_file_and_public_function_has_a_docstring(self) -> None:
        missing = []
        for file in FILES:
            tree, name = tree_of(file), str(file.relative_to(ROOT))
            if tree.body and not ast.get_docstring(tree):
                missing.append(name)
            for function, node in public_functions(tree):
                is_method = "." in function
                if not ast.get_docstring(node) and (name in READ_BY_USERS or not is_method):
                    missing.append(f"{name}: {function}")
        assert not missing, missing

    def test_what_is_public_is_what_is_listed(self) -> None:
        import fsdp_optim

        assert sorted(fsdp_optim.__all__) == fsdp_optim.__all__
        for name in fsdp_optim.__all__:
            assert getattr(fsdp_optim, name).__doc__, name
        promised = {
            *("gather_full_optim_state_dict", "get_shard_from_optim_state_dict", "scatter_full_optim_state_dict"),
            *("iter_full_optim_state", "rekey_optim_state_dict", "load_optim_state_dict"),
        }
        assert promised <= set(fsdp_optim.__all__)

    def test_errors_are_builtin_errors_too(self) -> None:
        from fsdp_optim import errors

        builtin = {"LayoutError": ValueError, "StateError": ValueError, "WrapperError": TypeError}
        builtin |= {"RankError": RuntimeError, "RankTimeoutError": TimeoutError}
        for name, parent in builtin.items():
            assert issubclass(getattr(errors, name), (errors.FsdpOptimError,)), name
            assert issubclass(getattr(errors, name), parent), name

    def test_no_file_of_the_kit_hides_a_module_of_python(self) -> None:
        """A file of the kit that runs as a program has the kit's folder first in sys.path."""
        files = {file.stem for file in (Path(__file__).parent / "kit").glob("*.py")}
        self.assertEqual(sorted(files & sys.stdlib_module_names), [])

    def test_tests_share_by_the_kit_alone(self) -> None:
        """An error in one test's file is no error of another; `from kit.wrapping import ...` gets what tests share."""
        tests = Path(__file__).parent
        shared = {file.stem for file in (tests / "kit").glob("*.py")} - {"__init__"}
        # Only a file with such a line, which may also stand in a string, is worth parsing.
        line = re.compile(
            rf"^\s*(?:from|import)\s+(?:[\w. ]+,\s*)*(?:{'|'.join(sorted(shared))}|test_\w+|tests)\b", re.MULTILINE
        )
        files = sorted(tests.rglob("*.py"))
        found = []
        for file in [file for file in files if line.search(file.read_text())]:
            for node in ast.walk(tree_of(file)):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in modules:
                    if module in shared or module.startswith(("test_", "tests.")):
                        found.append(f"{file.relative_to(tests)}: {module}")
        assert not found, found


class TestConcepts(unittest.TestCase):
    """docs/concepts.md names every room, every placement and every end that there is, and no other."""

    text = (ROOT.parent / "docs" / "concepts.md").read_text()

    def test_rooms(self) -> None:
        block = self.text.split("## Rooms")[1].split("```")[1]
        left = " ".join(line[:46] for line in block.splitlines())
        named = set(re.findall(r"[a-z]\w+", left)) - {"base", "all"}
        floors = {room.split(".")[0] for room in ARROWS if room}
        self.assertEqual(named - floors, set())
        self.assertEqual(floors - named, {"speed", "__main__"})

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
