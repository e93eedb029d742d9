"""Which private names of torch and of the wrappers each file may use."""

from __future__ import annotations

import ast
import functools
import unittest
from collections.abc import Iterator
from pathlib import Path

from kit.source_tree import MODULES, PACKAGE, ROOT, floor_of, imports, nodes_of, owner_of

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
    "_init_from_local_shards_and_global_metadata",  # of ShardedTensor, which has no public name for it
    *("_fsdp_wrapped_module", "_param_infos", "_shared_param_infos"),  # of fairscale's FSDP, and of torch's
    *(
        "_buffers",
        "_parameters",
        "_non_persistent_buffers_set",
        "_local_tensor",
        "_spec",
    ),  # of nn.Module and of DTensor
}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, and named so that no field is called alike

# torch has no public name for these.
PRIVATE_OF_TORCH = {
    "fsdp_optim.transport.job.job_store": {"_get_process_group_store"},
    "fsdp_optim.tensors.memory": {"_foreach_copy_"},
    "fsdp_optim.prints.sums": {"_int_mm"},  # products of int8; looked for, and proven exact, before it is used
    # to_local() and from_local() cost ten times as much, and the properties that a spec has cost a look each.
    # The last one is what Megatron-FSDP gives a mesh, by which its DTensors are cut in another order.
    "fsdp_optim.tensors.dtensors": {"_local_tensor", "_spec", "_shard_order"},
    "fsdp_optim.adapters.dtensor": {"_spec"},
    "fsdp_optim.adapters.dtensor_handle": {"_local_tensor", "_spec"},
    "fsdp_optim.verbs.iterate": {"_version"},
    "fsdp_optim.model_views.guard": {
        "_schema",  # which arguments an operation writes into
        *("_c10d_functional", "_c10d_functional_autograd"),  # namespaces of collective operations
    },
    "fsdp_optim.model_views.kinds": {"_WrappedHook"},  # what torch keeps a hook of load_state_dict() in
    "fsdp_optim.checkpoint.common.module_values": {"_version"},
    # What modules add to a state dict, and the versions of their code, which are beside it.
    "fsdp_optim.tensors.model_dict": {"_extra_state", "_metadata"},
    "fsdp_optim.checkpoint.proof.observed": {"_input_metadata"},  # the dtypes of a node of autograd's graph
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
    "fsdp_optim.foreign.archive.torch_zip": {
        "_utils",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    },  # the names in torch's files
    "fsdp_optim.foreign.dcp.written_metadata": {
        *("_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout")
    },  # names in the metadata files of torch.distributed.checkpoint
}


@functools.cache
def names_given(file: Path) -> frozenset[str]:
    """The names that a file defines: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in nodes_of(file):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner_of(node) == "self":
            names.add(node.attr)
    return frozenset(names)


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
        given = {name for file in files.values() for name in names_given(file)}
        wrong = [
            f"{module}, line {line}: {name}"
            for module, file in files.items()
            for name, line in private_names_used(file)
            if name.startswith("_")
            and not name.startswith("__")
            and name not in given | OF_NAMED_TUPLES | PRIVATE_OF_TORCH.get(module, set())
        ]
        assert not wrong, wrong

    def test_a_private_name_is_known_to_one_adapter(self) -> None:
        """Nor do the integrations know it. Names that two wrappers have given alike, and torch's own, may be in several."""
        files = {m: file for m, file in MODULES.items() if floor_of(m) in ("adapters", "integrations")}
        given = {name for file in MODULES.values() for name in names_given(file)} | OF_NAMED_TUPLES
        users: dict[str, set[str]] = {}
        for module, file in files.items():
            for name, _ in private_names_used(file):
                if name.startswith("_") and not name.startswith("__") and name not in given | IN_SEVERAL_ADAPTERS:
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
