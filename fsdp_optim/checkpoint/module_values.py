"""What state_dict() has of modules beside parameters and buffers, on its way to a checkpoint and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.adapters.module_values import put
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import MODULES, Reader
from fsdp_optim.formats.codec import Withheld
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.memory import own
from fsdp_optim.state.picture import Picture
from fsdp_optim.state.same import same
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.parcels import NOTHING, Parcel, send
from fsdp_optim.view import ModuleValues

_MOST_NAMED = 8

log = logging.getLogger("fsdp_optim")


def collect(callers: RankGroup, local: ModuleValues, picture: Picture) -> dict[str, list[Any]]:
    """The values of all ranks by FQN, each with the version of its module's code, on the lowest rank. Called by all ranks.

    Nothing travels where the lowest rank has all modules itself.
    """
    leader = callers.ranks[0]
    if callers.rank == leader:
        _warn_of_the_rest(local)
    sources = {fqn: ranks[0] for fqn, ranks in picture.module_values.items()}
    away = [fqn for fqn, rank in sources.items() if rank != leader]
    arrived: dict[int, Any] = {}
    if away:
        failure = Failure()
        parcels = [Parcel(sources[fqn], (leader,)) for fqn in away]
        arrived = send(callers, parcels, lambda index: _versioned(local, away[index]), failure)
        agree(callers, "module values", failure.error, fatal=failure.fatal)
    if callers.rank != leader:
        return {}
    from_away = dict(zip(away, (arrived.get(index, NOTHING) for index in range(len(away))), strict=True))
    return {fqn: from_away[fqn] if fqn in from_away else _versioned(local, fqn) for fqn in sources}


def _versioned(local: ModuleValues, fqn: str) -> list[Any]:
    one = local.values[fqn]
    value = one.value.detach() if isinstance(one.value, torch.Tensor) else one.value
    return [getattr(one.module, "_version", None), value]


def _warn_of_the_rest(local: ModuleValues) -> None:
    if local.lost:
        log.warning(
            "not saved, because their modules could not take them back (they have no set_extra_state() or "
            "_load_from_state_dict()): %s",
            _listed(local.lost),
        )
    if local.hooked:
        log.warning(
            "state-dict hooks are not run: what is saved has the names of modules and attributes, without what hooks rename, "
            "remove or add: %s",
            _listed(local.hooked),
        )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


@dataclass(frozen=True)
class StoredValues:
    """What a checkpoint has for the modules of this rank, checked, and what the modules have now.

    Attributes:
        given: by FQN, the version of the code that saved it and the value.
        missing, unexpected: names that only the model has, or only the checkpoint.
    """

    local: ModuleValues
    given: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        local: ModuleValues,
        picture: Picture,
        checkpoint: Reader,
        *,
        verify: bool,
        allow_pickle: bool,
        strict: bool,
    ) -> StoredValues:
        """Match the values of a checkpoint with the live modules, by any of their names.

        Raises CheckpointError for one that is pickled, unless that is allowed, or `strict` is not.
        """
        stored = _stored(checkpoint, verify=verify, allow_pickle=allow_pickle)
        aliases = checkpoint.aliases
        given: dict[str, tuple[Any, Any]] = {}
        withheld, used = [], set()
        names: dict[str, tuple[str | None, ...]] = {fqn: (fqn, aliases.get(fqn)) for fqn in picture.module_values}
        names.update({fqn: (fqn, aliases.get(fqn), *one.others) for fqn, one in local.values.items()})
        names.update({fqn: (fqn,) for fqn in stored if fqn not in names and _is_taken(fqn, picture.module_takers)})
        for fqn, its in names.items():
            name = next((name for name in its if name in stored), None)
            if name is None:
                continue
            used.add(name)
            if fqn not in local.values and local.taker_of(fqn) is None:
                continue  # other ranks have it
            if isinstance(stored[name], Withheld):
                withheld.append(fqn)
                if strict:
                    raise CheckpointError(f"{stored[name].why}; strict=False leaves what the model has")
            else:
                given[fqn] = stored[name]
        lacking = [fqn for fqn in picture.module_values if not any(name in stored for name in names[fqn])]
        return cls(local, given, (*lacking, *withheld), tuple(name for name in stored if name not in used))

    def before(self) -> dict[str, Any]:
        """What the modules have now of all that they are given."""
        return {fqn: own(one.value) for fqn, one in self.local.values.items() if fqn in self.given}

    def install(self) -> None:
        """Give the modules their values. Raises StateError where one does not take them."""
        self._put({fqn: value for fqn, (_, value) in self.given.items()}, as_saved=True)

    def put_back(self, had: Mapping[str, Any]) -> None:
        """Undo what was installed. Raises nothing: something has gone wrong already."""
        try:
            self._put(had, as_saved=False)
        except Exception:
            log.exception("the modules could not be given back what they had: %s", _listed(tuple(had)))

    def _put(self, values: Mapping[str, Any], *, as_saved: bool) -> None:
        by_module: dict[Any, tuple[str, dict[str, Any], Any]] = {}
        for fqn, value in values.items():
            live = self.local.values.get(fqn)
            taker = self.local.taker_of(fqn) if live is None else None
            if live is not None:
                module, key, value = live.module, live.key, _where(value, live.value)
            elif taker is not None:
                module, key = taker
            else:
                continue
            version = self.given[fqn][0] if as_saved else getattr(module, "_version", None)
            by_module.setdefault(module, (fqn.removesuffix(key).rstrip("."), {}, version))[1][key] = value
        for module, (path, its, version) in by_module.items():
            put(module, its, path, version)

    def check(self, now: ModuleValues) -> None:
        """Raise CheckpointError where a module has something else than what was saved. `now`: what it has by now."""
        for fqn, (_, value) in self.given.items():
            if fqn not in now.values or not same(own(now.values[fqn].value), own(value)):
                raise CheckpointError(f"{fqn}: what the live model has is not what was saved")


def _stored(checkpoint: Reader, *, verify: bool, allow_pickle: bool) -> dict[str, Any]:
    """By FQN, the version and the value, or Withheld."""
    if MODULES not in checkpoint.extras:
        return {}
    saved = checkpoint.extra(MODULES, verify=verify).decoded_each(allow_pickle=allow_pickle)
    found: dict[str, Any] = {}
    with distrusted(f"{checkpoint.where}: the values of its modules"):
        for fqn, one in saved.items():
            if isinstance(one, Withheld):
                found[fqn] = one
                continue
            version, value = one
            if not isinstance(fqn, str) or type(version) not in (int, float, str, type(None)):
                raise ValueError(f"{fqn!r} is no value of a module")
            found[fqn] = (version, value)
    return found


def _is_taken(fqn: str, paths: tuple[str, ...]) -> bool:
    return any(not path or fqn.startswith(f"{path}.") for path in paths)


def _where(value: Any, live: Any) -> Any:
    """A value with its tensors where those of the live one are: a checkpoint has all on the host."""
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    if type(value) is dict and isinstance(live, Mapping):
        return {key: _where(item, live.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple) and isinstance(live, (list, tuple)) and len(value) == len(live):
        return type(value)(_where(item, there) for item, there in zip(value, live, strict=True))
    return value
