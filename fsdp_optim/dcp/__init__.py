"""The face of torch.distributed.checkpoint: its functions and signatures, with this library's Layouts underneath.

    from fsdp_optim import dcp   # in place of torch.distributed.checkpoint.state_dict

`state_dict.py` has the functions, in the order of a call: `options.py` reads torch's `StateDictOptions`; `model_state.py` and
`optim_state.py` read the live model and optimizers, whose values stay sharded as they are; `initial.py` makes the values of an
optimizer that has none yet; `flat.py` reads and fills the flat parameters of FSDP1; `values.py` unshards a tree of values. A
`set_*` function first brings all values into the form of the live ones, and changes the live model and optimizers only then.

Names are imported when they are asked for: `_WHERE` is the one table of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_optim.registry import named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.checkpoint.stateful import Stateful

    from fsdp_optim.dcp.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )

__all__ = [
    "StateDictOptions",
    "Stateful",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_PLACES = {
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
