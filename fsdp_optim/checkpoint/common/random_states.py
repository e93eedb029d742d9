"""The random states of this process, which a CheckpointManager saves and loads for each rank."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_optim.errors import StateError

log = logging.getLogger("fsdp_optim")


def random_states() -> dict[str, Any]:
    """Return the states of all global generators of this process, which programs use without naming them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    device = _device_module()
    if device is not None:
        states[device[0]] = device[1].get_rng_state()
    return states


def check_random_states(position: int, states: Mapping[str, Any]) -> None:
    """Raise StateError for random states that cannot be set. The states of this process stay."""
    now = random_states()
    try:
        set_random_states(states, warns=False)
    except Exception as error:
        raise StateError(
            f"the random states of rank {position} in the checkpoint cannot be set here: {type(error).__name__}: {error}: give "
            "the manager options=ManagerOptions(rng=False) to leave those of this process as they are"
        ) from error
    finally:
        set_random_states(now, warns=False)


def set_random_states(states: Mapping[str, Any], *, warns: bool = True) -> None:
    """Set the states that `random_states` returned. States of a device that is not here are skipped with a warning."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    device = _device_module()
    for name in set(states) - {"python", "torch", "numpy"}:
        if device is not None and device[0] == name:
            device[1].set_rng_state(states[name])
        elif warns:
            log.warning("the random state of %s is not loaded, because this process does not use such a device", name)


def _device_module() -> tuple[str, Any] | None:
    """Return the kind of the accelerator that this process uses, with its module of torch; None without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    module = torch.get_device_module(device)
    is_initialized = getattr(module, "is_initialized", None)
    return (device.type, module) if is_initialized is None or is_initialized() else None
