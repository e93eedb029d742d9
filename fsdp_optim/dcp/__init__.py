"""The face of torch.distributed.checkpoint: its functions and signatures, with this library's files and Layouts underneath.

    from fsdp_optim import dcp   # in place of: import torch.distributed.checkpoint as dcp

Files: `state_tree.py` tells the weights of a state dict from the rest, and a save stores them as a model's, with the optimizer
(`checkpoint/common/optim_trees.py`). `tree_view.py` lets a load see every checkpoint as one tree. `saving.py` and `loading.py`
have the calls; `meta_values.py` gives tensors on the meta device memory to load into.

Storage for torch's own calls: `writer.py` and `reader.py` (`at_path.py`: what both have), for `save(..., storage_writer=)` and
`load(..., storage_reader=)`. Torch calls, on a save: `set_up_storage_writer` and `prepare_local_plan` on all ranks,
`prepare_global_plan` on the coordinator (`planned_boxes.py`: which rank writes which box of a tensor; `staged_save.py`: the save
in the store), `write_data` on all ranks (`box_writing.py`), `finish` on the coordinator. On a load: `read_metadata`
(`torch_metadata.py`: the index as torch's metadata), `prepare_local_plan`, `prepare_global_plan`, `read_data`. `saved_values.py`
turns torch's bytes into plain values, and back.

State dicts: `state_dict.py` has the functions, in the order of a call: `options.py` reads torch's `StateDictOptions`;
`model_state.py` and `optim_state.py` read the live model and optimizers, whose values stay sharded as they are; `initial.py`
makes the values of an optimizer that has none yet; `flat.py` reads and fills the flat parameters of FSDP1; `values.py` unshards a
tree of values. A `set_*` function first brings all values into the form of the live ones, and changes the live model and
optimizers only then.

Names are imported when they are asked for: `_WHERE` is the one table of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_optim.registry import named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.checkpoint.stateful import Stateful

    from fsdp_optim.dcp.loading import load
    from fsdp_optim.dcp.reader import Reader
    from fsdp_optim.dcp.saving import async_save, save
    from fsdp_optim.dcp.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from fsdp_optim.dcp.writer import Writer

__all__ = [
    "Reader",
    "StateDictOptions",
    "Stateful",
    "Writer",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_PLACES = {
    "fsdp_optim.dcp.loading": "load",
    "fsdp_optim.dcp.reader": "Reader",
    "fsdp_optim.dcp.writer": "Writer",
    "fsdp_optim.dcp.saving": "async_save save",
    "fsdp_optim.dcp.state_dict": (
        "get_model_state_dict get_optimizer_state_dict get_state_dict "
        "set_model_state_dict set_optimizer_state_dict set_state_dict"
    ),
    "torch.distributed.checkpoint.state_dict": "StateDictOptions",
    "torch.distributed.checkpoint.stateful": "Stateful",
}
"""By module, its public names. torch's own classes are torch's, so that code which uses them stays as it is."""

_WHERE = {name: f"{module}:{name}" for module, names in _PLACES.items() for name in names.split()}


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first access."""
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return named(_WHERE[name])
