"""The values in a state_dict() besides parameters and buffers (extra state of modules), for saves and loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.adapters.module_values import put
from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import MODULES
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import detached_copy
from fsdp_optim.tensors.model_dict import plain_version
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.parcels import Parcel, send
from fsdp_optim.view import ModuleValues

log = logging.getLogger("fsdp_optim")


def collect(
    group: RankGroup, local: ModuleValues, global_state: GlobalState, recipients: tuple[int, ...] = ()
) -> dict[str, list[Any]]:
    """Collect the values of all ranks by FQN, each with the version of its module's code, on the recipients.

    Called by all ranks.

    No rank sends anything if every recipient has all modules itself. `recipients` (): the lowest rank.
    """
    recipients = recipients or group.ranks[:1]
    if group.rank == group.ranks[0]:
        _warn_of_the_rest(local)
    sources = {
        fqn: (ranks[0], tuple(rank for rank in recipients if rank not in ranks))
        for fqn, ranks in global_state.module_values.items()
    }
    away = [fqn for fqn, (_, lacking) in sources.items() if lacking]
    arrived: dict[int, Any] = {}
    if away:
        failure = Failure()
        parcels = [Parcel(*sources[fqn]) for fqn in away]
        arrived = send(group, parcels, lambda index: _versioned(local, away[index]), failure)
        agree(group, "module values", failure.error, fatal=failure.fatal)
    if group.rank not in recipients:
        return {}
    from_away = {away[index]: value for index, value in arrived.items()}
    return {fqn: _versioned(local, fqn) if fqn in local.values else from_away[fqn] for fqn in sources}


def _versioned(local: ModuleValues, fqn: str) -> list[Any]:
    live = local.values[fqn]
    value = live.value.detach() if isinstance(live.value, torch.Tensor) else live.value
    return [plain_version(getattr(live.module, "_version", None)), value]


def _warn_of_the_rest(local: ModuleValues) -> None:
    if local.lost:
        log.warning(
            "not saved, because their modules could not load them (they lack set_extra_state() and "
            "_load_from_state_dict()): %s",
            shortened(local.lost),
        )
    if local.hooked:
        log.warning(
            "state-dict hooks are not run, so their changes are ignored; values are saved under the names of modules and "
            "attributes (views='hooks' gives those of hooks that rename, cut or permute): %s",
            shortened(local.hooked),
        )


@dataclass(frozen=True)
class StoredModuleValues:
    """The values of a checkpoint for the modules of this rank, and the live modules.

    Attributes:
        stored: by FQN, the version of the module's code that saved, and the value.
        missing, unexpected: names that only the model or only the checkpoint has.
    """

    local: ModuleValues
    stored: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        local: ModuleValues,
        global_state: GlobalState,
        index: CheckpointIndex,
        *,
        allow_pickle: bool,
        strict: bool,
        renamed: Callable[[str], str] = lambda name: name,
    ) -> StoredModuleValues:
        """Match the values of a checkpoint with the live modules, by any of their names; `renamed` gives the model's names.

        Raises CheckpointError for a pickled value, unless pickles are allowed or `strict` is False.
        """
        by_name = {renamed(name): value for name, value in _stored(index, allow_pickle=allow_pickle).items()}
        aliases = index.aliases
        stored: dict[str, tuple[Any, Any]] = {}
        withheld, used = [], set()
        names: dict[str, tuple[str | None, ...]] = {fqn: (fqn, aliases.get(fqn)) for fqn in global_state.module_values}
        names.update({fqn: (fqn, aliases.get(fqn), *live.others) for fqn, live in local.values.items()})
        names.update(
            {fqn: (fqn,) for fqn in by_name if fqn not in names and _is_taken(fqn, global_state.extra_state_loaders)}
        )
        for fqn, candidates in names.items():
            there = [name for name in dict.fromkeys(candidates) if name in by_name]
            if not there:
                continue
            name = there[0]
            used |= {other for other in there if other == name or _are_same(by_name[name], by_name[other])}
            if fqn not in local.values and local.extra_state_loader_of(fqn) is None:
                continue  # other ranks have it
            if isinstance(by_name[name], Withheld):
                withheld.append(fqn)
                if strict:
                    raise CheckpointError(f"{by_name[name].why}; strict=False keeps the value of the model")
            else:
                stored[fqn] = by_name[name]
        lacking = [fqn for fqn in global_state.module_values if not any(name in by_name for name in names[fqn])]
        return cls(local, stored, (*lacking, *withheld), tuple(name for name in by_name if name not in used))

    def before(self) -> dict[str, Any]:
        """Return copies of the live values that `install` replaces, by FQN."""
        return {fqn: detached_copy(live.value) for fqn, live in self.local.values.items() if fqn in self.stored}

    def install(self) -> None:
        """Load the stored values into the modules. Raises StateError if a module refuses its values."""
        self._put({fqn: value for fqn, (_, value) in self.stored.items()}, as_saved=True)

    def put_back(self, previous: Mapping[str, Any]) -> None:
        """Load the previous values into the modules. Raises nothing, because an error is on its way."""
        try:
            self._put(previous, as_saved=False)
        except Exception:
            log.exception("the previous values of modules could not be restored: %s", shortened(previous))

    def _put(self, values: Mapping[str, Any], *, as_saved: bool) -> None:
        by_module: dict[Any, tuple[str, dict[str, Any], Any]] = {}
        for fqn, value in values.items():
            live = self.local.values.get(fqn)
            taker = self.local.extra_state_loader_of(fqn) if live is None else None
            if live is not None:
                modules, key = (live.module, *(twin.module for twin in live.stage_copies)), live.key
            elif taker is not None:
                modules, key = taker[:1], taker[1]
            else:
                continue
            for module in modules:
                version = self.stored[fqn][0] if as_saved else getattr(module, "_version", None)
                copied = detached_copy(value)  # a module may keep it, and change it
                taken = _on_device_of(live.value, copied) if live is not None else copied
                by_module.setdefault(module, (fqn.removesuffix(key).rstrip("."), {}, version))[1][key] = taken
        for module, (path, its_values, version) in by_module.items():
            put(module, its_values, path, version)

    def check(self, now: ModuleValues) -> None:
        """Raise CheckpointError if a live value differs from the saved one. `now`: the values of the modules after the load."""
        for fqn, (_, value) in self.stored.items():
            if fqn not in now.values or not same(detached_copy(now.values[fqn].value), detached_copy(value)):
                raise CheckpointError(f"{fqn}: the value in the live model differs from the saved value")


def _stored(index: CheckpointIndex, *, allow_pickle: bool) -> dict[str, Any]:
    """Return the stored version and value, or Withheld, by FQN."""
    if MODULES not in index.extras:
        return {}
    saved = index.extras[MODULES].decoded_each(allow_pickle=allow_pickle)
    by_name: dict[str, Any] = {}
    with as_checkpoint_error(f"{index.where}: the values of its modules"):
        for fqn, versioned in saved.items():
            if isinstance(versioned, Withheld):
                by_name[fqn] = versioned
                continue
            version, value = versioned
            if not isinstance(fqn, str) or type(version) not in (int, float, str, type(None)):
                raise ValueError(f"{fqn!r} is not the name of a value with its version")
            by_name[fqn] = (version, value)
    return by_name


def _are_same(stored: Any, other: Any) -> bool:
    """Return whether two stored values of one module are the same, or both are withheld."""
    if isinstance(stored, Withheld) or isinstance(other, Withheld):
        return isinstance(stored, Withheld) and isinstance(other, Withheld)
    return same(stored, other)


def _is_taken(fqn: str, paths: tuple[str, ...]) -> bool:
    return any(not path or fqn.startswith(f"{path}.") for path in paths)


def _on_device_of(live: Any, value: Any) -> Any:
    """Return a value with its tensors on the devices of the live tensors. Tensors of a checkpoint are on the host."""
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    if type(value) is dict and isinstance(live, Mapping):
        return {key: _on_device_of(live.get(key), item) for key, item in value.items()}
    if type(value) in (list, tuple) and isinstance(live, (list, tuple)) and len(value) == len(live):
        return type(value)(_on_device_of(live_item, item) for item, live_item in zip(value, live, strict=True))
    return value
