"""torch's `StateDictOptions`, read: every option is honoured here or refused by its name."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fsdp_optim.errors import StateError

SOURCE_RANK = 0
"""The global rank of `broadcast_from_rank0`, and the one that gets full values with `cpu_offload`."""


@dataclass(frozen=True)
class Given:
    """The options of a call.

    Attributes:
        full: unshard all values.
        to_cpu: move all values to the CPU. With `full`, only the lowest rank gets them, and the others get an empty dict.
        ignore_frozen: leave parameters that need no gradients out of the model's dict.
        keep_prefixes: keep the paths of `submodules` in the names.
        strict: refuse names that only the dict or only the model has.
        broadcast: only rank 0 has the dict to load.
        flatten: one level of keys in the optimizer's dict.
    """

    full: bool = False
    to_cpu: bool = False
    ignore_frozen: bool = False
    keep_prefixes: bool = True
    strict: bool = True
    broadcast: bool = False
    flatten: bool = False


_FIELDS = {
    "full_state_dict": "full",
    "cpu_offload": "to_cpu",
    "ignore_frozen_params": "ignore_frozen",
    "keep_submodule_prefixes": "keep_prefixes",
    "strict": "strict",
    "broadcast_from_rank0": "broadcast",
    "flatten_optimizer_state_dict": "flatten",
}
_NEEDLESS = {"dsd_fqn_modifiers"}
"""Options that say what is known here without them: the keys are those of `model.state_dict()`, after the model's own hooks."""


def read_options(options: Any) -> Given:
    """Return the options of a call. None: torch's defaults.

    Raises StateError for an option that this library does not know, unless it has its default; and for
    `broadcast_from_rank0` without `full_state_dict`.
    """
    if options is None:
        return Given()
    if not is_dataclass(options) or isinstance(options, type):
        raise StateError(
            f"options must be torch's StateDictOptions, as in options=StateDictOptions(strict=False), not {options!r}"
        )
    given: dict[str, bool] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in _FIELDS:
            given[_FIELDS[option.name]] = bool(value)
        elif option.name not in _NEEDLESS and value != option.default:
            raise StateError(
                f"{option.name}={value!r}: fsdp_optim.dcp does not know this option of StateDictOptions: leave it at its default"
            )
    read = Given(**given)
    if read.broadcast and not read.full:
        raise StateError(
            "broadcast_from_rank0=True without full_state_dict=True: full_state_dict must be True when broadcast_from_rank0 is "
            "True, because rank 0 must have the unsharded values that it sends"
        )
    return read


def not_of_dicts(views: str) -> str:
    """Return why a state dict is not seen through Views that a live model shows."""
    return (
        f"views={views!r}: a state dict has no modules that would show Views: give views=fsdp_optim.views_for(model), or save "
        "and load the live model by fsdp_optim.save and load"
    )
