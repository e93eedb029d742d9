"""The trainer's objects that a CheckpointManager saves beside the model and the optimizer: those with a state_dict(), and random
states.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_optim.checkpoint.load.restored import Restored
from fsdp_optim.errors import StateError
from fsdp_optim.memory import detached_copy, is_plain

STATE, RANDOM, RANK = "state", "random", "rank"
"""The keys of `extra` and `per_rank_extra`."""

log = logging.getLogger("fsdp_optim")


class Stateful(Protocol):
    """A scheduler, a loader, a scaler, an EMA model: anything with these two methods."""

    def state_dict(self) -> Any:
        """The state as plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state that `state_dict` returned."""


@dataclass(frozen=True)
class TrainerState:
    """The objects of one manager. `common`: the lowest rank's state is saved; `per_rank`: each rank's own."""

    common: Mapping[str, Stateful]
    per_rank: Mapping[str, Stateful]
    rng: bool

    @property
    def names(self) -> dict[str, Any]:
        """The state that is equal on all ranks."""
        return {"state": sorted(self.common), "per_rank_state": sorted(self.per_rank), "rng": self.rng}

    def validate(self) -> None:
        """Raise StateError for an object that has no state, and for a name that is given twice."""
        for argument, objects in (("state", self.common), ("per_rank_state", self.per_rank)):
            if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
                raise StateError(
                    f"{argument} must be a dict from names to objects, as in {argument}={{'scheduler': scheduler}}, not "
                    f"{objects!r}"
                )
            for name, one in objects.items():
                lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(one, m, None))]
                if lacking:
                    raise StateError(f"{argument}[{name!r}], a {type(one).__name__}, does not have {lacking[0]}()")
        twice = sorted(set(self.common) & set(self.per_rank))
        if twice:
            raise StateError(f"{twice[0]!r} is in state and in per_rank_state: give it once")

    def extra(self) -> dict[str, Any]:
        """The common state of the ranks. All ranks call this method, because a state_dict() may be a collective call."""
        return {STATE: {name: _state_of(f"state[{name!r}]", one) for name, one in self.common.items()}}

    def per_rank_extra(self, position: int) -> dict[str, Any]:
        """The state of this rank alone. `position`: its index among the ranks."""
        state = {name: _state_of(f"per_rank_state[{name!r}]", one) for name, one in self.per_rank.items()}
        return {RANK: position, STATE: state, **({RANDOM: random_states()} if self.rng else {})}


@dataclass(frozen=True)
class LoadedState:
    """The objects of one manager during a load. `position`: the index of this rank. `strict`: names must be the saved ones."""

    objects: TrainerState
    position: int
    strict: bool

    def check(self, restored: Restored) -> None:
        """As `TrainerObjects.check`."""
        for argument, objects, saved in self._halves(restored):
            differing = sorted({*objects} ^ {*saved})
            if differing and self.strict:
                name = differing[0]
                here, there = (sorted(names) or "nothing" for names in (objects, saved))
                has_it = (
                    "this manager has it and the checkpoint does not"
                    if name in objects
                    else "only the checkpoint has it"
                )
                raise StateError(
                    f"{argument}[{name!r}]: {has_it}; {argument} is {here} here, and {there} in the checkpoint: give the same "
                    "objects, or strict=False to leave these as they are"
                )
            if differing and self.position == 0:
                log.warning("%s: %s is not loaded, because only one side has it", argument, ", ".join(differing))
        mine = self._random_in(restored)
        if mine is not None and mine.get(RANK) == self.position:
            _check_random(self.position, mine[RANDOM])

    def install(self, restored: Restored) -> None:
        """As `TrainerObjects.install`."""
        for argument, objects, saved in self._halves(restored):
            for name, one in objects.items():
                if name in saved:
                    _load(f"{argument}[{name!r}]", one, saved[name])

    def before(self, restored: Restored) -> dict[tuple[str, str], Any]:
        """As `TrainerObjects.before`. An object whose state_dict() fails before its first load has no state to get back."""
        previous = {}
        for argument, objects, saved in self._halves(restored):
            for name, one in objects.items():
                if name in saved:
                    with suppress(Exception):
                        previous[argument, name] = detached_copy(one.state_dict())
        return previous

    def put_back(self, previous: Any) -> None:
        """As `TrainerObjects.put_back`."""
        of = {"state": self.objects.common, "per_rank_state": self.objects.per_rank}
        for (argument, name), state in previous.items():
            try:
                of[argument][name].load_state_dict(state)
            except Exception:
                log.exception("the previous state of %s[%r] could not be restored", argument, name)

    def install_random(self, restored: Restored) -> None:
        """Set the random states. A rank that had none at the save keeps its own, so that no two ranks draw the same numbers."""
        if not self.objects.rng:
            return
        mine = self._random_in(restored)
        if mine is None:
            log.warning("the checkpoint has no random states (it was saved with rng=False), so they stay as they are")
        elif mine.get(RANK) != self.position:
            log.warning(
                "rank %d had no random states at the save, so it keeps its own: seed it as a rank that is new",
                self.position,
            )
        else:
            set_random_states(mine[RANDOM])

    def _random_in(self, restored: Restored) -> Mapping[str, Any] | None:
        """The values of a rank with its random states; None where there are none, or they are not asked for."""
        mine = restored.per_rank if isinstance(restored.per_rank, dict) else {}
        return mine if self.objects.rng and RANDOM in mine else None

    def _halves(self, restored: Restored) -> list[tuple[str, Mapping[str, Stateful], Mapping[str, Any]]]:
        per_rank = restored.per_rank if isinstance(restored.per_rank, dict) else {}
        return [
            ("state", self.objects.common, restored.get(STATE, {})),
            ("per_rank_state", self.objects.per_rank, per_rank.get(STATE, {})),
        ]


def _state_of(where: str, one: Stateful) -> Any:
    try:
        state = one.state_dict()
    except Exception as error:
        raise StateError(f"{where}: its state_dict() failed: {type(error).__name__}: {error}") from error
    _refuse_sharded(where, state)
    return state


def _refuse_sharded(where: str, value: Any) -> None:
    """Name a value that is cut over ranks: the part of one rank is not the common state of the ranks."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_sharded(f"{where}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_sharded(f"{where}[{index}]", item)
    elif not is_plain(value) and (hasattr(value, "placements") or callable(getattr(value, "local_shards", None))):
        raise StateError(
            f"{where}: is a {type(value).__name__}, which is cut over ranks: give a sharded module with the model, as in "
            "model=nn.ModuleDict({'model': model, 'ema': ema})"
        )


def _load(where: str, one: Stateful, state: Any) -> None:
    try:
        one.load_state_dict(state)
    except Exception as error:
        raise StateError(
            f"{where}: its load_state_dict() refused the saved state: {type(error).__name__}: {error}"
        ) from error


# ------------------------------------------------------------------------------------------ random states


def random_states() -> dict[str, Any]:
    """The states of all generators of this process that programs use without naming them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    device = _device_module()
    if device is not None:
        states[device[0]] = device[1].get_rng_state()
    return states


def _check_random(position: int, states: Mapping[str, Any]) -> None:
    """Raise StateError for random states that cannot be set. Those of this process stay."""
    now = random_states()
    try:
        set_random_states(states, warns=False)
    except Exception as error:
        raise StateError(
            f"the random states of rank {position} in the checkpoint cannot be set here: {type(error).__name__}: {error}: give "
            "the manager rng=False to leave those of this process as they are"
        ) from error
    finally:
        set_random_states(now, warns=False)


def set_random_states(states: Mapping[str, Any], *, warns: bool = True) -> None:
    """Set the states that `random_states` returned. Those of a device that is not here are passed by, with a warning."""
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
    """The kind of the accelerator that this process uses, with its module of torch; None without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    module = torch.get_device_module(device)
    is_initialized = getattr(module, "is_initialized", None)
    return (device.type, module) if is_initialized is None or is_initialized() else None
