"""This library in the place of torch's, in a test file of torch.distributed.checkpoint. `LIBRARY` says what is replaced:

- "ours": the state dicts' functions, and `save`, `load` and `async_save`. A FileSystemWriter is the path that it was given; where
  a test gives a planner of its own class or another storage, `fsdp_optim.dcp` lets torch make the call, as it does for users.
- "storage": the storage alone, `Writer` and `Reader`, in torch's own calls.
- "torch": nothing.
"""

from __future__ import annotations

import os
import types
from typing import Any

LIBRARY = "FSDP_OPTIM_CONFORMANCE"
LIBRARIES = ("torch", "ours", "storage")
NAMES = (
    *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
    *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
)
_OF_THE_WRITER = (  # arguments of torch's FileSystemWriter that say how it writes its own files
    *("single_file_per_rank", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"),
    *("_extensions", "serialization_format"),
)


def replace_names(namespace: dict[str, Any]) -> None:
    """Replace torch's names in a test file. Called at the end of the file."""
    library = os.environ.get(LIBRARY, "torch")
    if library == "torch":
        return
    import torch.distributed.checkpoint as dcp
    import torch.testing._internal.distributed.common_state_dict as mixin
    from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils

    ours = _storage()
    for module in (
        dcp,
        filesystem,
        _storage_utils,
        format_utils,
        _fsspec_filesystem,
    ):  # whose classes have torch's as a base
        _replace(vars(module), {name: made for name, made in ours.items() if name in vars(module)})
    if library == "ours":
        ours |= _functions(ours)
        _replace(vars(mixin), {name: ours[name] for name in NAMES})
    _replace(namespace, {name: made for name, made in ours.items() if name in namespace})
    for name, value in list(namespace.items()):
        if isinstance(value, types.ModuleType) and value.__name__.startswith("torch.distributed.checkpoint"):
            replaced = {inner: made for inner, made in ours.items() if hasattr(value, inner)}
            namespace[name] = types.SimpleNamespace(**{**vars(value), **replaced})


def _replace(namespace: dict[str, Any], names: dict[str, Any]) -> None:
    namespace.update(names)


def _storage() -> dict[str, Any]:
    """Return this library's classes, with the arguments that torch's take."""
    from fsdp_optim.dcp import Reader, Writer

    class ReplacedWriter(Writer):
        def __init__(self, path: Any, sync_files: bool = True, overwrite: bool = True, **others: Any) -> None:
            if not set(others) <= set(_OF_THE_WRITER):
                raise TypeError(f"a FileSystemWriter with {others}")
            super().__init__(path, overwrite=overwrite, durable=sync_files)
            self.may_overwrite = overwrite

    class ReplacedReader(Reader):
        def __init__(self, path: Any, **others: Any) -> None:
            super().__init__(path)

    return {"FileSystemWriter": ReplacedWriter, "FileSystemReader": ReplacedReader}


def _functions(storage: dict[str, Any]) -> dict[str, Any]:
    """Return this library's functions, which take a path where a test gives torch's storage and its default planner."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_loader import load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save_state_dict

    from fsdp_optim import dcp

    storages = tuple(storage.values())

    def place(given: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the arguments of a call with the path of torch's storage in the place of it."""
        given = {name: value for name, value in given.items() if value is not None}
        if type(given.get("planner")) in (DefaultSavePlanner, DefaultLoadPlanner):
            planner = given["planner"]
            if vars(planner) == vars(type(planner)()):
                del given["planner"]
        default = type(given.get(key)) in storages and getattr(given[key], "may_overwrite", True)
        if default and "planner" not in given:
            path = given.pop(key).checkpoint_id
            given.setdefault("checkpoint_id", path)
        return given

    def save(state_dict: Any, *args: Any, **given: Any) -> Any:
        return dcp.save(state_dict, *args, **place(given, "storage_writer"))

    def async_save(state_dict: Any, *args: Any, **given: Any) -> Any:
        return dcp.async_save(state_dict, *args, **place(given, "storage_writer"))

    def load(state_dict: Any, *args: Any, **given: Any) -> Any:
        return dcp.load(state_dict, *args, **place(given, "storage_reader"))

    def older(by_torch: Any, by_ours: Any, key: str) -> Any:
        """`save_state_dict` or `load_state_dict`, which this library does not have: `save` or `load` to its storage."""

        def call(state_dict: Any, storage: Any = None, **given: Any) -> Any:
            given = {key: storage if storage is not None else given.pop(key), **given}
            if type(given[key]) in storages and not given.get("coordinator_rank"):
                return by_ours(
                    state_dict, **{name: value for name, value in given.items() if name != "coordinator_rank"}
                )
            return by_torch(state_dict, **given)

        return call

    made = {"save": save, "load": load, "async_save": async_save}
    made["save_state_dict"] = older(save_state_dict, save, "storage_writer")
    made["load_state_dict"] = older(load_state_dict, load, "storage_reader")
    return {name: getattr(dcp, name) for name in NAMES} | made
